"""Silence of everything that is waited for, by one timer."""

import asyncio
import time

import pytest

from kvrs.proxy.fleet import watchdog
from kvrs.proxy.fleet.watchdog import SilentError, excuse_silence, silence_limit


async def silent_for(limit_s: float) -> float:
    begun_s = time.monotonic()
    silent = pytest.raises(SilentError, match=f"silent for {limit_s:.3g} s")
    with silent, silence_limit(lambda: limit_s):
        await asyncio.Event().wait()
    return time.monotonic() - begun_s


async def test_every_block_ends_by_its_own_limit() -> None:
    """Whatever limits the others have, and in whatever order they began."""
    limits_s = [0.3, 0.05, 0.2, 0.1, 0.05]

    took_s = await asyncio.gather(*map(silent_for, limits_s))

    assert all(took >= limit for took, limit in zip(took_s, limits_s, strict=True))
    assert sorted(range(5), key=took_s.__getitem__)[-2:] == [2, 0]


async def test_many_blocks_have_one_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of streams wait at a time."""
    armed, arm = list[int](), watchdog._Looks._arm

    def counting(looks: watchdog._Looks) -> None:
        armed.append(1)
        arm(looks)

    monkeypatch.setattr(watchdog._Looks, "_arm", counting)

    await asyncio.gather(*(silent_for(0.1) for _ in range(500)))

    assert len(armed) < 50


async def test_what_is_heard_or_excused_goes_on_and_a_block_that_ended_is_forgotten() -> None:
    """A limit counts from the last word."""
    # Pauses of a third of the limit, more than three of them: a busy machine makes them longer.
    with silence_limit(lambda: 0.6) as heard:
        for _ in range(4):
            await asyncio.sleep(0.2)
            heard.heard()
        for _ in range(4):
            await asyncio.sleep(0.2)
            excuse_silence()
    with silence_limit(lambda: 0.6):
        with silence_limit(lambda: 0.6):
            await asyncio.sleep(0.2)
        for _ in range(4):
            await asyncio.sleep(0.2)
            excuse_silence()
    excused = 0

    def excuses() -> bool:
        nonlocal excused
        excused += 1
        return True

    with silence_limit(lambda: 0.05, excuses):
        await asyncio.sleep(0.2)
    during = excused
    await asyncio.sleep(0.15)

    assert 1 <= during == excused
