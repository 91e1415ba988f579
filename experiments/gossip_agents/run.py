"""Real member processes killed and stopped: the time until all others know, and false deaths.

    python -m experiments.gossip_agents.run [--kills 50] [--stalls 10] [--nodes 5] [--kinship-python
    PYTHON]

With an environment that has the PyPI package `kinship`, a cluster of that is measured too.
"""

import argparse
import math
import random
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from experiments.gossip_agents.members import Kinship, KvrsAgents, Members, Noticed
from experiments.record import Record

STALL_S = 5.0
BAR_S = 3.0
REFUTED_BAR_S = 2.0
PATIENCE_S = 60.0
QUIET_S = (
    1.0,
    3.0,
)  # Between two of them, so that none begins at the same moment of a probe's round.
_LOOK_S = 0.02


class Watch:
    """The state of every member at every other, from their logs."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self.held: dict[tuple[str, str], Noticed] = {}
        self.deaths: list[Noticed] = []

    def look(self) -> list[Noticed]:
        new = sorted(self._members.noticed(), key=lambda each: each.at_s)
        for each in new:
            self.held[each.by, each.member] = each
        self.deaths += [each for each in new if each.status == "dead"]
        return new

    def wait(self, about: str, status: str, since_s: float, by: list[str]) -> list[float]:
        """Times at which each of them had the member in this status; raises TimeoutError."""
        at_s: dict[str, float] = {}
        give_up_s = time.monotonic() + PATIENCE_S
        while len(at_s) < len(by):
            if time.monotonic() > give_up_s:
                raise TimeoutError(f"{about} is {status} for {sorted(at_s)} only, of {by}")
            for each in self.look():
                if (
                    (each.member, each.status) == (about, status)
                    and each.by in by
                    and each.at_s >= since_s - 0.002
                ):
                    at_s.setdefault(each.by, each.at_s)
            time.sleep(_LOOK_S)
        return list(at_s.values())

    def settle(self, names: list[str]) -> None:
        """Wait until all hold all alive, also a process that was just started."""
        give_up_s = time.monotonic() + PATIENCE_S
        while any(
            self._status(one, other) != "alive" for one in names for other in names if one != other
        ):
            if time.monotonic() > give_up_s:
                raise TimeoutError("they do not all know each other")
            self.look()
            time.sleep(_LOOK_S)

    def _status(self, one: str, other: str) -> str | None:
        held = self.held.get((one, other))
        return None if held is None else held.status

    def forget(self, name: str) -> None:
        """Drop the states of a killed member."""
        self.held = {key: held for key, held in self.held.items() if key[0] != name}


def kill_one(members: Members, watch: Watch, victim: str) -> dict[str, Any]:
    others = [name for name in members.names if name != victim]
    deaths = len(watch.deaths)
    killed_s = members.signal(victim, signal.SIGKILL)
    known_s = watch.wait(victim, "dead", killed_s, others)
    watch.look()
    watch.forget(victim)
    wrong = sum(each.member != victim for each in watch.deaths[deaths:])
    members.start(victim)
    watch.settle(members.names)
    return {
        "victim": victim,
        "first_s": min(known_s) - killed_s,
        "all_s": max(known_s) - killed_s,
        "false_deaths": wrong,
    }


def stall_one(members: Members, watch: Watch, victim: str) -> dict[str, Any]:
    """A process that is stopped for a while is declared dead, rightly; what it declares after that
    is what this is about.
    """
    deaths = len(watch.deaths)
    members.signal(victim, signal.SIGSTOP)
    time.sleep(STALL_S)
    woken_s = members.signal(victim, signal.SIGCONT)
    watch.settle(members.names)
    time.sleep(1.0)  # For deaths that it may declare because of the stop.
    watch.look()
    watch.settle(members.names)
    back_s = (
        max(
            (held.at_s for (_, about), held in watch.held.items() if about == victim),
            default=woken_s,
        )
        - woken_s
    )
    new = watch.deaths[deaths:]
    return {
        "victim": victim,
        "was_held_dead_by": sum(each.member == victim for each in new),
        "false_deaths_by_victim": sum(each.by == victim for each in new),
        "false_deaths_by_others": sum(each.by != victim and each.member != victim for each in new),
        "alive_for_all_s": max(0.0, back_s),
    }


def measure(members: Members, kills: int, stalls: int, draw: random.Random) -> dict[str, Any]:
    with members:
        watch = Watch(members)
        for name in members.names:
            members.start(name)
        members.wait_ready()
        watch.settle(members.names)
        killed: list[dict[str, Any]] = []
        stalled: list[dict[str, Any]] = []
        for rows, count, act in ((killed, kills, kill_one), (stalled, stalls, stall_one)):
            for _ in range(count):
                time.sleep(draw.uniform(*QUIET_S))
                rows.append(act(members, watch, draw.choice(members.names)))
    return {"kills": killed, "stalls": stalled, "summary": summary(killed, stalled)}


def summary(kills: list[dict[str, Any]], stalls: list[dict[str, Any]]) -> dict[str, Any]:
    all_s = sorted(row["all_s"] for row in kills)
    back_s = [row["alive_for_all_s"] for row in stalls]
    return {
        "kills": len(kills),
        "known_by_all_s_median": statistics.median(all_s) if all_s else None,
        "known_by_all_s_p99": all_s[math.ceil(0.99 * len(all_s)) - 1] if all_s else None,
        "first_s_median": statistics.median(row["first_s"] for row in kills) if kills else None,
        "stalls": len(stalls),
        "refuted_s_max": max(back_s, default=None),
        "false_deaths": sum(row["false_deaths"] for row in kills)
        + sum(row["false_deaths_by_victim"] + row["false_deaths_by_others"] for row in stalls),
    }


def as_text(summaries: dict[str, dict[str, Any]], bars: dict[str, bool]) -> str:
    lines = []
    for name, summary in summaries.items():
        lines += [f"{name}:", *(f"  {what:28} {value}" for what, value in summary.items())]
    met = ", ".join(f"{bar} {'met' if is_met else 'MISSED'}" for bar, is_met in bars.items())
    return "\n".join([*lines, f"bars: {met}"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--stalls", type=int, default=10)
    parser.add_argument("--nodes", type=int, default=5)
    parser.add_argument("--profile", default="lan")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinship-python", help="of an environment with the package kinship")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results"))
    arguments = parser.parse_args()
    systems: dict[str, Members] = {"kvrs": KvrsAgents(arguments.nodes, arguments.profile)}
    if arguments.kinship_python:
        systems["kinship"] = Kinship(arguments.nodes, arguments.kinship_python)
    record = Record(arguments.seed)
    results = {
        name: measure(members, arguments.kills, arguments.stalls, random.Random(arguments.seed))
        for name, members in systems.items()
    }
    ours = results["kvrs"]["summary"]
    bars = {
        "known_by_all_p99": ours["known_by_all_s_p99"] is None
        or ours["known_by_all_s_p99"] <= BAR_S,
        "refuted": ours["refuted_s_max"] is None or ours["refuted_s_max"] <= REFUTED_BAR_S,
        "no_false_deaths": ours["false_deaths"] == 0,
    }
    text = as_text({name: result["summary"] for name, result in results.items()}, bars)
    print(text)
    record.keep(arguments.out, "gossip_agents", {"bars": bars, **results}, text)
    return 0 if all(bars.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
