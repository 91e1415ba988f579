"""Resources held by an idle cluster, which must be the same after all faults as before."""

import contextlib
import os
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvrs.cluster.fault_injection import rows_of
from kvrs.cluster.launcher import Cluster
from kvrs.cluster.processes import LaunchError
from kvrs.config.file import Config
from kvrs.faults.language import VictimRole

_LOOK_AGAIN_S = 0.5
# Connections that are kept open for the next message to a peer, whichever side opened them.
_SPARE_SOCKETS_PER_PEER = 2


def wait_for_rest(cluster: Cluster, timeout_s: float) -> dict[str, Any]:
    """Wait until all processes are up, no stream is open and no resource is held for one; return
    the figures then.

    Raises:
        LaunchError: after `timeout_s` a resource is still held; the message names it.
    """
    cluster.wait_all_up()
    give_up_s = time.monotonic() + timeout_s
    while held := _held(cluster.state(), cluster.config.cluster.engine.pages):
        if time.monotonic() > give_up_s:
            raise LaunchError(
                f"{timeout_s:.0f} s after the last stream there is still held: {held}"
            )
        time.sleep(_LOOK_AGAIN_S)
    return figures(cluster)


def _held(state: Mapping[str, Any], pages: int) -> dict[str, Any]:
    """Resources that must not be held without a stream."""
    held: dict[str, Any] = {"streams": len(state["streams"]), "slots": state["slots"]}
    for name, row in rows_of(state).items():
        if row["role"] == VictimRole.AGENT:
            held[f"reservations at {name}"] = row["checkpoints"]
            held[f"reserved bytes at {name}"] = row["reserved_bytes"]
        elif row["load"] is not None:
            held[f"pages at {name}"] = pages - row["load"]["free_pages"]
            held[f"sequences at {name}"] = row["load"]["queued"] + row["load"]["running"]
            held[f"checkpoint lag at {name}"] = row["load"]["checkpoint_lag_pages"]
    return {what: much for what, much in held.items() if much}


def figures(cluster: Cluster) -> dict[str, Any]:
    """Descriptors of every process by kind, and shared memory; unlike slots and pages they need not
    be zero at rest.
    """
    state = cluster.state()
    rows = rows_of(state)
    pids = {str(name): int(row["pid"]) for name, row in rows.items()} | {
        "proxy": int(state["proxies"][0]["pid"])
    }
    agents = [pids[name] for name, row in rows.items() if row["role"] == VictimRole.AGENT]
    segments = [path for path in Path(cluster.config.backup.directory).rglob("*") if path.is_file()]
    used = {path for pid in agents for path in _files_of(pid)}
    return {
        "descriptors": {
            name: dict(sorted(_descriptors(pid).items())) for name, pid in pids.items()
        },
        "shared_memory_bytes": sum(path.stat().st_blocks * 512 for path in segments),
        "files_of_no_agent": [
            path.name
            for path in segments
            if str(path) not in used and path.name.startswith("segment")
        ],
    }


def wait_for_no_leaks(
    cluster: Cluster, before: Mapping[str, Any], timeout_s: float
) -> tuple[dict[str, Any], list[str]]:
    """The figures at rest, and what has grown although idle connections had the time to be closed.

    Raises:
        LaunchError: as `wait_for_rest`.
    """
    give_up_s = time.monotonic() + timeout_s
    while (
        found := leaks(before, after := wait_for_rest(cluster, timeout_s), cluster.config)
    ) and time.monotonic() < give_up_s:
        time.sleep(_LOOK_AGAIN_S)
    return after, found


def leaks(before: Mapping[str, Any], after: Mapping[str, Any], config: Config) -> list[str]:
    """Growth beyond the connections that peers may keep for each other, and beyond the agents'
    cache.
    """
    nodes = config.cluster.nodes
    capacity_bytes = len(nodes) * config.backup.capacity_bytes
    peers = sum(len(node.instances) + 1 for node in nodes)
    found = []
    for name, counts in after["descriptors"].items():
        had = before["descriptors"][name]
        for kind, count in counts.items():
            spare = _SPARE_SOCKETS_PER_PEER * peers if kind == "socket" else 0
            # An agent has one descriptor per segment, and how many those are is bounded by the
            # capacity, below.
            if kind != "segment" and count > had.get(kind, 0) + spare:
                found.append(
                    f"{name}: {count} descriptors of kind {kind}, {had.get(kind, 0)} before"
                )
    if after["shared_memory_bytes"] > capacity_bytes * 1.1:
        found.append(
            f"{after['shared_memory_bytes']} bytes of shared memory; the agents' "
            f"capacity is {capacity_bytes}"
        )
    if after["files_of_no_agent"]:
        found.append(f"segments that no agent uses: {', '.join(after['files_of_no_agent'])}")
    return found


def _descriptors(pid: int) -> Counter[str]:
    kinds: Counter[str] = Counter()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        # It may be closed meanwhile.
        with contextlib.suppress(OSError):
            kinds[_kind(os.readlink(link))] += 1
    return kinds


def _kind(target: str) -> str:
    if target.startswith(("socket:", "pipe:", "anon_inode:")):
        return target.partition(":")[0]
    return "segment" if "/segment" in target else "file"


def _files_of(pid: int) -> set[str]:
    """Every file that a process has mapped or open."""
    mapped = {
        line.split(maxsplit=5)[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()
    }
    opened = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            opened.add(os.readlink(link))
    return mapped | opened
