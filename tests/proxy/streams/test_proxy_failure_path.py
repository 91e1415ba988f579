"""Dictionaries, and one message to the agent of the target, are all that stands between a loss and
the first call to an engine.
"""

import asyncio
import io
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import aiohttp
import msgspec
import pytest

from kvrs.core.control import Control
from kvrs.gossip.facts import LinkFact
from kvrs.proxy.wire.upstream import Need, Reader, Upstream
from kvrs_testkit.scripted_model import expected_ids, text_of
from tests.proxy.watch.test_proxy_gossip import cluster

PROMPT = list(range(40))
TOKENS = 8
_OUTSIDE = {"posix", "_posixsubprocess", "_socket", "_ssl", "select", "_io", "io"}
_HARMLESS = {"getpid", "fspath", "urandom"}


class Outside:
    """Records every call out of the process from within `watched`, except logging to standard
    error.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.turns = 0
        self._depth = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        self._depth += 1
        self.turns += 1
        sys.setprofile(self._note)
        try:
            yield
        finally:
            self._depth -= 1
            sys.setprofile(self._note if self._depth else None)

    def _note(self, frame: Any, event: str, called: Any) -> None:
        if event != "c_call" or _is_logging(frame):
            return
        owner = getattr(called, "__self__", None)
        module = getattr(called, "__module__", None) or getattr(owner, "__name__", "")
        name = called.__name__
        is_outside = module in _OUTSIDE and name not in _HARMLESS
        if (
            is_outside
            or isinstance(owner, io.IOBase | socket.socket)
            or (module, name) == ("time", "sleep")
        ):
            self.calls.append(f"{module}.{name}")


def _is_logging(frame: Any) -> bool:
    while frame is not None:
        if frame.f_globals.get("__name__") == "logging":
            return True
        frame = frame.f_back
    return False


def watch_the_driver(monkeypatch: pytest.MonkeyPatch) -> Outside:
    """Events that the driver passes to its policy, and actions that it carries out."""
    outside = Outside()

    def within(method: Callable[..., None]) -> Callable[..., None]:
        def called(*arguments: Any, **named: Any) -> None:
            with outside.watched():
                method(*arguments, **named)

        return called

    for name in ("tell", "instance_lost"):
        monkeypatch.setattr(Control, name, within(getattr(Control, name)))
    return outside


def watch_requests(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Port and path of every request of this process, in order."""
    asked: list[tuple[str, str]] = []
    request = aiohttp.ClientSession._request

    async def noting(
        session: aiohttp.ClientSession, method: str, url: Any, **options: Any
    ) -> aiohttp.ClientResponse:
        _, _, place = str(url).partition("://")
        host, _, path = place.partition("/")
        asked.append((host.rpartition(":")[2], "/" + path))
        return await request(session, method, url, **options)

    send = Upstream.send

    async def noting_send(
        upstream: Upstream, head: bytes, body: bytes, reader: Reader
    ) -> Awaitable[Need]:
        request_line, host, _ = head.decode().split("\r\n", 2)
        asked.append((host.rpartition(":")[2], request_line.split()[1]))
        return await send(upstream, head, body, reader)

    monkeypatch.setattr(aiohttp.ClientSession, "_request", noting)
    monkeypatch.setattr(Upstream, "send", noting_send)
    return asked


def test_a_call_out_of_the_process_is_noticed() -> None:
    """A detector that is never seen to fire proves nothing."""
    outside = Outside()

    with outside.watched():
        with socket.socket() as unconnected, suppress(OSError):
            unconnected.send(b"x")
        with open(__file__, "rb") as file:
            file.read(1)

    assert {call.rpartition(".")[2] for call in outside.calls} >= {"send", "open", "read"}


@pytest.mark.network
async def test_a_decision_reads_nothing_but_memory_and_the_reservation_is_the_first_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Loads, links, slots and deaths are known before the failure: a request at that moment is
    late, or goes to a dead process.
    """
    outside = watch_the_driver(monkeypatch)
    async with cluster(policy={"name": "always_migrate"}) as (system, _, n0, n1):
        n0.publish("n1", LinkFact(1e9, 1e7, 0.5))
        n1.publish("n0", LinkFact(1e9, 1e7, 0.5))
        await system.instances["d1"].kill()
        await system.until_health(d1="down")
        system.script.gate, system.script.gate_at = asyncio.Event(), 3
        asking = [
            asyncio.create_task(system.complete(prompt=PROMPT, max_tokens=TOKENS, temperature=0))
            for _ in range(6)
        ]
        await system.until_streams_hold(3, count=6)
        await system.instances["d1"].restart()
        await system.until_health(d1="up")
        known = {
            str(system.agents["agent-n1"].port),
            str(system.instances["d1"].port),
            *(str(system.instances[p].port) for p in ("p0", "p1")),
        }
        asked, before = watch_requests(monkeypatch), outside.turns

        await system.instances["d0"].kill()
        system.script.gate.set()
        answers = await asyncio.gather(*asking)

    wanted = "".join(map(text_of, expected_ids(PROMPT, TOKENS)))
    assert all(msgspec.json.decode(body)["choices"][0]["text"] == wanted for _, body in answers)
    assert outside.turns > before
    assert outside.calls == []
    first, *others = [each for each in asked if each[0] in known]
    assert first == (str(system.agents["agent-n1"].port), "/kvrs/v1/slots")
    # Victims reserve side by side.
    second = next(each for each in others if each != first)
    assert second == (str(system.instances["d1"].port), "/v1/completions")
