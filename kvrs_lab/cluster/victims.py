"""Handles (pidfd) on the processes of the state, to signal them.

A handle is opened after a check of the process's port or name: a process id alone may now belong to
another process or machine.
"""

import contextlib
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kvrs.config.cluster import stage_host_id
from kvrs.errors import KvrsError
from kvrs.ids import InstanceId
from kvrs_engine.engine.ranks.settings import rank_name
from kvrs_lab.faults.language import VictimRole

_LISTENING = "0A"
_NAME_CHARACTERS = 15  # The kernel's limit for the name of a process.


class FaultError(KvrsError):
    """A fault cannot be carried out; the message names victim and reason."""


def pids_of(row: Mapping[str, Any]) -> dict[int, int]:
    """The processes of an instance's ranks."""
    return {one["rank"]: one["pid"] for one in row.get("ranks") or ()}


@contextlib.contextmanager
def closing_process(process: int) -> Iterator[int]:
    try:
        yield process
    finally:
        os.close(process)


def _open(pid: int, what: str, is_right: Callable[[], bool], otherwise: str) -> int:
    """Open a handle on the process, if it is the right one. Raises FaultError."""
    if not pid:  # The process has not reported its id, or no process of the instance is known.
        raise FaultError(f"{what}: its process id is {pid} (unknown); allowed: a known one")
    try:
        process = os.pidfd_open(pid)
    except (OSError, TypeError, ValueError) as error:
        raise FaultError(f"{what}: process {pid}: {error}") from None
    if not is_right():
        os.close(process)
        raise FaultError(f"{what}: process {pid} {otherwise}")
    return process


def _command(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def _name_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().rstrip()
    return ""


def open_process(row: Mapping[str, Any]) -> int:
    """A handle on the process of an instance or agent of the state, on this machine.

    Raises:
        FaultError: the process runs elsewhere, may not be signalled, or is another one.
    """
    address = urlsplit(row["url"])
    what = f"{named(row)} at {row['url']}"
    if not _is_of_this_machine(address.hostname or ""):
        raise FaultError(
            f"{what}: it runs on another machine; allowed: faults on processes of this one"
        )
    return _open(
        row["pid"],
        what,
        lambda: _listens(row["pid"], address.port or 0),
        "of this machine does not listen there, so it is another one",
    )


def open_processes(
    row: Mapping[str, Any], *, workers: int | None = None, server_too: bool = False
) -> list[int]:
    """Handles on the processes whose death ends an instance: its worker processes, or `workers` of
    them, or its own process.

    Raises:
        FaultError: as `open_process`.
    """
    pids = row.get("worker_pids") or []
    if workers is not None and workers > len(pids):
        raise FaultError(
            f"{named(row)} has {len(pids)} worker processes; allowed: at most as many to be hit"
        )
    with contextlib.ExitStack() as opened:
        # The server lists its workers: it must be on this machine and the one of the state.
        server = open_process(row)
        handles = [server] if server_too or not pids else []
        opened.callback(os.close, server)
        for pid in pids[:workers]:
            handles.append(_open_worker(row, pid))
            opened.callback(os.close, handles[-1])
        opened.pop_all()
    if server not in handles:
        os.close(server)
    return handles


def hosts_of(row: Mapping[str, Any]) -> dict[int, tuple[InstanceId, int]]:
    """The host of each stage in a host: name and process id."""
    return {
        one["stage"]: (stage_host_id(one.get("donor") or row["id"], one["stage"]), one["host_pid"])
        for one in row.get("stages") or ()
        if one["session"] is not None
    }


def open_stage(row: Mapping[str, Any], stage: int) -> int:
    """A handle on the host that has a stage of an instance of the state, on this machine.

    Raises:
        FaultError: as `open_process`, or no host has that stage.
    """
    hosts = hosts_of(row)
    os.close(open_process(row))
    if (found := hosts.get(stage)) is None:
        raise FaultError(f"{named(row)} has no stage {stage} in a host; allowed: {sorted(hosts)}")
    name, pid = found
    what = f"stage {stage} of {named(row)}: {name}"
    return _open(pid, what, lambda: _name_of(pid) == name[:_NAME_CHARACTERS], "is another one")


def open_rank(row: Mapping[str, Any], rank: int) -> int:
    """A handle on the process of one rank of an instance of the state, on this machine.

    Raises:
        FaultError: as `open_process`, or the instance has no such rank any more.
    """
    pids = pids_of(row)
    os.close(open_process(row))
    if (pid := pids.get(rank)) is None:
        raise FaultError(f"{named(row)} has no rank {rank}; allowed: {sorted(pids)}")
    what = f"rank {rank} of {named(row)}"
    return _open(pid, what, lambda: _name_of(pid) == rank_name(rank), "is another one")


def _open_worker(row: Mapping[str, Any], pid: int) -> int:
    # Ray's workers have names of this form.
    what = f"a worker process of {named(row)}"
    otherwise = "is no worker of Ray, so it is another one"
    return _open(pid, what, lambda: _command(pid).startswith(b"ray::"), otherwise)


def named(row: Mapping[str, Any]) -> str:
    return str(row["id"]) if row.get("role") == VictimRole.AGENT else f"instance {row['id']}"


def _is_of_this_machine(host: str) -> bool:
    # An address of another machine cannot be bound.
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, 0), family=family):
            return True
    except OSError:
        return False


def _listens(pid: int, port: int) -> bool:
    """Return whether the process has a socket that listens on the port."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            rows = [
                line.split()
                for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
            ]
            inodes |= {
                row[9]
                for row in rows
                if row[3] == _LISTENING and int(row[1].rpartition(":")[2], 16) == port
            }
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if os.readlink(link).removeprefix("socket:[").rstrip("]") in inodes:
                    return True
    return False
