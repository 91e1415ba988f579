"""`/kvrs/v1/overview`: the state in few bytes, for pages and terminals that show it every second.
Pure.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

RECOVERIES = 50  # The newest ones.
LINKS = 200
_OF_LOAD = ("queued", "running", "free_pages", "queue_delay_s")
_OF_INSTANCE = ("id", "role", "node", "health", "epoch", "reason", "paired_with")
_OF_STAGE = ("stage", "node", "donor")
_OF_AGENT = ("id", "node", "health", "checkpoints", "held_bytes", "capacity_bytes", "reason")
_OF_RECOVERY = (
    "at_s",
    "stream",
    "attempt",
    "option",
    "from",
    "to",
    "cause",
    "predicted_s",
    "real_s",
    "gap_s",
    "outcome",
)


def overview(state: Mapping[str, Any], policy: Mapping[str, Any]) -> dict[str, Any]:
    """Overview of a state of `/kvrs/v1/state`."""
    streams: Sequence[Mapping[str, Any]] = state["streams"]
    return {
        "proxies": [
            {
                "id": each["id"],
                "pid": each.get("pid"),
                "peers": each["peers"],
                "lacks_tokenizer": each["lacks_tokenizer"],
            }
            for each in state["proxies"]
        ],
        "policy": policy,
        "instances": [_instance(row, streams) for row in state["instances"]],
        "agents": [_kept(row, _OF_AGENT) for row in state["agents"]],
        "links": [
            _kept(row, ("source", "target", "bytes_per_s", "measured"))
            for row in state["links"][:LINKS]
        ],
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


def _instance(row: Mapping[str, Any], streams: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    load, drafts = row["load"] or {}, row.get("speculation")
    starts = row.get("state") if row["health"] != "up" else None
    return {
        **_kept(row, _OF_INSTANCE),
        **{key: load.get(key) for key in _OF_LOAD},
        "draining": bool(load.get("draining")) or row["drain"] is not None,
        "ranks": len(row["ranks"]),
        # Of an instance that computes without some of them, or not at all until it has re-formed.
        "short": row.get("state") if row.get("state") in ("degraded", "reforming") else None,
        "stages": [_kept(each, _OF_STAGE) for each in row.get("stages", ())],
        "lends": row.get("lends", []),
        "degree": row.get("degree"),
        "full_degree": row.get("full_degree"),
        "experts": row.get("experts"),
        # Of an instance that is being started again; None: of no other.
        "starts": starts,
        "reason": _restart(row) if starts else row.get("reason"),
        "prefix_hits": (row.get("prefix_hits") or {}).get("share"),
        "drafts": _kept(drafts, ("accepted", "proposed")) if drafts else None,
        "streams": sum(row["id"] in (each["prefill"], each["decode"]) for each in streams),
    }


def _restart(row: Mapping[str, Any]) -> str:
    """Why it is not up: that it was found gone is of no use while it says what it does."""
    ready_in_s, skipped = row.get("ready_in_s"), row.get("skipped")
    parts = ["it is being started again"]
    parts += [f"drafts for {row['paired_with']}"] if row.get("paired_with") else []
    parts += [] if ready_in_s is None else [f"its model is there in {ready_in_s:.0f} s"]
    return ", ".join(parts + ([skipped] if skipped else []))


def _recovery(row: Mapping[str, Any]) -> dict[str, Any]:
    estimates = [_kept(each, ("option", "total_s")) for each in row["estimates"]]
    return {**_kept(row, _OF_RECOVERY), "estimates": estimates}


def _restorable(streams: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The streams of which an agent keeps pages, in all and by agent."""
    by_agent: Counter[str] = Counter()
    for row in streams:
        by_agent.update(agent for agent, pages in row["protected"].items() if pages)
    return {
        "streams": sum(any(row["protected"].values()) for row in streams),
        "by_agent": dict(by_agent),
    }


def _kept(row: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    return {key: row[key] for key in keys if key in row}
