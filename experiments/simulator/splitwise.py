"""The simulator beside that of Splitwise (Patel et al., ISCA 2024), which is run as published: the
same requests, by its measurements of Llama 2 70B on eight A100.

    SPLITWISE_HOME=... python -m experiments.simulator.splitwise [--rates 1 2 4] [--requests 400]

The variable names a checkout of splitwise-sim, which needs hydra-core, networkx, pandas and scipy.
Each known difference has a switch: with all of them off, both should agree; then each is on by
itself.
"""

import csv
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from experiments.command_line import parser_of
from experiments.record import Record
from experiments.simulator.beside import (
    BAR,
    BEGIN_S,
    OFF,
    Asked,
    Differences,
    Latencies,
    as_text,
    largest,
    ours,
    requests_of,
    row_of,
)
from kvrs.errors import ConfigError
from kvrs.profiles import catalog
from kvrs.profiles.catalog import DecodeRows, PrefillPoints
from kvrs.protocol.geometry import KvGeometry

MODEL, GPU, GPUS = "llama2-70b", "a100-80gb", 8
PACE = "llama-3.1-70b-a100-vllm-tp8"  # What its measurements do not have is this profile's.
# It counts keys and values of all 64 heads (request.py, `estimate_kv_cache_size`).
GEOMETRY = KvGeometry(layers=80, kv_heads=64, head_dim=128, dtype_bytes=2, page_size_tokens=16)
LINK_BYTES_PER_S = 200.0 * 2**30  # configs/orchestrator_repo/schedulers/kv_round_robin.yaml
BATCHES = (1, 128, 256, 512)  # Its lines over the sizes of a batch end at these.
# Its command line takes a launcher of its authors' cluster, so its parts are put together here.
PROGRAM = """
import json, os, sys

import hydra.utils
from omegaconf import OmegaConf

home, cfg = sys.argv[1], json.load(sys.stdin)
hydra.utils.get_original_cwd = lambda: home
sys.path.insert(0, home)
import run

parts = {
    "hardware_repo": "hardware_repo/default",
    "model_repo": "model_repo/default",
    "orchestrator_repo": "orchestrator_repo/default",
    "performance_model": "performance_model/db",
    "power_model": "power_model/constant",
    "arbiter": "arbiter/noop",
}
for name, part in parts.items():
    cfg[name] = OmegaConf.load(os.path.join(home, "configs", part + ".yaml"))
run.run_simulation(OmegaConf.create(cfg))
"""


def measurements(rows: Iterable[Mapping[str, str]]) -> tuple[dict[int, float], dict[int, float]]:
    """Seconds of a batch of prompts and of a step, by tokens in the batch: medians, as its
    simulator takes them, between which it draws lines.
    """
    prompt_s, step_s = defaultdict[int, list[float]](list), defaultdict[int, list[float]](list)
    for row in rows:
        if (row["model"], row["hardware"], row["tensor_parallel"]) == (MODEL, GPU, str(GPUS)):
            tokens = int(row["prompt_size"]) * int(row["batch_size"])
            prompt_s[tokens].append(float(row["prompt_time"]) / 1e3)
            step_s[tokens].append(float(row["token_time"]) / 1e3)
    return (
        {tokens: median(found) for tokens, found in prompt_s.items()},
        {tokens: median(found) for tokens, found in step_s.items()},
    )


def profile_of(prompt_s: Mapping[int, float], step_s: Mapping[int, float], folder: Path) -> str:
    """The file of a profile of its measurements. A step counts its sequences as tokens, whatever
    their contexts are; below the smallest batch its first line goes on.
    """
    first, second = sorted(step_s)[:2]
    slope = (step_s[second] - step_s[first]) / (second - first)
    seconds = [step_s.get(size, step_s[first] + slope * (size - first)) for size in BATCHES]
    profile = msgspec.structs.replace(
        catalog.profile(PACE),
        geometry=GEOMETRY,
        prefill=PrefillPoints(dict(prompt_s)),
        decode=DecodeRows([*BATCHES], [1, 1 << 20], [[each, each] for each in seconds]),
    )
    path = folder / "splitwise.json"
    path.write_bytes(msgspec.json.encode(profile))
    return str(path)


def theirs(home: Path, asked: Sequence[Asked], folder: Path) -> Latencies:
    """By its own code, in a process of its own.

    Raises:
        ConfigError: it cannot be run.
    """
    header = "request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,"
    lines = [
        f"{number},2,0,{BEGIN_S + each.at_s!r},1,{each.tokens},{each.output + 1}"
        for number, each in enumerate(asked)
    ]
    (folder / "trace.csv").write_text("\n".join([f"{header}token_size", *lines]) + "\n")
    instance = {
        "instance_type": "Splitwise",
        "max_batch_size": 512,
        "max_batch_tokens": 2048,
        "max_preemptions": 4,
        "pipeline_parallelism": 1,
        "tensor_parallelism": GPUS,
        "num_instances": 1,
    }
    config = {
        "trace": {"path": str(folder / "trace.csv")},
        "end_time": 1e9,
        "router": {"_target_": "router.NoOpRouter", "overheads": {"routing_delay": 0}},
        "cluster": {
            "power_budget": 0,
            "servers": [{"sku": "dgx-a100", "count": 2}],
            "interconnects": [],
        },
        "applications": [
            {
                "application_id": 0,
                "model_architecture": MODEL,
                "model_size": f"{MODEL}-fp16",
                "allocator": "noop",
                "scheduler": "kv_round_robin",
                "overheads": {},
                "debug": False,
            }
        ],
        "start_state": {
            "state_type": "splitwise",
            "application_id": 0,
            "split_type": "homogeneous",
            "prompt": instance,
            "token": instance,
        },
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(home)],
        cwd=folder,
        input=json.dumps(config),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ConfigError(
            f"SPLITWISE_HOME: {home}: {done.stderr.strip().rpartition(chr(10))[2]}; allowed: a "
            f"checkout of splitwise-sim, with hydra-core, networkx, pandas and scipy"
        )
    with (folder / "detailed" / "0.csv").open(encoding="utf-8") as file:
        rows = sorted(csv.DictReader(file), key=lambda row: float(row["request_ids"]))
    assert len(rows) == len(asked), f"{len(rows)} of {len(asked)} requests have ended"
    ttft_s = [float(row["ttft_times"]) for row in rows]
    return Latencies(
        ttft_s,
        [
            (float(row["response_times"]) - first_s) / each.output
            for row, first_s, each in zip(rows, ttft_s, asked, strict=True)
        ],
    )


SWITCHES = {
    OFF: Differences(),
    "hand-off at 25 Gbit/s": Differences(hand_off=True),
    "network": Differences(network=True),
    "first token of decode": Differences(first_token=True),
    "chunks of 512": Differences(chunks=True),
    "all on": Differences(hand_off=True, network=True, first_token=True, chunks=True),
}


def compare(
    home: Path, pace: str, rate: float, count: int, seed: int, folder: Path
) -> list[dict[str, Any]]:
    asked = requests_of("splitwise-conv", rate, count, seed, most_prompt=4096, most_output=1024)
    right = theirs(home, asked, folder)
    return [
        row_of(rate, name, ours(asked, differ, pace, LINK_BYTES_PER_S), right)
        for name, differ in SWITCHES.items()
    ]


def main() -> int:
    parser = parser_of(__doc__, __file__, seed=0)
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0, 2.0, 4.0])
    parser.add_argument("--requests", type=int, default=400)
    options = parser.parse_args()
    if "SPLITWISE_HOME" not in os.environ:
        raise ConfigError("SPLITWISE_HOME: not set; allowed: a checkout of splitwise-sim")
    home = Path(os.environ["SPLITWISE_HOME"]).absolute()
    record = Record(options.seed, timed=False)
    with tempfile.TemporaryDirectory() as name, (home / "data/perf_model.csv").open() as file:
        folder = Path(name)
        pace = profile_of(*measurements(csv.DictReader(file)), folder)
        rows = [
            row
            for rate in options.rates
            for row in compare(home, pace, rate, options.requests, options.seed, folder)
        ]
    title = (
        f"one prefill and one decode instance, {MODEL} on {GPUS} {GPU}, {options.requests} "
        f"requests of Splitwise's conversations (at most 4,096 and 1,024 tokens)"
    )
    text = as_text(rows, title, "Splitwise's")
    print(text)
    record.keep(options.out, "splitwise", {"rows": rows}, text)
    return 0 if largest(rows) <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
