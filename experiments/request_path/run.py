"""The cost of a request in the proxy: its events, its body, its two calls, all of it without
sockets, and the recovery of the victims of a death.

    python -m experiments.request_path.run [--rounds 200] [--out DIR]
"""

import argparse
import asyncio
import gc
import logging
import statistics
import sys
import time
from array import array
from collections import Counter
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

import msgspec

from experiments.record import Record
from experiments.request_path import whole
from kvrs.config.file import Config, parse_config
from kvrs.core.attempt import Attempt
from kvrs.core.model import events as ev
from kvrs.core.recovery import RecoveryPolicy
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.profiles import catalog
from kvrs.protocol.instance import Capability, InstanceInfo, MeasuredPrefill, Role
from kvrs.proxy.backends.backend import Backend, Prefilled
from kvrs.proxy.backends.bodies import Call, decode_call, prefill_call
from kvrs.proxy.streams.driver import Driver
from kvrs.proxy.streams.metrics import Metrics
from kvrs.proxy.wire.journal import Journal
from kvrs.proxy.wire.requests import COMPLETIONS, read
from kvrs.proxy.wire.upstream import Reader

PROFILE = "opt-13b-a100-distserve-tp1"
NODES = (2, 8, 32)  # Each with a prefill and a decode instance.
OPEN_STREAMS = 200
PROMPT_TOKENS = 128
VICTIMS = 200
SURVIVORS = 8  # So that each victim has a slot at once.
PRODUCED_TOKENS = 100
LOST = InstanceId("d0")
PAUSE_S = whole.PAUSE_S
MEANWHILE_BYTES = whole.MEANWHILE_BYTES
# Of a cluster with two nodes.
LIMIT_EVENT_US = 20.0
LIMIT_RECOVERY_MS = 20.0
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


class Calls:
    """The decode calls that all backends have had."""

    def __init__(self) -> None:
        self._left = 0
        self._all = asyncio.Event()

    async def until(self, number: int) -> None:
        self._left = number
        self._all.clear()
        await self._all.wait()

    def note(self) -> None:
        self._left -= 1
        if not self._left:
            self.last_s, self.last_cpu_s = time.monotonic(), time.thread_time()
            self._all.set()


class SilentBackend:
    """An instance that notes its calls, and answers prefill only."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self.url = ""

    async def prefill(self, call: Call) -> Prefilled:
        call.spend()
        return Prefilled(
            array("I", range(PROMPT_TOKENS)), msgspec.Raw(b'{"do_remote_prefill":true}')
        )

    async def decode(self, call: Call, reader: Reader) -> None:
        call.spend()
        self._calls.note()
        await asyncio.Event().wait()


class NoClient:
    blocked = False
    direct = None
    take_token = None

    def send(self, events: Sequence[bytes]) -> None:
        raise AssertionError(events)

    def when_free(self, resume: Callable[[], None]) -> None:
        raise AssertionError(resume)


# Events of the policy.


def measure_events(nodes: int, rounds: int, *, is_idle: bool) -> dict[str, float]:
    """Median microseconds of each event of a stream's life, while others are open; `is_idle`: the
    process slept before each, and what the machine did meanwhile has passed through its caches.
    """
    config = make_config(nodes)
    driver = Driver(config, {}, {}, Metrics({}), time.monotonic, time.time)
    bring_up(driver, driver.control.instances.known)
    policy, now_s = driver.control.policy, 1.0

    def life(stream: StreamId) -> list[ev.Event]:
        return [
            ev.StreamArrived(stream, PROMPT_TOKENS, PROMPT_TOKENS + 256, client="one"),
            ev.PrefillDone(stream, 1, PROMPT_TOKENS),
            ev.StreamResumed(stream, 1),
            ev.StreamEnded(stream, 1),
        ]

    for n in range(OPEN_STREAMS):
        for event in life(StreamId(f"open{n}"))[:3]:
            policy.handle(event, now_s)
    took: dict[str, list[float]] = {}
    for n in range(rounds):
        for event in life(StreamId(f"{n:032x}")):
            now_s += PAUSE_S
            if is_idle:
                time.sleep(PAUSE_S)
                bytes(MEANWHILE_BYTES)
            took.setdefault(type(event).__name__, []).append(time_of(policy, event, now_s))
    return {name: round(statistics.median(found), 2) for name, found in took.items()}


def time_of(policy: RecoveryPolicy, event: ev.Event, now_s: float) -> float:
    begun_ns = time.perf_counter_ns()
    policy.handle(event, now_s)
    return (time.perf_counter_ns() - begun_ns) / 1e3


def bring_up(driver: Driver, names: Iterable[InstanceId]) -> None:
    for name in names:
        known = driver.control.instances.known[name]
        info = make_info(known.id, known.node, known.role)
        driver.control.instance_up(known, info, time.monotonic())


# Body and calls.


def bodies() -> dict[str, bytes]:
    text = {
        "prompt": "word " * PROMPT_TOKENS,
        "max_tokens": 256,
        "stream": True,
        "temperature": 0.7,
    }
    ids = {**text, "prompt": list(range(1000, 1000 + PROMPT_TOKENS))}
    long = {**text, "prompt": list(range(1000, 9000))}
    found = {"text": text, "ids": ids, "8000 ids": long}
    return {name: msgspec.json.encode({"model": "m", **body}) for name, body in found.items()}


def measure_bodies(rounds: int) -> dict[str, dict[str, float]]:
    """Median microseconds of a body's parsing and checks, and of the two calls made of it."""
    found: dict[str, dict[str, float]] = {}
    for name, body in bodies().items():
        steps = dict(steps_of(body))
        samples: dict[str, list[float]] = {step: [] for step in steps}
        for _ in range(rounds):
            for step, run in steps.items():
                samples[step].append(mean_us(run, 10))
        found[name] = {step: round(statistics.median(took), 2) for step, took in samples.items()}
    return found


def steps_of(body: bytes) -> Iterator[tuple[str, Callable[[], object]]]:
    ids = array("I", range(1000, 1000 + PROMPT_TOKENS))

    def journal_of() -> Journal:
        parsed = read(COMPLETIONS, body)
        journal = Journal(StreamId("0" * 32), parsed, 0.0, 1, prompt_ids=parsed.prompt_ids)
        parsed.strip()
        return journal

    before, after, cut = journal_of(), journal_of(), journal_of()
    for journal in (after, cut):
        if journal.prompt_ids is None:
            journal.prompt_ids = journal.parsed.tokenised(ids)
    cut.output_ids.extend(range(2000, 2000 + PRODUCED_TOKENS))
    transfer = msgspec.Raw(
        b'{"do_remote_prefill":true,"remote":"p0","tags":"' + b"ab" * 256 + b'"}'
    )
    yield "read", lambda: read(COMPLETIONS, body)
    yield "prefill call", lambda: prefill_call(before, 1, (), exact=True).spend()
    yield "decode call", lambda: decode_call(after, 1, (), (), transfer, exact=True).spend()
    yield "recovery call", lambda: decode_call(cut, 2, (), (), None, exact=True).spend()


def mean_us(run: Callable[[], object], calls: int) -> float:
    begun_ns = time.perf_counter_ns()
    for _ in range(calls):
        run()
    return (time.perf_counter_ns() - begun_ns) / calls / 1e3


# Recovery.


async def measure_recovery(
    victims: int = VICTIMS, watch: AbstractContextManager[object] = _UNWATCHED
) -> dict[str, float]:
    """Milliseconds from the notice of a death to the last recovery call of its victims, `gather_s`
    among them, and of CPU in that time, within which `watch` is entered.
    """
    config = make_config(1 + SURVIVORS)
    instances = [instance.id for _, instance in config.cluster.instances()]
    calls = Calls()
    backends = {name: SilentBackend(calls) for name in instances}
    used = cast(Mapping[InstanceId, Backend], backends)  # Nothing watches them.
    driver = Driver(config, used, {}, Metrics({}), time.monotonic, time.time)
    bring_up(driver, instances[:2])
    body, client = bodies()["ids"], NoClient()
    tasks = [asyncio.create_task(driver.run(journal_of(n, body), client)) for n in range(victims)]
    await calls.until(victims)
    for live in list(driver.streams.values()):
        live.journal.output_ids.extend(range(PRODUCED_TOKENS))
        assert live.attempt.plan is not None
        driver.resumed(Attempt(driver.control, live, live.attempt.plan))
    bring_up(driver, instances[2:])
    gc.collect()
    with watch:
        begun_s, begun_cpu_s = time.monotonic(), time.thread_time()
        driver.control.instance_lost(driver.control.instances.known[LOST], "killed", begun_s)
        noticed_s = time.monotonic()
        await calls.until(victims)
    options = Counter(each.option.value for each in driver.recoveries.entries)
    assert options.total() == victims, options
    await driver.close()
    await asyncio.gather(*tasks)
    return {
        "notice_ms": (noticed_s - begun_s) * 1e3,
        "last_call_ms": (calls.last_s - begun_s) * 1e3,
        "cpu_ms": (calls.last_cpu_s - begun_cpu_s) * 1e3,
    }


def journal_of(number: int, body: bytes) -> Journal:
    parsed = read(COMPLETIONS, body)
    stream = StreamId(f"{number:032x}")
    journal = Journal(stream, parsed, time.monotonic(), 1, prompt_ids=parsed.prompt_ids)
    parsed.strip()
    return journal


def measured_recoveries(deaths: int) -> dict[str, float]:
    found = [asyncio.run(measure_recovery()) for _ in range(deaths)]
    return {
        f"{name}_{what}": round(of([each[name] for each in found]), 2)
        for name in found[0]
        for what, of in (("median", statistics.median), ("max", max))
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--deaths", type=int, default=10)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    record = Record()
    events = {
        (nodes, is_idle): measure_events(nodes, options.rounds, is_idle=is_idle)
        for nodes in NODES
        for is_idle in (False, True)
    }
    requests = measure_bodies(options.rounds)
    config = make_config(NODES[0])
    infos = [make_info(each.id, node.id, each.role) for node, each in config.cluster.instances()]
    wholes = {
        is_idle: whole.measured(config, infos, options.rounds, is_idle=is_idle)
        for is_idle in (False, True)
    }
    recovery = measured_recoveries(options.deaths)
    lines = [
        *(
            f"{nodes} + {nodes} instances{', idle' * is_idle}, us: {as_text(took)}"
            for (nodes, is_idle), took in events.items()
        ),
        *(f"prompt of {name}, us: {as_text(took)}" for name, took in requests.items()),
        *(
            f"a request of {whole.TOKENS} tokens{', idle' * is_idle}: {as_text(took)}"
            for is_idle, took in wholes.items()
        ),
        f"{VICTIMS} victims, {SURVIVORS} targets: {as_text(recovery)}",
    ]
    print(*lines, sep="\n")
    rows: list[dict[str, Any]] = [
        *(
            {"nodes": nodes, "is_idle": is_idle, "event_us": took}
            for (nodes, is_idle), took in events.items()
        ),
        *({"body": name, "step_us": took} for name, took in requests.items()),
        *({"whole": whole.TOKENS, "is_idle": idle, **took} for idle, took in wholes.items()),
        {"victims": VICTIMS, "survivors": SURVIVORS, "deaths": options.deaths, **recovery},
    ]
    record.keep(options.out, "request_path", {"rows": rows}, "\n".join(lines))
    is_quick = max(events[NODES[0], False].values()) <= LIMIT_EVENT_US
    return 0 if is_quick and recovery["last_call_ms_median"] <= LIMIT_RECOVERY_MS else 1


def as_text(figures: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.1f}" for name, value in figures.items())


if __name__ == "__main__":
    sys.exit(main())
