"""The secondary tier of vLLM's OffloadingConnector that loads rows from agents.

vLLM loads it by an entry of `secondary_tiers`: `{"type": "KvrsTier", "module_path":
"kvrs.vllm.tier", "config": FILE, "instance": ID}`. Nothing is stored by way of it: agents read the
rows of an engine out of its own memory (`kvrs/vllm/ledger.py`).

All its methods run in the scheduler's thread between two steps and wait for nothing. A thread for
each agent looks keys up, and a few load; each ends its work by a deadline and always answers. The
first error that is not expected turns the tier off: it then finds nothing, and vLLM computes.
"""

import logging
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from vllm.v1.kv_offload.base import LookupResult, Medium, OffloadPolicy, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvrs.transfer.rows.client import RowClient
from kvrs.transfer.rows.link import RegionLink
from kvrs.vllm import adapters, ledger, node
from kvrs.vllm.adapters import BASE, LoraAdapter
from kvrs.vllm.guard import Switch, guarded
from kvrs.vllm.proof import RowProofs

log = logging.getLogger(__name__)

_LOADERS = 2


@dataclass(slots=True)
class _Asked:
    """A lookup of some keys that agents have not answered yet."""

    since_s: float
    waiting: int


@dataclass(frozen=True, slots=True)
class _Load:
    job: int
    keys: list[bytes]
    shared: Sequence[bytes]  # The keys at agents.
    rows: list[int]
    agents: "list[RowClient | None]"
    begun_s: float


class KvrsTier(SecondaryTierManager):  # type: ignore[misc]  # vLLM is not checked.
    """Looks up, and loads, what agents hold of the requests that ask for it."""

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
        # Python has no sub-views of a view with two dimensions.
        self._memory = primary_kv_view.cast("B")
        self._row_bytes: int = self.block_size_bytes
        self._agents: list[RowClient] = []
        self._link: RegionLink | None = None
        self._lookup_s = self._load_s = 0.0
        self._serves_all = False
        self._proofs = RowProofs(None)
        # Of the scheduler's thread: what is known of each request's keys.
        self._known: defaultdict[str, dict[bytes, _Asked | RowClient | None]] = defaultdict(dict)
        self._new: defaultdict[str, list[bytes]] = defaultdict(list)
        self._adapter: dict[str, LoraAdapter] = {}  # Of each request that asks.
        self._taken: defaultdict[str, dict[bytes, RowClient]] = defaultdict(dict)
        self._protected: set[str] = set()
        # Between threads.
        self._answers: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[JobResult] = queue.SimpleQueue()
        self._loads: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lookups: list[queue.SimpleQueue[Any]] = []
        self._running, self._idle = 0, threading.Condition()
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
        for agent in self._agents:
            self._lookups.append(queue.SimpleQueue())
            self._begin_thread(self._look_up, self._lookups[-1], agent)
        for _ in range(_LOADERS):
            self._begin_thread(_call, self._loads)

    def _begin_thread(self, work: Callable[..., None], items: Any, *more: Any) -> None:
        thread = threading.Thread(
            target=_work, args=(work, items, *more), name="kvrs-tier", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    # Requests.

    @guarded(RequestOffloadingContext)
    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        given = req_context.kv_transfer_params
        params = given if isinstance(given, dict) else {}
        if (adapter := adapters.current()) is None:
            return RequestOffloadingContext()  # It is no request of KvrsOffloading.
        req_context.set_state(adapter)
        if self._serves_all or isinstance(params.get("kvrs"), dict):
            self._protected.add(req_context.req_id)
            # What another connector brings is not looked for here: vLLM asks all of them.
            if not params.get("do_remote_prefill"):
                self._adapter[req_context.req_id] = adapter
            # A protected stream has no hole where the prefix cache of the engine had its blocks.
            return RequestOffloadingContext(OffloadPolicy.REQUEST_LEVEL)
        return RequestOffloadingContext()

    @guarded(lambda: None)
    def on_request_finished(self, req_context: Any) -> None:
        request = req_context.req_id
        if request not in self._protected:
            return
        self._protected.discard(request)
        self._adapter.pop(request, None)
        for by_request in (self._known, self._new, self._taken):
            by_request.pop(request, None)
        if self._policy is not None:
            self._policy.release(request)

    def _let_go(self) -> None:
        """The tier is off: no row is kept longer than others."""
        if self._policy is not None:
            for request in self._protected:
                self._policy.release(request)
        self._protected.clear()
        self._adapter.clear()

    # Lookups: the first look at keys gathers them, the end of the step asks, a later step knows.

    @guarded(lambda: LookupResult.MISS)
    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        request = req_context.req_id
        if request not in self._adapter:
            return LookupResult.MISS
        known = self._known[request]
        if key not in known:
            if not any(agent.is_usable for agent in self._agents):
                return LookupResult.MISS
            self._new[request].append(key)
            known[key] = _Asked(time.monotonic(), len(self._agents))
            return LookupResult.RETRY
        self._take_answers()
        match known[key]:
            case RowClient() as agent:
                # Once: one that vLLM asks for again could not be loaded, or was evicted by the next
                # rows of a prompt that its tier has no room for.
                known[key], self._taken[request][key] = None, agent
                return LookupResult.HIT
            case _Asked() as asked if (
                asked.waiting and time.monotonic() < asked.since_s + self._lookup_s
            ):
                return LookupResult.RETRY
        known[key] = None
        return LookupResult.MISS

    @guarded(lambda: None)
    def on_schedule_end(self, context: Any) -> None:
        for request, keys in self._new.items():
            asked = _Asked(time.monotonic(), len(self._agents))
            self._known[request].update(dict.fromkeys(keys, asked))
            for lookups in self._lookups:
                lookups.put((request, self._adapter[request], keys, asked))
        self._new.clear()
        self._take_answers()

    @guarded(lambda: None)
    def _take_answers(self) -> None:
        with suppress(queue.Empty):
            while True:
                self._answers.get_nowait()()

    def _look_up(
        self, item: tuple[str, LoraAdapter, list[bytes], _Asked], agent: RowClient
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
        asked.waiting -= 1
        if (known := self._known.get(request)) is None:
            return
        if (at := self._proofs.leave_out(found)) is not None:
            found = found[:at]
            for shared in self._adapter[request].scoped([keys[at]]):
                fetched = (keys[at], shared, self._row_bytes, agent, self._load_s)
                self._loads.put(partial(self._proofs.fetch, *fetched))
        for key, is_held in zip(keys, found, strict=False):
            if is_held and known.get(key) is asked:
                known[key] = agent

    # Loads.

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Nothing is to be stored: agents read the row where it is. It stays longer than others."""
        self._begin()
        self._hold(job_metadata)
        if not self._queue_proof(job_metadata):
            self._end(JobResult(job_metadata.job_id, success=True, transfer_bytes=0))

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
        self._loads.put(partial(self._prove, job.job_id, int(job.chunk_ids[at]), theirs))
        return True

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._begin()
        if not self._queue_load(job_metadata):
            self._end(JobResult(job_metadata.job_id, success=False))

    @guarded(lambda: False)
    def _queue_load(self, job: TransferJob) -> bool:
        taken, keys = self._taken.get(job.req_context.req_id, {}), list(job.keys)
        adapter = self._adapter.get(job.req_context.req_id, BASE)
        if len(shared := adapter.scoped(keys)) != len(keys):
            return False
        agents = [taken.pop(key, None) for key in keys]
        now_s = time.monotonic()
        load = _Load(job.job_id, keys, shared, job.chunk_ids.tolist(), agents, now_s)
        self._loads.put(partial(self._load, load))
        return True

    def _prove(self, job: int, row: int, theirs: bytearray) -> None:
        try:
            if self._proofs.differ(self._row(row), theirs):
                reason = "a row of an agent is not what this engine computes"
                self._answers.put(lambda: self.switch.turn_off(reason))
        finally:
            self._end(JobResult(job, success=True, transfer_bytes=0))

    def _load(self, load: _Load) -> None:
        loaded: list[bytes] = []
        try:
            by_agent: defaultdict[RowClient, list[int]] = defaultdict(list)
            for at, agent in enumerate(load.agents):
                if agent is not None:
                    by_agent[agent].append(at)
            for agent, places in by_agent.items():
                wanted = [(load.shared[at], self._row(load.rows[at])) for at in places]
                count = agent.load(wanted, load.begun_s + self._load_s - time.monotonic())
                loaded += [load.keys[at] for at in places[:count]]
        finally:
            whole = len(loaded) == len(load.keys)
            self._end(
                JobResult(
                    load.job,
                    success=whole,
                    successful_keys=None if whole or not loaded else tuple(loaded),
                    transfer_time=time.monotonic() - load.begun_s,
                    transfer_bytes=len(loaded) * self._row_bytes,
                )
            )

    def _row(self, row: int) -> memoryview:
        return self._memory[row * self._row_bytes : (row + 1) * self._row_bytes]

    def _begin(self) -> None:
        with self._idle:
            self._running += 1

    def _end(self, result: JobResult) -> None:
        self._done.put(result)
        with self._idle:
            self._running -= 1
            self._idle.notify_all()

    def get_finished_jobs(self) -> Iterable[JobResult]:
        self._take_answers()
        finished = []
        with suppress(queue.Empty):
            while True:
                finished.append(self._done.get_nowait())
        return finished

    def has_pending_work(self) -> bool:
        return self._running > 0 or not self._done.empty()

    def drain_jobs(self) -> None:
        """Wait until no thread writes into vLLM's memory: at most as long as a load may take. vLLM
        calls this at a reset of its cache.
        """
        with self._idle:
            self._idle.wait_for(lambda: self._running == 0)
        self.switch.turn_off("vLLM's cache was reset: its weights may be others since")

    def shutdown(self) -> None:
        for items in [*self._lookups, *[self._loads] * _LOADERS]:
            items.put(None)
        for thread in self._threads:
            thread.join(self._load_s + 1.0)
        if self._link is not None:
            self._link.close()
        for agent in self._agents:
            agent.close()
        self._memory.release()  # Else vLLM cannot close its map.


def _call(work: Callable[[], None]) -> None:
    work()


def _work(work: Callable[..., None], items: Any, *more: Any) -> None:
    while (item := items.get()) is not None:
        try:
            work(item, *more)
        except Exception:
            log.exception("kvrs in vLLM: %s", work.__name__)
