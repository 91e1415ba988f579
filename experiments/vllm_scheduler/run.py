"""CPU time that kvrs adds to the thread of vLLM's scheduler, at vLLM's own offloading managers.

KVRS_VLLM_PYTHON=.venv-vllm/bin/python python -m experiments.vllm_scheduler.run
"""

import json
import os
import subprocess
import sys
from statistics import median

from experiments.command_line import parser_of
from experiments.record import ROOT, Record

BARS_MS = {"step of decode": 0.2, "step while it waits": 2.0, "once": 40.0}
NAMES = {
    "step of decode": "a step, 200 streams decode",
    "step while it waits": "a step while 1,000 chunks are looked up or loaded",
    "once": "a prompt of 1,000 chunks (128,000 tokens), once",
}


def main() -> None:
    parser = parser_of(__doc__, __file__)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    record = Record()
    done = subprocess.run(
        [
            *(os.environ["KVRS_VLLM_PYTHON"], "-m", "experiments.vllm_scheduler.steps"),
            str(options.rounds),
        ],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        check=True,
        text=True,
    )
    rounds = json.loads(done.stdout.splitlines()[-1])
    rows = {}
    for what in BARS_MS:
        vllm, kvrs = rounds["vllm"][what], rounds["kvrs"][what]
        added_ms = median(b - a for a, b in zip(vllm, kvrs, strict=True))
        rows[what] = {"vllm_ms": median(vllm), "kvrs_ms": median(kvrs), "added_ms": added_ms}
    lines = [f"{'CPU time of the thread, ms':50}   vLLM    kvrs   added   bar"]
    for what, row in rows.items():
        verdict = "" if row["added_ms"] <= BARS_MS[what] else "  MISSED"
        cells = "".join(f"{row[each]:8.3f}" for each in ("vllm_ms", "kvrs_ms", "added_ms"))
        lines.append(f"{NAMES[what]:50}{cells}{BARS_MS[what]:6g}{verdict}")
    text = "\n".join(lines)
    print(text)
    is_void = record.keep(options.out, "vllm_scheduler", {"rows": rows, "rounds": rounds}, text)
    is_missed = any(row["added_ms"] > BARS_MS[what] for what, row in rows.items())
    sys.exit(is_void or is_missed)


if __name__ == "__main__":
    main()
