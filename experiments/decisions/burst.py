"""The death of an instance with 200 streams: time until the first call of a recovery leaves.

    python -m experiments.decisions.burst [--rounds N] [--beside CHECKOUT] [--out DIR]

Timed is what the policy does until it returns the calls, and what it does after that, before its
next event: the predictions of all victims together. `--beside`: the same in another checkout, in
turn.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from experiments.command_line import parser_of
from experiments.record import Record
from kvrs.config.policy import PolicySettings, RecoverySettings, SloSettings
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.recovery import RecoveryPolicy
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.profiles import catalog
from kvrs.protocol.instance import Role, assumed_instance

VICTIMS, TARGETS = 200, 8
PROFILE = "llama-3.1-8b-h100-vllm-tp1"
LIMIT_MS = 1.0  # Added to the time in the other checkout.


def once() -> dict[str, float]:
    """Return the times of one death, in ms."""
    profile = catalog.profile(PROFILE)
    policy = RecoveryPolicy(PolicySettings(recovery=RecoverySettings(gather_s=0.0)), SloSettings())
    names = [
        (f"{role[0]}{node}", node, Role(role))
        for node in range(TARGETS + 1)
        for role in ("prefill", "decode")
    ]
    for name, node, role in names:
        info = assumed_instance(InstanceId(name), NodeId(f"n{node}"), role, profile.geometry)
        policy.handle(ev.InstanceUp(info, catalog.prefill_table(PROFILE)), 0.0)
    streams = [StreamId(f"s{number}") for number in range(VICTIMS * (TARGETS + 1))]
    for number, stream in enumerate(streams):
        at_s = 0.01 * number
        policy.handle(ev.StreamArrived(stream, 200 + 37 * number % 4000), at_s)
        policy.handle(ev.PrefillDone(stream, 1, 200 + 37 * number % 4000), at_s)
        policy.handle(ev.StreamResumed(stream, 1), at_s)
    at_s = 0.01 * len(streams)
    lost = max(policy.members.values(), key=lambda member: member.streams)
    event = ev.InstanceLost(lost.id, lost.epoch, "killed", dict.fromkeys(lost.running, 100))
    began_s = time.perf_counter()
    actions = policy.handle(event, at_s)
    called_s = time.perf_counter()
    policy.handle(ev.TimerFired(), at_s)
    ended_s = time.perf_counter()
    calls = sum(isinstance(action, act.Start) for action in actions)
    return {
        "calls": calls,
        "before_ms": 1e3 * (called_s - began_s),
        "after_ms": 1e3 * (ended_s - called_s),
    }


def there(checkout: Path) -> dict[str, float]:
    """Return the times of one death in a process of a checkout."""
    command = [sys.executable, str(Path(__file__).resolve()), "--once"]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    found = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, check=True)
    times: dict[str, float] = json.loads(found.stdout)
    return times


def main() -> int:
    parser = parser_of(__doc__, __file__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--beside", type=Path, default=None, help="another checkout")
    parser.add_argument("--once", action="store_true", help="print the times of one death")
    options = parser.parse_args()
    if options.once:
        once()  # Code that runs for the first time is slower.
        print(json.dumps(once()))
        return 0
    record = Record()
    checkouts = {"this": Path(__file__).parents[2]}
    if options.beside is not None:
        checkouts["other"] = options.beside
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
    for _ in range(options.rounds):
        for name, checkout in checkouts.items():
            rows[name].append(there(checkout))
    lines, figures = list[str](), dict[str, Any]()
    for name, of in rows.items():
        figures[name] = {key: median(row[key] for row in of) for key in of[0]}
        spread = min(row["before_ms"] for row in of), max(row["before_ms"] for row in of)
        lines.append(
            f"{name:<6}{figures[name]['calls']:.0f} calls; before they leave "
            f"{figures[name]['before_ms']:.2f} ms ({spread[0]:.2f} .. {spread[1]:.2f}), "
            f"after {figures[name]['after_ms']:.2f} ms"
        )
    if "other" in figures:
        added_ms = figures["this"]["before_ms"] - figures["other"]["before_ms"]
        lines.append(f"added before the calls leave: {added_ms:.2f} ms; bar {LIMIT_MS:g}")
    print(*lines, sep="\n")
    record.keep(options.out, "burst", {"times": figures, "rounds": rows}, "\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
