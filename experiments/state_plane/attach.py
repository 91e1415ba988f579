"""A process that attaches an agent's weights and its instance's pages, and how soon it computes.

`python -m experiments.state_plane.attach CONFIG START` is one such process.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from experiments.state_plane.gaps import ENGINE, config_of
from kvrs.config.file import ENV_NAME, Config, load_config, read_secrets
from kvrs.elastic import grain
from kvrs.engine.anchored import AnchoredMemory, tensor_of
from kvrs.engine.layers.tiles import TILE_ROWS
from kvrs.engine.layers.units import CANONICAL
from kvrs.engine.model_config import ModelConfig
from kvrs.engine.models.arena import Arena
from kvrs.engine.models.decoder import Decoder
from kvrs.engine.models.digests import file_states
from kvrs.engine.models.loading import read_decoder, skeleton
from kvrs.engine.models.weights import Weights
from kvrs.engine.worker import geometry_of
from kvrs.ids import NodeId
from kvrs.transfer.anchors.files import AnchoredFiles
from kvrs.transfer.shared_memory.regions import map_file
from kvrs.transfer.shared_memory.sealed import kind_of
from kvrs.transfer.store.directory import store_directory
from kvrs_testkit.processes import Processes

NODE = NodeId("n0")
BAR_S, FAULTS_S_PER_GB = 0.005, 0.08


def run(model: Path, repeats: int) -> dict[str, Any]:
    """So many processes, one after the other, each of which attaches in both ways."""
    right = _products(_read(model))
    with Processes(config_of(model, anchored=True)) as processes:
        processes.start("agent-n0")
        processes.wait_ready("agent-n0")
        found = [_one(processes, start) for start in range(1, repeats + 2)]
    first, *rows = found
    assert first["is_new"], "the first one has written the arena"
    size_gb = first["size_bytes"] / 1e9
    bars_s = {"unpopulated_s": BAR_S + FAULTS_S_PER_GB * size_gb, "populated_s": BAR_S}
    medians_s = {key: statistics.median(each[key] for each in rows) for key in bars_s}
    return {
        "size_bytes": first["size_bytes"],
        "rows": rows,
        "bars_s": bars_s,
        "missed": sum(medians_s[key] > bar_s for key, bar_s in bars_s.items()),
        "different": sum(row["products"] != right for row in found),
    }


def _one(processes: Processes, start: int) -> dict[str, Any]:
    path = processes.directory / "config.yaml"
    command = [sys.executable, "-m", "experiments.state_plane.attach", str(path), str(start)]
    secret = {ENV_NAME: processes.secret.decode(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=os.environ | secret, stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def attach(config: Config, secret: bytes, start: int) -> dict[str, Any]:
    """In a process that has computed nothing with these weights. Without anything populated: from
    the request for weights to a product with a matrix of them. With weights that are mapped and
    populated, as a spare has them: from the request for the instance's pages to a product.
    """
    assert config.cluster.model is not None
    directory, engine = Path(config.cluster.model), config.cluster.engine
    model, weights = ModelConfig.from_directory(directory), Weights(directory)
    arena = Arena(skeleton(model))
    rows = _rows(model)
    torch.mm(rows, torch.zeros(model.hidden, model.hidden))  # The library's own start.
    memory = AnchoredMemory(config, NODE, ENGINE, secret)
    place = store_directory(config.backup.directory, secret, NODE)
    key = kind_of(grain.VERSION, file_states([directory / "config.json", *weights.files]))
    is_new = start == 1
    if is_new:  # By the product's own way: the arena is written, and read.
        assert memory.decoder(model, weights, directory, 16) is not None, "there is an agent"
    own_bytes = _own_bytes()

    began_s = time.perf_counter()
    with AnchoredFiles.of_agent(place, config.state_plane.wait_s, 0) as files:
        descriptor, to_write = files.weights(key, arena.size_bytes)
    assert to_write is None
    mapped = tensor_of(map_file(descriptor, writable=False, populated=True))
    assert arena.root(mapped) is not None
    decoder = arena.decoder(mapped)
    mapped_s = time.perf_counter() - began_s
    one = _product(decoder, rows, 0)
    unpopulated_s = time.perf_counter() - began_s
    copied_bytes = _own_bytes() - own_bytes

    geometry = geometry_of(model, engine)
    began_s = time.perf_counter()
    pool = memory.pool(start, geometry, engine.pages, engine.max_running, "attach")
    other = _product(decoder, rows, -1)
    populated_s = time.perf_counter() - began_s
    assert pool is not None, "there is an agent"
    return {
        "size_bytes": arena.size_bytes,
        "is_new": is_new,
        "unpopulated_s": unpopulated_s,
        "mapped_s": mapped_s,
        "populated_s": populated_s,
        "copied_bytes": copied_bytes,
        "products": [_digest(one), _digest(other)],
    }


def _rows(model: ModelConfig) -> Tensor:
    return torch.linspace(-1, 1, TILE_ROWS * model.hidden).view(TILE_ROWS, model.hidden)


def _product(decoder: Decoder, rows: Tensor, layer: int) -> Tensor:
    return decoder.layers[layer].attention.qkv.unit(rows, 0, CANONICAL)


def _read(directory: Path) -> tuple[ModelConfig, Decoder]:
    """The model as its files have it."""
    torch.set_num_threads(1)
    model = ModelConfig.from_directory(directory)
    return model, read_decoder(model, Weights(directory), 16, torch.device("cpu"))


def _products(read: tuple[ModelConfig, Decoder]) -> list[int]:
    model, decoder = read
    rows = _rows(model)
    return [_digest(_product(decoder, rows, layer)) for layer in (0, -1)]


def _digest(product: Tensor) -> int:
    return xxh3_64_intdigest(product.numpy().tobytes())


def _own_bytes() -> int:
    """Memory of this process that no other one shares."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this kernel does not say what is a process's own")


def as_text(figures: dict[str, Any]) -> str:
    rows, bars_s = figures["rows"], figures["bars_s"]

    def shown(key: str) -> str:
        each = sorted(row[key] for row in rows)
        return f"{1e3 * statistics.median(each):.1f} ms at p50, {1e3 * each[-1]:.1f} ms at most"

    return (
        f"{figures['size_bytes'] / 1e9:.2f} GB of weights that an agent has; {len(rows)} processes "
        f"attach\nattach to first product, nothing populated: {shown('unpopulated_s')}; bar "
        f"{1e3 * bars_s['unpopulated_s']:.0f} ms\n"
        f"of that until all is mapped and populated: {shown('mapped_s')}\n"
        f"attach to first product, weights populated: {shown('populated_s')}; bar "
        f"{1e3 * bars_s['populated_s']:.0f} ms\n"
        f"at most {max(row['copied_bytes'] for row in rows):,} bytes of each process's own for it; "
        f"{figures['different']} processes with other products than those of the files\n"
    )


def main() -> None:
    path, start = sys.argv[1:]
    torch.set_num_threads(1)
    config = load_config(Path(path), os.environ)
    secret, *_ = read_secrets(config.security, os.environ)
    with torch.inference_mode():
        print(json.dumps(attach(config, secret, int(start))))


if __name__ == "__main__":
    main()
