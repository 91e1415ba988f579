"""Leases are renewed in time, whichever process is slow."""

import asyncio
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from kvrs.core.books.leases import Leases
from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.instance import LeaseAnswer, LeaseUpdate
from kvrs.proxy.fleet import leases as module
from kvrs.proxy.fleet.leases import LeaseSender
from kvrs_testkit.virtual_time import run_virtually

SLOW, OTHER = InstanceId("agent-n0"), InstanceId("agent-n1")
LEASE_S = 30.0


@pytest.mark.parametrize("answers_in_s", [0.0, 1.9])
def test_an_agent_that_answers_late_puts_off_no_renewal(
    monkeypatch: pytest.MonkeyPatch, answers_in_s: float
) -> None:
    """Batches of releases go out several times a second, and each waits for all answers."""
    now_s, renewed_s = 0.0, [0.0]

    async def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds
        if now_s > 10 * LEASE_S:
            raise asyncio.CancelledError

    async def answer(agent: InstanceId, update: LeaseUpdate) -> LeaseAnswer:
        nonlocal now_s
        if agent == SLOW:
            now_s += answers_in_s
            leases.release(SLOW, StreamId("another"))
        elif update.renew:
            renewed_s.append(now_s)
        return LeaseAnswer([])

    async def run() -> None:
        agents: Any = {
            name: SimpleNamespace(leases=partial(answer, name)) for name in (SLOW, OTHER)
        }
        await LeaseSender(leases, agents, lambda _: True, lambda *_: None, lambda: now_s).run()

    loop = SimpleNamespace(time=lambda: now_s)
    monkeypatch.setattr(
        module,
        "asyncio",
        SimpleNamespace(
            sleep=sleep, gather=asyncio.gather, get_running_loop=lambda: loop, Event=asyncio.Event
        ),
        raising=True,
    )
    leases = Leases(LEASE_S, lambda: None, release_s=0.25)
    leases.hold(OTHER, StreamId("s"))
    leases.release(SLOW, StreamId("another"))
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(run())

    gaps_s = [after - before for before, after in pairwise(renewed_s)]
    assert len(gaps_s) > 20
    assert max(gaps_s) < LEASE_S / 2


def test_a_sender_without_leases_is_not_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    asked_s: list[float] = []
    due = Leases.due

    def noted(leases: Leases, now_s: float) -> dict[InstanceId, LeaseUpdate]:
        asked_s.append(now_s)
        return due(leases, now_s)

    monkeypatch.setattr(Leases, "due", noted)

    async def run() -> None:
        leases = Leases(LEASE_S, lambda: sender.begin(), release_s=0.25)
        sender = LeaseSender(leases, {}, lambda _: False, lambda *_: None, lambda: 0.0)
        sending = asyncio.create_task(sender.run())
        await asyncio.sleep(10.0)
        assert asked_s == []
        leases.hold(OTHER, StreamId("s"))
        leases.release(OTHER, StreamId("s"))
        await asyncio.sleep(10.0)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)

    run_virtually(run())

    assert asked_s == [10.25]  # The release is sent, and there is nothing again.
