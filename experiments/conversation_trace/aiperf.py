"""The same trace through the same cluster, driven by an independent client: AIPerf, in an
environment of its own.

    python -m experiments.conversation_trace.aiperf [--venv DIR] [--requests 100]

Installs aiperf 0.13.0 into `--venv` unless it is there, lets it replay the trace at its own times,
and kills a decode instance in the middle. AIPerf knows nothing of recoveries: what counts is that
it sees every request succeed, with all of its tokens.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from experiments.conversation_trace.trace import DEFAULT_TRACE, is_there, sampled
from experiments.record import Record
from kvrs.cluster.launcher import Cluster
from kvrs.config.policy import PolicyName
from kvrs.demo import demo_config
from kvrs.ids import InstanceId
from kvrs.traces.mooncake import Trace

AIPERF = "aiperf==0.13.0"
TOKENIZER = "kvrs/tiny-llama"
RESULTS = Path(__file__).parent / "results"
REQUESTS_PER_S = 4.0
HIT_AT_LEAST = 3
RUN_TIMEOUT_S = 600.0


def install(venv: Path) -> Path:
    program = venv / "bin" / "aiperf"
    if not program.exists():
        print(f"installing {AIPERF} into {venv}")
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        subprocess.run(
            [str(venv / "bin" / "python"), "-m", "pip", "install", "--quiet", AIPERF], check=True
        )
    return program


def write_trace(trace: Trace, path: Path) -> None:
    """Mooncake's format with smaller blocks, whose size is an option of AIPerf."""
    rows = (
        {
            "timestamp": round(request.arrival_s * 1000),
            "input_length": request.input_tokens,
            "output_length": request.output_tokens,
            "hash_ids": request.hash_ids,
        }
        for request in trace.requests
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def put_into_hub_cache(model: Path, cache: Path) -> None:
    """Put the tokenizer where the hub's cache would have it: AIPerf finds tokenizers by repository
    only.
    """
    home, commit = cache / f"models--{TOKENIZER.replace('/', '--')}", "0" * 40
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text(commit)
    (home / "snapshots" / commit).mkdir(parents=True)
    for file in model.glob("*.json"):
        shutil.copy(file, home / "snapshots" / commit)


def kill_when_busy(cluster: Cluster, kills: list[dict[str, Any]], over: threading.Event) -> None:
    """Kill the first decode instance that works on enough streams, once."""
    while not over.is_set():
        state = cluster.state()
        decoding = [stream["decode"] for stream in state["streams"] if stream["stage"] == "decode"]
        busiest = max(set(decoding), key=decoding.count, default=None)
        if busiest is not None and decoding.count(busiest) >= HIT_AT_LEAST:
            (pid,) = cluster.kill(InstanceId(busiest))
            kills.append({"whom": busiest, "pid": pid, "streams": decoding.count(busiest)})
            return
        time.sleep(0.02)


def profile(program: Path, cluster: Cluster, trace: Trace, directory: Path) -> Any:
    """Run AIPerf; return its own export."""
    write_trace(trace, directory / "trace.jsonl")
    model = cluster.config.cluster.model
    assert model is not None
    put_into_hub_cache(Path(model), directory / "hub")
    command = [
        str(program),
        "profile",
        "--model",
        Path(model).name,
        "--tokenizer",
        TOKENIZER,
        "--url",
        cluster.url,
    ]
    command += ["--endpoint-type", "completions", "--streaming", "--ui", "none"]
    command += [
        "--input-file",
        str(directory / "trace.jsonl"),
        "--custom-dataset-type",
        "mooncake_trace",
        "--fixed-schedule",
    ]
    command += ["--prompt-input-tokens-block-size", str(trace.block_tokens)]
    command += ["--extra-inputs", "temperature:0", "--extra-inputs", "ignore_eos:true"]
    command += ["--artifact-dir", str(directory / "artifacts")]
    # The program gets neither the cluster's secret nor the packages of this environment.
    environment = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("KVRS_", "RAY_", "PYTHON", "OMP_"))
    }
    environment |= {"HF_HUB_CACHE": str(directory / "hub"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command,
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
    )
    exports = list((directory / "artifacts").rglob("profile_export_aiperf.json"))
    if done.returncode or not exports:
        raise SystemExit(
            f"aiperf ended with status "
            f"{done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        )
    return json.loads(exports[0].read_text())


def figures(export: Any, trace: Trace, kills: list[dict[str, Any]], state: Any) -> dict[str, Any]:
    def mean(name: str) -> float | None:
        return export[name]["avg"] if export.get(name) else None

    def spread(name: str) -> dict[str, float]:
        return {key: round(export[name][key], 2) for key in ("avg", "p50", "p99", "max")}

    return {
        "client": AIPERF,
        "requests": len(trace.requests),
        "request_count": mean("request_count"),
        "error_request_count": mean("error_request_count") or 0,
        "output_tokens_asked": sum(request.output_tokens for request in trace.requests),
        "total_output_tokens": mean("total_output_tokens"),
        "total_usage_completion_tokens": mean("total_usage_completion_tokens"),
        "time_to_first_token_ms": spread("time_to_first_token"),
        "inter_token_latency_ms": spread("inter_token_latency"),
        "request_latency_ms": spread("request_latency"),
        "kills": kills,
        "recoveries": [
            {key: row[key] for key in ("option", "outcome", "produced_tokens", "gap_s")}
            for row in state["recoveries"]
        ],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, default=DEFAULT_TRACE)
    parser.add_argument("--venv", type=Path, default=Path(tempfile.gettempdir()) / "kvrs-aiperf")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if not is_there(arguments.trace):
        return 0
    record = Record(arguments.seed)
    program = install(arguments.venv)
    trace = sampled(arguments.trace, arguments.requests, REQUESTS_PER_S, arguments.seed)
    kills: list[dict[str, Any]] = []
    over = threading.Event()
    with (
        tempfile.TemporaryDirectory() as directory,
        Cluster(demo_config(PolicyName.AUTO, arguments.seed), print) as cluster,
    ):
        killer = threading.Thread(target=kill_when_busy, args=(cluster, kills, over))
        killer.start()
        try:
            export = profile(program, cluster, trace, Path(directory))
        finally:
            over.set()
            killer.join()
        found = figures(export, trace, kills, cluster.state())
    whole = found["request_count"] == len(trace.requests) and not found["error_request_count"]
    passed = (
        whole
        and found["total_usage_completion_tokens"] == found["output_tokens_asked"]
        and bool(found["recoveries"])
    )
    lines = [f"{what:32} {value}" for what, value in found.items()]
    text = "\n".join([*lines, "PASSED" if passed else "FAILED"])
    print(text)
    record.keep(arguments.out, "aiperf", {"passed": passed} | found, text)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
