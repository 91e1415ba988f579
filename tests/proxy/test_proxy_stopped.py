"""A proxy that only stood still while its client went on with the stream at another one."""

import asyncio
import signal
from pathlib import Path

import pytest

from tests.proxy.scripted_model import expected_ids, text_of
from tests.proxy.street import Street, open_street
from tests.proxy.test_proxy_kills import text_in
from tests.proxy.test_proxy_process import process_of

TOKENS = 30


@pytest.mark.parametrize(("mirror", "stopped_s"), [("async", 5.0), ("sync", 1.0)])
async def test_a_proxy_that_was_only_stopped_writes_nothing_more(tmp_path: Path, mirror: str, stopped_s: float) -> None:
    """Neither to its client, though tokens wait for it in its sockets, nor to an engine; and nothing is repeated."""
    async with open_street(2, proxy={"mirror": mirror}) as street:
        gate = street.house.script.gate = asyncio.Event()
        street.house.script.gate_at = 4
        await street.proxy(0).close()
        street.proxies[0] = None
        async with process_of(street.config_file(0, tmp_path)) as (stopped, _), asyncio.timeout(20):
            old, new = street.reader(max_tokens=TOKENS), street.reader(max_tokens=TOKENS)
            reading = asyncio.create_task(old.read(0))
            while len(old.events) < 4:
                await asyncio.sleep(0.01)

            stopped.send_signal(signal.SIGSTOP)
            new.last, new.events = old.last, list(old.events)
            going_on = asyncio.create_task(new.read(1))
            while (1, 1) not in writers(street):
                await asyncio.sleep(0.01)
            gate.set()
            await going_on
            # Long enough for everybody to give it up, and for it to find that all its timers have run out.
            await asyncio.sleep(stopped_s)
            stopped.send_signal(signal.SIGCONT)
            await reading

    assert (new.done, text_in(new)) == (True, "".join(map(text_of, expected_ids([1, 2, 3], TOKENS))))
    assert (old.errors, len(old.events)) == (["superseded"], 4)
    assert writers(street) == {(0, 1), (1, 1)}


def writers(street: Street) -> set[tuple[int, int]]:
    bodies = [body["kvrs"] for one in street.house.instances.values() for body in one.bodies]
    return {(body["owner_epoch"], body["attempt"]) for body in bodies}
