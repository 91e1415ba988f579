"""`/kvrs/v1/overview`: a short form of the state, for pages and terminals that show it every
second. Pure.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvrs.proxy.api.rows import AGENTS, INSTANCES, State, Table, words

RECOVERIES = 50  # Most recoveries that are shown, newest first.
LINKS = 200
_OF_RECOVERY = (
    *("at_s", "stream", "attempt", "option", "from", "to", "cause"),
    *("predicted_s", "real_s", "gap_s", "outcome"),
)


def overview(state: State, policy: Mapping[str, Any]) -> dict[str, Any]:
    """Make the overview of the state that `/kvrs/v1/state` returns."""
    streams: Sequence[State] = state["streams"]
    return {
        "proxies": [
            {key: each[key] for key in ("id", "pid", "peers", "lacks_tokenizer")}
            for each in state["proxies"]
        ],
        "policy": policy,
        "instances": [
            _shown(row, INSTANCES) | {"notes": [*_notes(row)]} for row in state["instances"]
        ],
        "agents": [
            _shown({**row, "role": "agent"}, AGENTS) | {"notes": []} for row in state["agents"]
        ],
        "links": state["links"][:LINKS],
        "slots": state["slots"],
        "streams": {
            "open": len(streams),
            "by_stage": dict(Counter(row["stage"] for row in streams)),
            "inexact": sum(not row["exact"] for row in streams),
            "restorable": _restorable(streams),
            "why_not": dict(Counter(row["unprotected"] for row in streams if row["unprotected"])),
        },
        "recoveries": [_recovery(row) for row in reversed(state["recoveries"][-RECOVERIES:])],
    }


def _shown(row: State, table: Table) -> dict[str, Any]:
    """Make the row of a process: its health, and the facts of its table as text."""
    health, reason = row["health"], row.get("reason")
    state = row.get("state")
    if row.get("draining"):
        health = "draining"
    elif health != "up" and state:
        health, reason = state, _restart(row)
    elif state in ("degraded", "reforming"):
        health = state
    return {
        **{key: row[key] for key in ("id", "role", "node")},
        "health": health,
        "is_up": row["health"] == "up",
        "reason": reason,
        "facts": words(table, row),
    }


def _restart(row: State) -> str:
    """Describe the restart of an instance that is not up: the instance that it helps meanwhile,
    when its model is loaded, and what it skipped.
    """
    ready_in_s, skipped = row.get("ready_in_s"), row.get("skipped")
    parts = ["it is being started again"]
    parts += [f"drafts for {row['paired_with']}"] if row.get("paired_with") else []
    parts += [] if ready_in_s is None else [f"its model is there in {ready_in_s:.0f} s"]
    return ", ".join(parts + ([skipped] if skipped else []))


def _notes(row: State) -> Iterator[str]:
    """Yield notes on an instance: its stages, if a stage is borrowed, and the pages
    that it lends.
    """
    if any(each["donor"] for each in row["stages"]):
        places = (f"{each['stage']} at {each['node']}{_donor(each)}" for each in row["stages"])
        yield f"stages {', '.join(places)}"
    for each in row["lends"]:
        yield f"lends {each['pages']} pages of stage {each['stage']} to {each['to']}"


def _donor(stage: State) -> str:
    return f" (borrowed from {stage['donor']})" if stage["donor"] else ""


def _recovery(row: State) -> dict[str, Any]:
    shown = {key: row[key] for key in _OF_RECOVERY}
    estimates = [{key: each[key] for key in ("option", "total_s")} for each in row["estimates"]]
    return {**shown, "estimates": estimates}


def _restorable(streams: Sequence[State]) -> dict[str, Any]:
    """Count the streams whose pages an agent keeps, in total and by agent."""
    by_agent: Counter[str] = Counter()
    for row in streams:
        by_agent.update(agent for agent, pages in row["protected"].items() if pages)
    return {
        "streams": sum(any(row["protected"].values()) for row in streams),
        "by_agent": dict(by_agent),
    }
