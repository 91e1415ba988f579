"""A proxy that was stopped while its client resumed the stream at another one."""

import asyncio
import signal
from pathlib import Path

import pytest

from kvrs_testkit.multi_proxy_cluster import MultiProxyCluster, open_proxy_group
from kvrs_testkit.proxy_process import process_of
from kvrs_testkit.scripted_model import expected_ids, text_of
from tests.proxy.mirror.test_proxy_kills import text_in

pytestmark = [pytest.mark.process, pytest.mark.network]

TOKENS = 30


@pytest.mark.parametrize("mirror", ["async", "sync"])
async def test_a_proxy_that_was_stopped_writes_nothing_more(tmp_path: Path, mirror: str) -> None:
    """Neither to its client, although tokens wait in its sockets, nor to an engine; nothing is
    repeated.
    """
    async with open_proxy_group(2, proxy={"mirror": mirror}) as group:
        gate = group.system.script.gate = asyncio.Event()
        group.system.script.gate_at = 4
        await group.proxy(0).close()
        group.proxies[0] = None
        async with process_of(group.config_file(0, tmp_path)) as (stopped, _), asyncio.timeout(120):
            old, new = group.reader(max_tokens=TOKENS), group.reader(max_tokens=TOKENS)
            reading = asyncio.create_task(old.read(0))
            while len(old.events) < 4:
                await asyncio.sleep(0.01)

            stopped.send_signal(signal.SIGSTOP)
            new.last, new.events = old.last, list(old.events)
            going_on = asyncio.create_task(new.read(1))
            while (1, 1) not in writers(group):
                await asyncio.sleep(0.01)
            gate.set()
            await going_on
            while group.mirror(1).peers.live:
                await asyncio.sleep(0.01)
            await asyncio.sleep(1.0)  # All its timers are due.
            stopped.send_signal(signal.SIGCONT)
            await reading

    assert (new.done, text_in(new)) == (
        True,
        "".join(map(text_of, expected_ids([1, 2, 3], TOKENS))),
    )
    assert (old.errors, len(old.events)) == (["superseded"], 4)
    assert writers(group) == {(0, 1), (1, 1)}


def writers(group: MultiProxyCluster) -> set[tuple[int, int]]:
    bodies = [body["kvrs"] for one in group.system.instances.values() for body in one.bodies]
    return {(body["owner_epoch"], body["attempt"]) for body in bodies}
