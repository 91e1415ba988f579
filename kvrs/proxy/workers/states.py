"""States of several workers as the state of one proxy. Pure.

Rows of what one worker does (streams, recoveries, links as it has measured them) are those of all,
with a column `worker`. An instance or agent has one row: that of a worker that does not see it up,
if there is one, with `health_by_worker` where they differ.
"""

from collections.abc import Iterator, Mapping
from typing import Any

_UP = "up"
_ADDED = ("records", "record_bytes", "resumable", "unmirrored", "uncopied")
_ADDED_OF_TENANT = ("open_streams", "open_bytes", "refused")


def added_states(
    proxy: Mapping[str, Any],
    states: Mapping[int, Mapping[str, Any]],
    workers: list[dict[str, Any]],
    slots_max: int,
) -> dict[str, Any]:
    """The state of the proxy. `states`: of the workers that have answered; `proxy`: what is known
    of the proxy as a whole; `workers`: a row for each, also for those that have not answered.
    """
    gossip = [
        {"worker": worker, **state["gossip"]}
        for worker, state in states.items()
        if state["gossip"] is not None
    ]
    return {
        "instances": _seen(states, "instances"),
        "proxies": [{**proxy, **_of_proxy(states), "workers": workers}],
        "members": next((state["members"] for state in states.values()), []),
        "gossip": {"workers": gossip} if gossip else None,
        "agents": _seen(states, "agents"),
        "links": [*_rows(states, "links")],
        "slots": _slots(states, slots_max),
        "streams": [*_rows(states, "streams")],
        "recoveries": sorted(_rows(states, "recoveries"), key=lambda row: row["at_s"]),
        "policy": {
            "workers": [{"worker": worker, **state["policy"]} for worker, state in states.items()]
        },
    }


def _rows(states: Mapping[int, Mapping[str, Any]], key: str) -> Iterator[dict[str, Any]]:
    for worker, state in states.items():
        yield from ({"worker": worker, **row} for row in state[key])


def _seen(states: Mapping[int, Mapping[str, Any]], key: str) -> list[dict[str, Any]]:
    by_id: dict[str, dict[int, dict[str, Any]]] = {}
    for worker, state in states.items():
        for row in state[key]:
            by_id.setdefault(row["id"], {})[worker] = row
    return [_one_row(rows) for rows in by_id.values()]


def _one_row(rows: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
    first = next(iter(rows.values()))
    row = next((row for row in rows.values() if row["health"] != _UP), first)
    health = {worker: each["health"] for worker, each in rows.items()}
    return row if len({*health.values()}) == 1 else row | {"health_by_worker": health}


def _slots(states: Mapping[int, Mapping[str, Any]], slots_max: int) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for state in states.values():
        for target, row in state["slots"].items():
            into = found.setdefault(target, {"held": 0, "waiting": 0, "max": slots_max})
            into["held"] += row["held"]
            into["waiting"] += row["waiting"]
    return found


def _of_proxy(states: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    rows = [state["proxies"][0] for state in states.values()]
    peers: dict[str, str] = {}
    tenants: dict[str, dict[str, Any]] = {}
    for row in rows:
        for peer, health in row["peers"].items():
            peers[peer] = health if peers.get(peer, _UP) == _UP else peers[peer]
        for tenant in row["tenants"]:
            into = tenants.setdefault(tenant["tenant"], tenant | dict.fromkeys(_ADDED_OF_TENANT, 0))
            for key in _ADDED_OF_TENANT:
                into[key] += tenant[key]
    added = {key: sum(row[key] for row in rows) for key in _ADDED}
    lacks_tokenizer = any(row["lacks_tokenizer"] for row in rows)
    return {
        "peers": peers,
        "lacks_tokenizer": lacks_tokenizer,
        **added,
        "tenants": [*tenants.values()],
    }
