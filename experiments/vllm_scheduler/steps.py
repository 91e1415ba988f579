"""Steps of vLLM's scheduler at its own offloading managers, with kvrs and without: CPU time of the
scheduler's thread alone. Runs in vLLM's interpreter, and prints a line of JSON.

    python -m experiments.vllm_scheduler.steps ROUNDS

Without kvrs there are vLLM's LRU and a tier that finds and loads the same rows at once; so the
difference is what the ledger and the tier of kvrs add.
"""

import json
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, TypeVar
from unittest import mock

import msgspec
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadPolicy,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
from vllm.v1.kv_offload.tiering.manager import (
    CPUPrimaryTierOffloadingManager,
    TieringOffloadingManager,
)

from kvrs.protocol.rows import PARAMS_FIELD, RegionInfo, seal
from kvrs.vllm import adapters, ledger, node
from kvrs.vllm.agents import KnownAgents
from kvrs.vllm.tier import KvrsTier
from kvrs_testkit.row_agent import RowAgent
from kvrs_testkit.row_engine import RowEngine

ROW_BYTES = 4096  # Its bytes are moved by other threads, and are not counted.
PROMPT_CHUNKS = 1000  # 128,000 tokens, in chunks of 8 blocks of 16.
LOAD_STEPS = 5
STREAMS, CHUNK_STEPS = 200, 128  # Streams that decode, and steps in which each fills a chunk.
NAMESPACE, PARAMS_KEY = bytes(32), b"k" * 32

R = TypeVar("R")


class InstantTier(SecondaryTierManager):  # type: ignore[misc]  # vLLM is not checked.
    """Finds each row at the second look, and has loaded it some steps later."""

    medium = Medium.CPU

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._seen: set[bytes] = set()
        self._done: list[tuple[int, JobResult]] = []
        self._steps = 0

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext(OffloadPolicy.REQUEST_LEVEL)

    def lookup(self, key: bytes, req_context: ReqContext) -> LookupResult:
        if key in self._seen:
            return LookupResult.HIT
        self._seen.add(key)
        return LookupResult.RETRY

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._done.append((self._steps, JobResult(job_metadata.job_id, success=True)))

    def submit_load(self, job_metadata: TransferJob) -> None:
        result = JobResult(job_metadata.job_id, success=True)
        self._done.append((self._steps + LOAD_STEPS, result))

    def get_finished_jobs(self) -> list[JobResult]:
        self._steps += 1
        done = [result for step, result in self._done if step < self._steps]
        self._done = [each for each in self._done if each[0] >= self._steps]
        return done

    def has_pending_work(self) -> bool:
        return bool(self._done)

    def drain_jobs(self) -> None:
        """Nothing is under way."""


def key_of(number: int) -> bytes:
    return bytes(make_offload_key(number.to_bytes(32, "big"), 0))


class Stack:
    """vLLM's managers, with kvrs's policy and tier or without."""

    def __init__(self, rows: int, agent: "Agent | None") -> None:
        region = SharedOffloadRegion(uuid.uuid4().hex, rows, None, ROW_BYTES, ROW_BYTES)
        policy = ("lru", None) if agent is None else ("KvrsPolicy", "kvrs.vllm.ledger")
        primary = CPUPrimaryTierOffloadingManager(rows, region, *policy)
        view = primary.get_kv_memoryview()
        if agent is None:
            tier: Any = InstantTier(None, view, "instant")
        else:
            with mock.patch.object(node, "of_tier", return_value=agent.parts()):
                tier = KvrsTier(None, view, "kvrs")
            assert tier.switch.off_reason is None, tier.switch.off_reason
        self.manager = TieringOffloadingManager(primary, [tier])
        self._requests = 0

    def request(self) -> ReqContext:
        self._requests += 1
        params = {PARAMS_FIELD: msgspec.to_builtins(seal((), PARAMS_KEY, time.time()))}
        context = ReqContext(f"request {self._requests}", params)
        adapters.begin(None)  # As the connector tells the tier.
        self.manager.on_new_request(context)
        adapters.end()
        return context

    def store(self, keys: list[bytes], context: ReqContext) -> None:
        plan = self.manager.prepare_store(keys, context)
        assert plan is not None
        self.manager.complete_store(plan.keys_to_store, context, True)

    def end_step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext((), ()))
        self.manager.has_pending_work()

    def close(self) -> None:
        self.manager.shutdown()


class Agent:
    """The agent of the node, in this process, with the rows of a dead engine."""

    def __init__(self, directory: Path, keys: list[bytes]) -> None:
        self._agent = RowAgent(directory / "rows")
        self._directory = directory
        engine = RowEngine(
            str(directory / "rows"), bytes(range(32)), NAMESPACE, len(keys), ROW_BYTES
        )
        for row, key in enumerate(keys):
            engine.ledger.writing(row)
            engine.ledger.holds(row, key)
        engine.link.start()
        self._engine = engine
        self.info = RegionInfo("engine", NAMESPACE, len(keys), ROW_BYTES, {"model": "none"})

    def parts(self) -> node.NodeParts:
        """Return the parts for the engine whose policy was made last."""
        policy = ledger.latest()
        assert policy is not None
        assert policy.ledger is not None
        policy.ledger.describe(ROW_BYTES)
        client = self._agent.client(self.info.space)
        return node.NodeParts(
            mock.Mock(), policy, KnownAgents(client, {}, [PARAMS_KEY]), False, None, 5.0, 20.0
        )

    def close(self) -> None:
        self._engine.link.close()
        self._agent.close()


def cpu_ms(work: Callable[[], R]) -> tuple[float, R]:
    """CPU time of this thread, and what the work returns."""
    begun_s = time.thread_time()
    found = work()
    return (time.thread_time() - begun_s) * 1e3, found


def prompt(stack: Stack, keys: list[bytes]) -> dict[str, float]:
    """A prompt of which all chunks are at an agent: each step vLLM looks all of them up."""
    used = {"once": 0.0, "step while it waits": 0.0}
    waits: list[float] = []
    context: ReqContext | None = None

    def look() -> list[LookupResult]:
        return [stack.manager.lookup(key, context) for key in keys]

    def begin() -> None:
        nonlocal context
        context = stack.request()
        look()
        stack.end_step()

    def step() -> list[LookupResult]:
        found = look()
        stack.end_step()
        return found

    used["once"] += cpu_ms(begin)[0]
    while True:
        took_ms, found = cpu_ms(step)
        if found[0] is LookupResult.HIT:
            used["once"] += took_ms
            break
        waits.append(took_ms)
        time.sleep(0.02)
    assert set(found) == {LookupResult.HIT}, set(found)
    assert context is not None
    used["once"] += cpu_ms(lambda: stack.manager.prepare_load(keys, context))[0]
    used["once"] += cpu_ms(lambda: stack.manager.complete_load(keys, context))[0]
    used["once"] += cpu_ms(lambda: stack.manager.on_request_finished(context))[0]
    # One of them has the promotion of all rows: it is part of what the prompt costs once.
    waits.sort()
    used["once"] += waits.pop()
    used["step while it waits"] = median(waits)
    return used


def decode(stack: Stack) -> dict[str, float]:
    """A step of streams of which some fill a chunk: mean over the steps that it takes for all."""
    contexts = [stack.request() for _ in range(STREAMS)]
    number = iter(range(1 << 20, 1 << 40))
    steps: list[float] = []
    for step in range(CHUNK_STEPS):

        def run(step: int = step) -> None:
            for context in contexts[step % CHUNK_STEPS :: CHUNK_STEPS]:
                stack.store([key_of(next(number))], context)
            stack.end_step()

        steps.append(cpu_ms(run)[0])
    ends_ms, _ = cpu_ms(lambda: [stack.manager.on_request_finished(each) for each in contexts])
    stack.end_step()
    return {"step of decode": (sum(steps) + ends_ms) / len(steps)}


@contextmanager
def stacks(keys: list[bytes]) -> Iterator[dict[str, Stack]]:
    with tempfile.TemporaryDirectory() as directory:
        agent = Agent(Path(directory), keys)
        rows = len(keys) + 2 * STREAMS
        made = {"vllm": Stack(rows, None), "kvrs": Stack(rows, agent)}
        try:
            yield made
        finally:
            for each in made.values():
                each.close()
            agent.close()


def main() -> None:
    rounds = int(sys.argv[1])
    found: dict[str, dict[str, list[float]]] = {"vllm": {}, "kvrs": {}}
    for round_number in range(rounds):
        # Other keys in each round: no row of it is there.
        keys = [key_of((round_number + 1 << 12) + number) for number in range(PROMPT_CHUNKS)]
        with stacks(keys) as made:
            for name in list(made)[:: 1 if round_number % 2 else -1]:
                for what, ms in (prompt(made[name], keys) | decode(made[name])).items():
                    found[name].setdefault(what, []).append(ms)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
