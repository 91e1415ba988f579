"""CPU time, memory and processes of keeping the processes of one machine: by threads and by Ray."""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from experiments.record import Record

SIDES = {"threads": "threads of the launcher", "ray": "actors of Ray"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=6, help="kept by each side")
    parser.add_argument("--rounds", type=int, default=5, help="of both sides in turn")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    # Times are shown beside it; CPU time, memory and counts are compared.
    record = Record(timed=False)
    rounds = [
        {side: measured(side, options.processes) for side in SIDES} for _ in range(options.rounds)
    ]
    text = as_text(rounds, options.processes)
    print(text)
    record.keep(options.out, "supervision", {"rounds": rounds}, text)


def measured(side: str, processes: int) -> dict[str, float]:
    """A run of its own process, since Ray stays in the one that started it."""
    command = [sys.executable, "-m", "experiments.supervision.side", side, str(processes)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def as_text(rounds: list[dict[str, Any]], processes: int) -> str:
    """Medians of all rounds."""
    lines = [f"{processes} processes that import kvrs.config.file, median of {len(rounds)}"]
    lines.append(
        f"{'':24} {'CPU s':>6} {'PSS MB':>7} {'processes':>9} {'start s':>8} {'back s':>7}"
    )
    for side, name in SIDES.items():
        of = {key: statistics.median(each[side][key] for each in rounds) for key in rounds[0][side]}
        lines.append(
            f"{name:24} {of['cpu_s']:6.1f} {of['pss_bytes'] / 1e6:7.0f} {of['processes']:9.0f} "
            f"{of['started_s']:8.2f} {of['back_s']:7.2f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
