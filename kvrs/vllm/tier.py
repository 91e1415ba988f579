"""Secondary tier of vLLM's OffloadingConnector that loads rows from agents.

vLLM loads it by an entry of `secondary_tiers`: `{"type": "KvrsTier", "module_path":
"kvrs.vllm.tier", "config": FILE, "instance": ID}`. The tier stores nothing: agents read an engine's
rows from its memory (`kvrs/vllm/ledger.py`).

The tier's methods run in the scheduler's thread between two steps and never block. Each agent has
threads of its own, one for lookups and others for loads, so a hanging agent delays no other; each
thread meets a deadline and always answers. The first unexpected error turns the tier off: it then
finds nothing, and vLLM computes.

A request's `kv_transfer_params.kvrs` is an object of a proxy (`protocol/rows.py`); its `agents` are
ids of agents of other nodes. They are asked together with the own node's agent, whose rows are
preferred: asking them only for the rows that the own agent lacks would let a hanging own agent hide
their rows.
"""

import logging
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from vllm.v1.kv_offload.base import LookupResult, Medium, OffloadPolicy, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvrs.engines.guard import Switch, guarded
from kvrs.engines.proof import RowProofs
from kvrs.protocol.rows import PARAMS_FIELD
from kvrs.transfer.rows.client import RegionLink, RowClient
from kvrs.vllm import adapters, ledger, node
from kvrs.vllm.adapters import BASE, LoraAdapter
from kvrs.vllm.agents import KnownAgents

log = logging.getLogger(__name__)

_OWN_LOADERS = 2  # Threads that load rows from the own node's agent; each other agent has one.


@dataclass(slots=True)
class _Asked:
    """A lookup of several keys that some agents have not answered yet."""

    since_s: float
    waiting: int
    own_waits: bool = True
    # First agent of another node that has the row, by the row's key.
    others: dict[bytes, RowClient] = field(default_factory=dict)


@dataclass(slots=True)
class _Load:
    """A load that vLLM has ordered (a job), whose rows come from several agents in parts."""

    job: int
    keys: int
    parts: int
    begun_s: float
    loaded: list[bytes] = field(default_factory=list)

    def result(self, row_bytes: int) -> JobResult:
        whole = len(self.loaded) == self.keys
        return JobResult(
            self.job,
            success=whole,
            successful_keys=None if whole or not self.loaded else tuple(self.loaded),
            transfer_time=time.monotonic() - self.begun_s,
            transfer_bytes=len(self.loaded) * row_bytes,
        )


class _Jobs:
    """vLLM's jobs: those that threads work on, and those that have ended but are not reported to
    vLLM yet.
    """

    def __init__(self) -> None:
        self._done: queue.SimpleQueue[JobResult] = queue.SimpleQueue()
        self._running = 0
        self.changed = threading.Condition()

    def begin(self) -> None:
        with self.changed:
            self._running += 1

    def end(self, result: JobResult) -> None:
        self._done.put(result)
        with self.changed:
            self._running -= 1
            self.changed.notify_all()

    def take_ended(self) -> list[JobResult]:
        ended = []
        with suppress(queue.Empty):
            while True:
                ended.append(self._done.get_nowait())
        return ended

    def are_open(self) -> bool:
        return self._running > 0 or not self._done.empty()

    def wait(self) -> None:
        """Wait until no thread works on a job."""
        with self.changed:
            self.changed.wait_for(lambda: self._running == 0)


class _Wanted(NamedTuple):
    """A row to load: its key in vLLM, its key at agents, and the memory to load it into."""

    key: bytes
    at_agent: bytes
    view: memoryview


class _Threads(NamedTuple):
    """The queues that the threads of one agent serve, and the number of threads that load."""

    lookups: "queue.SimpleQueue[Any]"
    loads: "queue.SimpleQueue[Any]"
    loaders: int


class KvrsTier(SecondaryTierManager):  # type: ignore[misc]  # vLLM is not checked.
    """Looks up and loads agents' rows for requests that ask for them."""

    medium = Medium.CPU

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.switch = Switch(self._let_go)
        self._policy: ledger.KvrsPolicy | None = None
        # One-dimensional, because Python has no sub-views of a two-dimensional view.
        self._memory = primary_kv_view.cast("B")
        self._row_bytes: int = self.block_size_bytes
        self._agents: KnownAgents | None = None
        self._link: RegionLink | None = None
        self._lookup_s = self._load_s = 0.0
        self._serves_all = False
        self._proofs = RowProofs(None)
        # By request and key: the lookup in progress, the agent that holds the row, or None: the row
        # is not held. Only the scheduler's thread uses this and the next fields.
        self._known: defaultdict[str, dict[bytes, _Asked | RowClient | None]] = defaultdict(dict)
        self._new: defaultdict[str, list[bytes]] = defaultdict(list)
        self._adapter: dict[str, LoraAdapter] = {}  # Adapter of each request that asks for rows.
        self._taken: defaultdict[str, dict[bytes, RowClient]] = defaultdict(dict)
        self._protected: set[str] = set()
        self._asking: dict[str, list[RowClient]] = {}
        # Fields that several threads use; threads put the answers of agents here.
        self._answers: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._jobs = _Jobs()
        self._threads_of: dict[RowClient, _Threads] = {}
        self._threads: list[threading.Thread] = []
        try:
            self._start(
                node.of_tier(offloading_spec, options, len(primary_kv_view), self._row_bytes)
            )
        except Exception as error:
            self.switch.turn_off(f"{type(error).__name__}: {error}")

    def _start(self, found: node.NodeParts) -> None:
        self._lookup_s, self._load_s = found.lookup_s, found.load_s
        self._serves_all, self._proofs = found.serves_all, RowProofs(found.number_type)
        self._link, self._policy, self._agents = found.link, found.policy, found.agents
        self._link.start()
        self._begin_threads(found.agents.own, _OWN_LOADERS)

    def _begin_threads(self, agent: RowClient, loaders: int = 1) -> None:
        found = _Threads(queue.SimpleQueue(), queue.SimpleQueue(), loaders)
        self._threads_of[agent] = found
        look_up: Callable[..., None] = partial(self._look_up, agent)
        for work, items in ((look_up, found.lookups), *[(_call, found.loads)] * loaders):
            thread = threading.Thread(
                target=_work, args=(work, items), name="kvrs-tier", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    # Hooks that vLLM calls at the begin and the end of a request.

    @guarded(RequestOffloadingContext)
    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        given = req_context.kv_transfer_params
        params = given if isinstance(given, dict) else {}
        if (adapter := adapters.current()) is None:
            # Not looked up: another connector than KvrsOffloading has the request.
            return RequestOffloadingContext()
        req_context.set_state(adapter)
        assert self._agents is not None
        named = self._agents.named(params.get(PARAMS_FIELD))
        if self._serves_all or named is not None:
            self._protected.add(req_context.req_id)
            # Not if another connector brings the KV, since vLLM asks all connectors for it.
            if not params.get("do_remote_prefill"):
                self._asking[req_context.req_id] = self._ready(named or [self._agents.own])
                self._adapter[req_context.req_id] = adapter
            # Store all rows of the request, also those whose blocks the engine's prefix cache had,
            # so that the rows of a protected stream have no gaps.
            return RequestOffloadingContext(OffloadPolicy.REQUEST_LEVEL)
        return RequestOffloadingContext()

    def _ready(self, agents: list[RowClient]) -> list[RowClient]:
        for agent in agents:
            if agent not in self._threads_of:
                self._begin_threads(agent)
        return agents

    @guarded(lambda: None)
    def on_request_finished(self, req_context: Any) -> None:
        request = req_context.req_id
        if request not in self._protected:
            return
        self._protected.discard(request)
        for by_request in (self._asking, self._adapter, self._known, self._new, self._taken):
            by_request.pop(request, None)
        if self._policy is not None:
            self._policy.release(request)

    def _let_go(self) -> None:
        """Release all rows when the tier turns off: they are no longer protected or served, which
        proxies notice.
        """
        if self._policy is not None:
            for request in self._protected:
                self._policy.release(request)
            self._policy.give_up()
        self._protected.clear()
        self._asking.clear()
        self._adapter.clear()

    # Lookups of rows: vLLM's first call gathers keys, the end of the step sends them to agents, and
    # a call in a later step has their answers.

    @guarded(lambda: LookupResult.MISS)
    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        request = req_context.req_id
        if (agents := self._asking.get(request)) is None:
            return LookupResult.MISS
        known = self._known[request]
        if key not in known:
            if not any(agent.is_usable for agent in agents):
                return LookupResult.MISS
            self._new[request].append(key)
            known[key] = _Asked(time.monotonic(), len(agents))
            return LookupResult.RETRY
        self._take_answers()
        found = known[key]
        if isinstance(found, _Asked):
            other = found.others.get(key)
            is_open = found.waiting and (found.own_waits or other is None)
            if is_open and time.monotonic() < found.since_s + self._lookup_s:
                return LookupResult.RETRY
            found = other
        # Found only once: vLLM asks again if the row could not be loaded, or if later rows of the
        # prompt evicted it because the tier is too small.
        known[key] = None
        if found is None:
            return LookupResult.MISS
        self._taken[request][key] = found
        return LookupResult.HIT

    @guarded(lambda: None)
    def on_schedule_end(self, context: Any) -> None:
        for request, keys in self._new.items():
            usable = [agent for agent in self._asking.get(request, ()) if agent.is_usable]
            own_waits = self._agents is not None and self._agents.own in usable
            asked = _Asked(time.monotonic(), len(usable), own_waits)
            self._known[request].update(dict.fromkeys(keys, asked))
            for agent in usable:
                item = (request, self._adapter[request], keys, asked)
                self._threads_of[agent].lookups.put(item)
        self._new.clear()
        self._take_answers()

    @guarded(lambda: None)
    def _take_answers(self) -> None:
        with suppress(queue.Empty):
            while True:
                self._answers.get_nowait()()

    def _look_up(
        self, agent: RowClient, item: tuple[str, LoraAdapter, list[bytes], _Asked]
    ) -> None:
        request, adapter, keys, asked = item
        found: Sequence[bool] = ()
        try:
            adapter.learn()
            if shared := adapter.scoped(keys):
                found = agent.find(shared, asked.since_s + self._lookup_s - time.monotonic())
        finally:
            self._answers.put(lambda: self._found(request, keys, asked, agent, found))

    def _found(
        self,
        request: str,
        keys: list[bytes],
        asked: _Asked,
        agent: RowClient,
        found: Sequence[bool],
    ) -> None:
        assert self._agents is not None
        is_own = agent is self._agents.own
        asked.waiting -= 1
        asked.own_waits &= not is_own
        if (known := self._known.get(request)) is None:
            return
        at = self._proofs.leave_out(found)
        if at is not None and known.get(keys[at]) is asked:
            # Later rows count as missing too, because the engine computes from the first missing
            # row on.
            known.update(dict.fromkeys(keys[at:]))
            for shared in self._adapter[request].scoped([keys[at]]):
                fetched = (keys[at], shared, self._row_bytes, agent, self._load_s)
                self._threads_of[agent].loads.put(partial(self._proofs.fetch, *fetched))
        for key, is_held in zip(keys, found, strict=False):
            if is_held and known.get(key) is asked:
                if is_own:
                    known[key] = agent
                else:
                    asked.others.setdefault(key, agent)

    # Hooks for storing and loading rows.

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Protect the rows that vLLM has just stored in its memory; agents read them there, so
        nothing is sent.
        """
        self._jobs.begin()
        self._hold(job_metadata)
        if not self._queue_proof(job_metadata):
            self._jobs.end(JobResult(job_metadata.job_id, success=True, transfer_bytes=0))

    @guarded(lambda: None)
    def _hold(self, job: TransferJob) -> None:
        if self._policy is not None and job.req_context.req_id in self._protected:
            self._policy.hold(job.req_context.req_id, job.keys)

    @guarded(lambda: False)
    def _queue_proof(self, job: TransferJob) -> bool:
        keys = list(job.keys)
        if (due := self._proofs.due(keys)) is None:
            return False
        at, theirs = due
        assert self._agents is not None
        prove = partial(self._prove, job.job_id, int(job.chunk_ids[at]), theirs)
        self._threads_of[self._agents.own].loads.put(prove)
        return True

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._jobs.begin()
        if not self._queue_load(job_metadata):
            self._jobs.end(JobResult(job_metadata.job_id, success=False))

    @guarded(lambda: False)
    def _queue_load(self, job: TransferJob) -> bool:
        request, keys = job.req_context.req_id, list(job.keys)
        taken = self._taken.get(request, {})
        shared = self._adapter.get(request, BASE).scoped(keys)
        if len(shared) != len(keys):
            return False
        parts: defaultdict[RowClient, list[_Wanted]] = defaultdict(list)
        for key, at_agent, row in zip(keys, shared, job.chunk_ids.tolist(), strict=True):
            if (agent := taken.pop(key, None)) is not None:
                parts[agent].append(_Wanted(key, at_agent, self._row(row)))
        load = _Load(job.job_id, len(keys), len(parts), time.monotonic())
        for agent, wanted in parts.items():
            self._threads_of[agent].loads.put(partial(self._load, load, wanted, agent))
        return bool(parts)

    def _prove(self, job: int, row: int, theirs: bytearray) -> None:
        try:
            if self._proofs.differ(self._row(row), theirs):
                reason = "a row of an agent is not what this engine computes"
                self._answers.put(lambda: self.switch.turn_off(reason))
        finally:
            self._jobs.end(JobResult(job, success=True, transfer_bytes=0))

    def _load(self, load: _Load, wanted: list[_Wanted], agent: RowClient) -> None:
        loaded: list[bytes] = []
        rows = [(each.at_agent, each.view) for each in wanted]
        try:
            count = agent.load(rows, load.begun_s + self._load_s - time.monotonic())
            loaded = [each.key for each in wanted[:count]]
        finally:
            wanted.clear()
            # Drop all references to vLLM's memory, which vLLM may free once the job is reported.
            rows.clear()
            with self._jobs.changed:
                load.loaded += loaded
                load.parts -= 1
                is_over = not load.parts
            if is_over:
                self._jobs.end(load.result(self._row_bytes))

    def _row(self, row: int) -> memoryview:
        return self._memory[row * self._row_bytes : (row + 1) * self._row_bytes]

    def get_finished_jobs(self) -> Iterable[JobResult]:
        self._take_answers()
        return self._jobs.take_ended()

    def has_pending_work(self) -> bool:
        return self._jobs.are_open()

    def drain_jobs(self) -> None:
        """Wait until no thread writes into vLLM's memory, at most for the time limit of a load.
        vLLM calls this when it resets its cache.
        """
        self._jobs.wait()
        self.switch.turn_off("vLLM's cache was reset: its weights may be others since")

    def shutdown(self) -> None:
        for lookups, loads, loaders in self._threads_of.values():
            for items in (lookups, *[loads] * loaders):
                items.put(None)
        for thread in self._threads:
            thread.join(self._load_s + 1.0)
        if self._link is not None:
            self._link.close()
        for agent in self._threads_of:
            agent.close()
        # vLLM cannot close the mapping of its memory while a view of it exists.
        self._memory.release()


def _call(work: Callable[[], None]) -> None:
    work()


def _work(work: Callable[[Any], None], items: Any) -> None:
    while (item := items.get()) is not None:
        try:
            work(item)
        except Exception:
            log.exception("kvrs in vLLM")
