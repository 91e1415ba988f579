"""Silence of everything that is waited for, by one timer."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvrs.errors import UpstreamError
from kvrs.protocol.instance import LeaseUpdate
from kvrs.proxy.wire import upstream, watchdog
from kvrs.proxy.wire.errors import BusyError, ConnectionLostError
from kvrs.proxy.wire.peer import Peer
from kvrs.proxy.wire.upstream import Access, Pool
from kvrs.proxy.wire.watchdog import SilentError, Watchdog, _TimerWheel, reset_timeout
from kvrs_testkit.virtual_time import run_virtually, virtual_loop


async def silent_for(limit_s: float) -> float:
    loop = virtual_loop()
    begun_s = loop.time()
    silent = pytest.raises(SilentError, match=f"silent for {limit_s:.3g} s")
    with silent, Watchdog(lambda *_: limit_s):
        await asyncio.Event().wait()
    return loop.time() - begun_s


async def silent_together(limits_s: list[float]) -> list[float]:
    return await asyncio.gather(*map(silent_for, limits_s))


def test_every_block_ends_by_its_own_limit() -> None:
    """Whatever limits the others have, and in whatever order they began."""
    limits_s = [0.3, 0.15, 0.2, 0.1, 0.15]

    took_s = run_virtually(silent_together(limits_s))

    late_s = [took - limit for took, limit in zip(took_s, limits_s, strict=True)]
    assert min(late_s) >= 0
    assert max(late_s) <= 0.02


def test_a_limit_is_not_asked_for_by_a_block_that_ends_soon() -> None:
    """It takes many calls, and nearly all blocks are left before it counts."""
    asked = 0

    def limit_s(*_: float) -> float:
        nonlocal asked
        asked += 1
        return 1.0

    async def short() -> None:
        with Watchdog(limit_s):
            await asyncio.sleep(0.05)

    run_virtually(short())
    assert asked == 0


def test_a_look_that_is_too_early_waits_for_its_time() -> None:
    """The timer fires for the lag of the event loop as well, a moment before the limit counts."""
    asked = 0

    def limit_s(*_: float) -> float:
        nonlocal asked
        asked += 1
        virtual_loop().stall(0.0001)  # As long as a call takes.
        return 0.155

    async def silent() -> None:
        with pytest.raises(SilentError), Watchdog(limit_s):
            await asyncio.Event().wait()

    run_virtually(silent())
    assert asked == 3  # The first look, the early one, and the one that ends the block.


def test_many_blocks_have_one_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of streams wait at a time."""
    armed, arm = list[int](), watchdog._TimerWheel._arm

    def counting(looks: watchdog._TimerWheel) -> None:
        armed.append(1)
        arm(looks)

    monkeypatch.setattr(watchdog._TimerWheel, "_arm", counting)

    run_virtually(silent_together([0.1] * 500))

    assert len(armed) < 5


def test_what_is_heard_or_excused_goes_on_and_a_block_that_ended_is_forgotten() -> None:
    """A limit counts from the last word."""
    assert run_virtually(_heard_and_excused()) == [2, 2]


async def _heard_and_excused() -> list[int]:
    """How often a block was excused while it lasted, and in all."""
    with Watchdog(lambda *_: 0.3) as heard:
        for _ in range(4):
            await asyncio.sleep(0.2)
            heard.heard()
        for _ in range(4):
            await asyncio.sleep(0.2)
            reset_timeout()
    with Watchdog(lambda *_: 0.3):
        with Watchdog(lambda *_: 0.3):
            await asyncio.sleep(0.2)
        reset_timeout()
        for _ in range(4):
            await asyncio.sleep(0.2)
            reset_timeout()
    excused = 0

    def excuses() -> bool:
        nonlocal excused
        excused += 1
        return True

    with Watchdog(lambda *_: 0.15, excuses):
        await asyncio.sleep(0.4)
    during = excused
    await asyncio.sleep(1.0)
    return [during, excused]


def test_a_proxy_that_was_stopped_itself_suspects_no_instance() -> None:
    """After a stall of the proxy's own event loop the timeout starts again."""

    async def stopped() -> None:
        with Watchdog(lambda *_: 0.2):
            virtual_loop().stall(0.5)
            await asyncio.sleep(0.15)

    run_virtually(stopped())


def test_a_stall_that_is_over_before_a_look_is_due_is_no_silence() -> None:
    """Nothing could be heard in it, although no look was late."""

    async def stopped() -> None:
        with Watchdog(lambda *_: 2.0) as watchdog:
            await asyncio.sleep(0.1)
            virtual_loop().stall(1.85)
            await asyncio.sleep(1.5)
            assert not watchdog.has_expired
            watchdog.heard()

    run_virtually(stopped())


def test_the_lag_of_the_own_event_loop_is_no_silence() -> None:
    """A process that gets a processor now and then hears late, and blames nobody for it."""

    async def starved() -> None:
        with Watchdog(lambda *_: 1.0):
            for _ in range(6):  # None of the stalls is long.
                virtual_loop().stall(0.2)
                await asyncio.sleep(0.1)

    run_virtually(starved())


def test_what_is_silent_beside_the_lag_ends_the_block() -> None:
    """Only the lag itself is left out."""

    async def silent() -> None:
        with Watchdog(lambda *_: 1.0):
            for _ in range(20):
                virtual_loop().stall(0.1)
                await asyncio.sleep(0.2)

    with pytest.raises(SilentError):
        run_virtually(silent())


def test_a_watch_that_heard_something_a_moment_ago_is_not_ended_by_suspicion() -> None:
    """A time slice on a busy machine is no silence; half a second is."""

    async def suspected() -> None:
        with Watchdog(lambda *_: 5.0) as watchdog:
            for pause_s in (0.042, 0.5):
                await asyncio.sleep(pause_s)
                ended.append(watchdog.expire_if_silent())
            await asyncio.sleep(1.0)

    ended: list[bool] = []
    with pytest.raises(SilentError, match=r"silent for 0\.542 s"):
        run_virtually(suspected())
    assert ended == [False, True]


def test_a_small_call_that_is_not_answered_fails_after_two_seconds() -> None:
    """A completion may take longer."""

    async def unanswered() -> float:
        asked = SimpleNamespace(ask=lambda *_: asyncio.Event().wait())
        with pytest.raises(UpstreamError, match=r"no answer to /kvrs/v1/leases within 2\.0 s"):
            await Peer(cast(Any, asked)).leases(LeaseUpdate(1.0))
        return virtual_loop().time()

    assert run_virtually(unanswered()) == pytest.approx(2.0)


def test_a_connection_is_waited_for_for_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is gone does not refuse it."""

    async def waits() -> float:
        monkeypatch.setattr(
            virtual_loop(), "create_connection", lambda *_, **__: asyncio.Event().wait()
        )
        with pytest.raises(ConnectionLostError, match="no connection in time"):
            await Pool(Access(), "http://127.0.0.1:1").take()
        return virtual_loop().time()

    assert run_virtually(waits()) == pytest.approx(1.0)


def test_a_call_waits_30_s_for_a_descriptor_and_looks_ten_times_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Connections of others end meanwhile; the instance is not to blame."""
    tries_s: list[float] = []

    async def connect(*_: object) -> None:
        tries_s.append(virtual_loop().time())

    async def waits() -> None:
        monkeypatch.setattr(upstream, "time", SimpleNamespace(monotonic=virtual_loop().time))
        monkeypatch.setattr(Pool, "_connect", connect)
        with pytest.raises(BusyError):
            await Pool(Access(), "http://d0").take()

    run_virtually(waits())

    assert tries_s[:3] == pytest.approx([0.0, 0.1, 0.2])
    assert tries_s[-1] == pytest.approx(30.0, abs=0.11)


def test_patient_watchdogs_alone_wake_the_event_loop_seldom(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A call beside them has short stalls left out as ever."""
    looks: list[float] = []
    look = _TimerWheel._look

    def noted(wheel: _TimerWheel) -> None:
        looks.append(wheel._loop.time())
        look(wheel)

    monkeypatch.setattr(_TimerWheel, "_look", noted)

    async def run() -> list[int]:
        counts = []
        with Watchdog(lambda *_: 60.0, is_patient=True):
            await asyncio.sleep(5.0)
            for wait in (asyncio.sleep(5.0), called(), asyncio.sleep(5.0)):
                looks.clear()
                await wait
                counts.append(len(looks))
        return counts

    async def called() -> None:
        async def call() -> None:
            with Watchdog(lambda *_: 60.0):
                await asyncio.sleep(5.0)

        await asyncio.create_task(call())

    before, beside, after = run_virtually(run())

    assert before < 30 < 90 < beside
    assert after < 30
