"""Device memory that outlives the process that computes with it: a holder owns weights and KV, and
engines map them, one after the other is killed.

python -m experiments.gpu.holder [--megabytes 1024] [--kills 5]
"""

import argparse
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from experiments.gpu.vmm import (
    Driver,
    DriverError,
    Mapping,
    Region,
    load,
    map_all,
    receive_regions,
    rounded,
    send_regions,
)
from experiments.record import Record
from kvrs.transfer.shared_memory.passing import foreign_user

WEIGHTS, KV = "weights", "kv"
KV_BYTES = 64 << 20
# The matrix of the product: the first weights.
ROWS, INNER, COLUMNS = 16, 1024, 4096
_ANSWER_S = 300.0


def weights_of(size_bytes: int, seed: int) -> bytes:
    """Float32 numbers between -1 and 1."""
    choose = np.random.default_rng(seed)
    return (choose.random(size_bytes // 4, dtype=np.float32) * 2 - 1).tobytes()


def kv_of(start: int) -> bytes:
    """The KV that the engine of that start writes."""
    return np.random.default_rng(start).bytes(KV_BYTES)


class Holder:
    """Owns memory, and gives descriptors of it to each process of this user that connects."""

    def __init__(self, driver: Driver, contents: dict[str, bytes]) -> None:
        self._driver = driver
        self._regions: list[Region] = []
        self._descriptors: list[int] = []
        self.copy_s = 0.0
        for name, content in contents.items():
            mapped_bytes = rounded(len(content), driver.granule_bytes)
            mapping = driver.map(driver.create(mapped_bytes), mapped_bytes)
            began_s = time.perf_counter()
            driver.write(mapping.address, content)
            self.copy_s += time.perf_counter() - began_s
            checksum = xxh3_64_intdigest(content)
            self._regions.append(Region(name, len(content), mapped_bytes, checksum))
            self._descriptors.append(driver.export(mapping.handle))

    def serve(self, listener: socket.socket) -> None:
        """One process; one of another user gets nothing."""
        connection, _ = listener.accept()
        with connection:
            if foreign_user(connection) is None:
                send_regions(connection, self._regions, self._descriptors)


def attach(driver: Driver, path: str) -> tuple[list[Region], dict[str, Mapping]]:
    """Map everything that the holder at that socket has."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(path)
        regions, descriptors = receive_regions(connection)
    return regions, map_all(driver, regions, descriptors)


def checksums(
    driver: Driver, regions: list[Region], mappings: dict[str, Mapping]
) -> dict[str, int]:
    """Checksums of the memory's present contents."""
    return {
        each.name: xxh3_64_intdigest(driver.read(mappings[each.name].address, each.size_bytes))
        for each in regions
    }


# The processes.


def hold(path: str, megabytes: int, seed: int) -> None:
    driver = Driver(load())
    contents = {WEIGHTS: weights_of(megabytes << 20, seed), KV: bytes(KV_BYTES)}
    holder = Holder(driver, contents)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(8)
        _say({"device": driver.device_name, "copy_s": holder.copy_s})
        while True:
            holder.serve(listener)


def use(path: str, start: int) -> None:
    """Be an engine: attach, look, compute, write KV, and wait for the end."""
    began_s = time.perf_counter()
    multiply = _product()
    driver = Driver(load())
    context_s = time.perf_counter() - began_s
    began_s = time.perf_counter()
    regions, mappings = attach(driver, path)
    attach_s = time.perf_counter() - began_s
    product = None if multiply is None else multiply(mappings[WEIGHTS].address)
    product_s = None if product is None else time.perf_counter() - began_s
    found = checksums(driver, regions, mappings)
    written = {each.name: each.checksum for each in regions}
    driver.write(mappings[KV].address, kv_of(start))
    _say(
        {
            "context_s": context_s,
            "attach_s": attach_s,
            "product_s": product_s,
            "product": None if product is None else xxh3_64_intdigest(product),
            "weights_equal": found[WEIGHTS] == written[WEIGHTS],
            "kv": found[KV],
            "kv_written": checksums(driver, regions, mappings)[KV],
        }
    )
    while True:
        signal.pause()


def _product() -> Callable[[int], bytes] | None:
    """A product with weights at an address, by torch; None: torch has no CUDA here. What it needs
    at its first use is there already.
    """
    import torch

    if not torch.cuda.is_available():
        return None
    rows = torch.linspace(-1, 1, ROWS * INNER, device="cuda").view(ROWS, INNER)
    (rows @ torch.zeros(INNER, COLUMNS, device="cuda")).cpu()

    class At:
        def __init__(self, address: int) -> None:
            self.__cuda_array_interface__ = {
                "shape": (INNER, COLUMNS),
                "typestr": "<f4",
                "data": (address, False),
                "version": 3,
            }

    def multiply(address: int) -> bytes:
        matrix = torch.as_tensor(At(address), device="cuda")
        assert matrix.data_ptr() == address, "torch has copied the weights"
        return bytes((rows @ matrix).cpu().numpy().tobytes())

    return multiply


def _say(facts: dict[str, Any]) -> None:
    print(json.dumps(facts), flush=True)


class _Process:
    """One of the two, in a process of its own."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "experiments.gpu.holder", *arguments]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def said(self) -> dict[str, Any]:
        """The facts that it prints once it is ready."""
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(f"a process ended with status {self._process.wait(_ANSWER_S)}")
        facts: dict[str, Any] = json.loads(line)
        return facts

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.communicate()


# The experiment.


def run(megabytes: int, kills: int, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        path = str(Path(directory) / "holder")
        holder = _Process("--hold", path, "--megabytes", str(megabytes), "--seed", str(seed))
        try:
            held = holder.said()
            engines = []
            for start in range(kills + 1):
                engine = _Process("--use", path, "--start", str(start))
                try:
                    engines.append(engine.said())
                finally:
                    engine.kill()
        finally:
            holder.kill()
    return {"megabytes": megabytes, **held, **judged(engines)}


def judged(engines: list[dict[str, Any]]) -> dict[str, Any]:
    """The findings of each engine, against what the one before has left."""
    first, *later = engines
    kept = [
        after["weights_equal"]
        and after["kv"] == before["kv_written"]
        and after["product"] == first["product"]
        for before, after in zip(engines, later, strict=False)
    ]
    return {
        "kills": len(later),
        "different": kept.count(False) + (not first["weights_equal"]),
        "product_by": "torch" if first["product"] is not None else None,
        "context_s": median(each["context_s"] for each in later),
        "attach_s": median(each["attach_s"] for each in later),
        "product_s": median(each["product_s"] for each in later) if later[0]["product_s"] else None,
    }


def as_text(figures: dict[str, Any]) -> str:
    product = "no product: torch has no CUDA here"
    if figures["product_s"] is not None:
        product = f"{1e3 * figures['product_s']:.1f} ms to the first product"
    return (
        f"{figures['megabytes']} MB of weights and {KV_BYTES >> 20} MB of KV on "
        f"{figures['device']}, held by a process that computes nothing\n"
        f"{figures['kills']} SIGKILLs of the engine: {figures['different']} times the next one "
        f"found other bytes of weights or KV, or another product\n"
        f"attach, p50: {1e3 * figures['attach_s']:.1f} ms, {product}; the context before that "
        f"{figures['context_s']:.2f} s; a copy from the host {figures['copy_s']:.2f} s\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--megabytes", type=int, default=1024, help="of weights; from 16 on")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    for own in ("--hold", "--use", "--start"):  # Of the processes that it starts.
        parser.add_argument(own, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.megabytes < (least := INNER * COLUMNS * 4 >> 20) or options.kills < 1:
        parser.error(f"--megabytes: allowed from {least} on; --kills: from 1 on")
    if options.hold is not None:
        hold(options.hold, options.megabytes, options.seed)
    if options.use is not None:
        use(options.use, int(options.start))
    try:
        Driver(load())
    except DriverError as error:
        print(f"skipped: {error}")
        return
    record = Record(options.seed)
    figures = run(options.megabytes, options.kills, options.seed)
    text = as_text(figures)
    print(text)
    void = record.keep(options.out, "holder", figures, text)
    raise SystemExit(1 if void or figures["different"] else 0)


if __name__ == "__main__":
    main()
