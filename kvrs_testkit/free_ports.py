"""Ports for servers that are started with a given one."""

import asyncio
from contextlib import ExitStack, suppress

from kvrs_lab.cluster.ports import _bind_all
from kvrs_testkit.memory_loop import MemoryLoop

_given: set[int] = set()


def free_ports(count: int) -> list[int]:
    """Ports of loopback that follow each other. As those of `kvrs lab up` they lie below the range
    from which the system takes ports for outgoing connections, and other processes choose others:
    none is in use when the test listens there. In a `MemoryLoop` they are its own.
    """
    with suppress(RuntimeError):
        if isinstance(loop := asyncio.get_running_loop(), MemoryLoop):
            return loop.free_ports(count)
    with ExitStack() as held:
        first = _bind_all(held, "127.0.0.1", range(count), _given)
    ports = range(first, first + count)
    _given.update(ports)
    return [*ports]
