"""What stands between a loss and the first call to an engine: dictionaries, and one message to the agent of the target."""

import asyncio
import io
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import aiohttp
import msgspec
import pytest

from kvrs.gossip.facts import LinkFact
from kvrs.proxy.driver import Driver
from tests.proxy.scripted_model import expected_ids, text_of
from tests.proxy.test_proxy_gossip import cluster

PROMPT = list(range(40))
TOKENS = 8
_OUTSIDE = {"posix", "_posixsubprocess", "_socket", "_ssl", "select", "_io", "io"}
_HARMLESS = {"getpid", "fspath", "urandom"}


class Outside:
    """Every call out of the process, by whoever is called within `watched`. Logging is left out: it goes to standard error."""

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
        if is_outside or isinstance(owner, io.IOBase | socket.socket) or (module, name) == ("time", "sleep"):
            self.calls.append(f"{module}.{name}")


def _is_logging(frame: Any) -> bool:
    while frame is not None:
        if frame.f_globals.get("__name__") == "logging":
            return True
        frame = frame.f_back
    return False


def watch_the_driver(monkeypatch: pytest.MonkeyPatch) -> Outside:
    """All that the driver tells its policy, and all that it carries out for it."""
    outside = Outside()

    def within(method: Callable[..., None]) -> Callable[..., None]:
        def called(*arguments: Any) -> None:
            with outside.watched():
                method(*arguments)

        return called

    for name in ("tell", "instance_lost"):
        monkeypatch.setattr(Driver, name, within(getattr(Driver, name)))
    return outside


def watch_requests(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Port and path of what anybody in this process asks of anybody, in order."""
    asked: list[tuple[str, str]] = []
    request = aiohttp.ClientSession._request

    async def noting(session: aiohttp.ClientSession, method: str, url: Any, **options: Any) -> aiohttp.ClientResponse:
        _, _, place = str(url).partition("://")
        host, _, path = place.partition("/")
        asked.append((host.rpartition(":")[2], "/" + path))
        return await request(session, method, url, **options)

    monkeypatch.setattr(aiohttp.ClientSession, "_request", noting)
    return asked


def test_a_call_out_of_the_process_is_noticed() -> None:
    """Whoever watches for something that never comes must be able to see it."""
    outside = Outside()

    with outside.watched():
        with socket.socket() as unconnected, suppress(OSError):
            unconnected.send(b"x")
        with open(__file__, "rb") as file:
            file.read(1)

    assert {call.rpartition(".")[2] for call in outside.calls} >= {"send", "open", "read"}


async def test_a_decision_reads_nothing_but_memory_and_the_reservation_is_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads, links, slots and deaths are known before: what is asked for at a failure is late, or asked of the dead."""
    outside = watch_the_driver(monkeypatch)
    async with cluster(policy={"name": "always_migrate"}) as (house, _, n0, n1):
        n0.publish("n1", LinkFact(1e9, 1e7, 0.5))
        n1.publish("n0", LinkFact(1e9, 1e7, 0.5))
        await house.instances["d1"].kill()
        await house.until_health(d1="down")
        house.script.gate, house.script.gate_at = asyncio.Event(), 3
        asking = [asyncio.create_task(house.complete(prompt=PROMPT, max_tokens=TOKENS, temperature=0)) for _ in range(6)]
        await house.until_streams_hold(3, count=6)
        await house.instances["d1"].restart()
        await house.until_health(d1="up")
        known = {
            str(house.agents["agent-n1"].port),
            str(house.instances["d1"].port),
            *(str(house.instances[p].port) for p in ("p0", "p1")),
        }
        asked, before = watch_requests(monkeypatch), outside.turns

        await house.instances["d0"].kill()
        house.script.gate.set()
        answers = await asyncio.gather(*asking)

    wanted = "".join(map(text_of, expected_ids(PROMPT, TOKENS)))
    assert all(msgspec.json.decode(body)["choices"][0]["text"] == wanted for _, body in answers)
    assert outside.turns > before
    assert outside.calls == []
    first, second = [each for each in asked if each[0] in known][:2]
    assert first == (str(house.agents["agent-n1"].port), "/kvrs/v1/slots")
    assert second == (str(house.instances["d1"].port), "/v1/completions")
