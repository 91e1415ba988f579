"""The death of an instance in the proxy, and the recovery of its victim, without sockets."""

import asyncio
import gc
import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import cast

import msgspec

from kvrs.config.file import Config, parse_config
from kvrs.core.control import Attempt
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.net.connections import ByteBudget
from kvrs.profiles import catalog
from kvrs.protocol.instance import Capability, InstanceInfo, MeasuredPrefill, Role
from kvrs.proxy.backends.backend import Backend, Prefilled
from kvrs.proxy.backends.bodies import Call
from kvrs.proxy.streams.driver import Driver
from kvrs.proxy.streams.metrics import Metrics
from kvrs.proxy.wire.journal import Journal
from kvrs.proxy.wire.requests import COMPLETIONS, RequestUsage, read
from kvrs.proxy.wire.upstream import Reader

PROFILE = "opt-13b-a100-distserve-tp1"
PROMPT_TOKENS = 128
SURVIVORS = 8
PRODUCED_TOKENS = 100
LOST = InstanceId("d0")
_UNWATCHED = nullcontext()
_PREFILL = MeasuredPrefill("measured", 64, [0.01, 0.012, 0.02, 0.04])


def make_config(nodes: int) -> Config:
    listed = [
        {
            "id": f"n{node}",
            "instances": [
                {"id": f"p{node}", "role": "prefill"},
                {"id": f"d{node}", "role": "decode"},
            ],
        }
        for node in range(nodes)
    ]
    return parse_config(
        {
            "cluster": {"engine": {"page_size_tokens": 16}, "nodes": listed},
            "profiles": {"prefill": PROFILE},
            "proxy": {"self_test": False},
        }
    )


def make_info(name: str, node: str, role: Role) -> InstanceInfo:
    geometry, capabilities = catalog.kv_geometry(PROFILE), list(Capability)
    return InstanceInfo(
        InstanceId(name), NodeId(node), role, 1, 1, "model", "print", geometry, 4096, 1,
        capabilities, _PREFILL,
    )  # fmt: skip


class SilentBackend:
    """An instance that notes its decode calls, and answers prefill only."""

    def __init__(self, called: asyncio.Event) -> None:
        self._called = called
        self.url = ""

    async def prefill(self, call: Call) -> Prefilled:
        call.spend()
        return Prefilled(
            array("I", range(PROMPT_TOKENS)), msgspec.Raw(b'{"do_remote_prefill":true}')
        )

    async def decode(self, call: Call, reader: Reader) -> None:
        call.spend()
        self._called.set()
        await asyncio.Event().wait()


class NoClient:
    blocked = False
    direct = None
    take_token = None

    def send(self, events: Sequence[bytes]) -> None:
        raise AssertionError(events)

    def when_free(self, resume: Callable[[], None]) -> None:
        raise AssertionError(resume)


def bring_up(driver: Driver, names: Iterable[InstanceId]) -> None:
    for name in names:
        known = driver.control.instances.known[name]
        info = make_info(known.id, known.node, known.role)
        driver.control.instance_up(known, info, time.monotonic())


async def recover(watch: AbstractContextManager[object] = _UNWATCHED) -> None:
    """From the notice of a death to the recovery call of its victim, within which `watch` is
    entered.
    """
    config = make_config(1 + SURVIVORS)
    instances = [instance.id for _, instance in config.cluster.instances()]
    called = asyncio.Event()
    backends = {name: SilentBackend(called) for name in instances}
    used = cast(Mapping[InstanceId, Backend], backends)  # Nothing watches them.
    driver = Driver(config, used, {}, Metrics({}), time.monotonic, time.time)
    bring_up(driver, instances[:2])
    running = asyncio.create_task(driver.run(_journal(), NoClient()))
    await called.wait()
    called.clear()
    (live,) = driver.streams.values()
    live.journal.output_ids.extend(range(PRODUCED_TOKENS))
    assert live.attempt.plan is not None
    Attempt(driver.control, live, live.attempt.plan).resumed(driver.clock())
    bring_up(driver, instances[2:])
    gc.collect()
    with watch:
        driver.control.instance_lost(
            driver.control.instances.known[LOST], "killed", time.monotonic()
        )
        await called.wait()
    assert len(driver.recoveries.latest) == 1
    await driver.close()
    await running


def _journal() -> Journal:
    body = {
        "model": "m",
        "prompt": list(range(1000, 1000 + PROMPT_TOKENS)),
        "max_tokens": 256,
        "stream": True,
        "temperature": 0.7,
    }
    parsed = read(COMPLETIONS, msgspec.json.encode(body))
    stream = StreamId("0" * 32)
    journal = Journal(stream, parsed, time.monotonic(), 1, prompt_ids=parsed.prompt_ids)
    parsed.hold(RequestUsage(ByteBudget(1 << 20, 1 << 20)))
    return journal
