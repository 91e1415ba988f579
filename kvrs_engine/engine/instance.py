"""One instance of the embedded engine: worker, scheduler, core and page port."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import msgspec

from kvrs.config.file import Config
from kvrs.config.sections import DraftSourceName
from kvrs.errors import ConfigError, RequestError, TransferError
from kvrs.ids import InstanceId
from kvrs.net.routes import Request, Response
from kvrs.profiles.tables import PrefillTable
from kvrs.protocol import frames
from kvrs.protocol.instance import (
    Capability,
    InstanceInfo,
    LoadReport,
    RankRequest,
    ReloadNotice,
    SpeculationReport,
)
from kvrs.protocol.pages import TrafficClass
from kvrs.text.output import TokenPieces, load_tokenizer
from kvrs.transfer.limiter import SendingFaults
from kvrs.transfer.links import SendingLinks
from kvrs_engine.engine.anchored import AnchoredMemory, AnchoredPool
from kvrs_engine.engine.chat import load_chat_template
from kvrs_engine.engine.core import EngineCore
from kvrs_engine.engine.hooks import PaceHook
from kvrs_engine.engine.model_config import ModelConfig
from kvrs_engine.engine.models.reading import WeightReading, reading_of
from kvrs_engine.engine.page_port import InstancePlace
from kvrs_engine.engine.rank_reports import RankReports, loans_of
from kvrs_engine.engine.ranks.group import RankGroup, describe_ranks
from kvrs_engine.engine.ranks.nodes import RanksOnNodes
from kvrs_engine.engine.ranks.settings import layout_of
from kvrs_engine.engine.requests import Vocabulary
from kvrs_engine.engine.ring import StageRing
from kvrs_engine.engine.served import ServedInstance, ServedModel
from kvrs_engine.engine.speculation.paired import PairedDrafts, ReloadNotices
from kvrs_engine.engine.stage_loans import StageLoans
from kvrs_engine.engine.warm_up import measure_prefill, prefill_table
from kvrs_engine.engine.websockets import serve_websocket
from kvrs_engine.engine.worker import ModelWorker, Worker
from kvrs_engine.scheduling.pace import Pace
from kvrs_engine.scheduling.pages import MOVED_KEPT_S, PageManager
from kvrs_engine.scheduling.scheduler import BatchScheduler
from kvrs_engine.scheduling.sequences import Chunk, Queue
from kvrs_engine.scheduling.shares import Share, Waiting, in_line, prefill_cost, shared_out

CAPABILITIES = [
    Capability.PULL_PAGES,
    Capability.RETAIN,
    Capability.FENCE,
    Capability.SPLIT,
    Capability.CHECKPOINT,
    Capability.PREFIX_CACHE,
    Capability.EXACT_RESUME,
    Capability.FAIR_QUEUE,
]


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A loaded model, which any start of an instance can serve."""

    worker: ModelWorker
    served: ServedModel

    @classmethod
    def load(
        cls,
        config: Config,
        instance_id: InstanceId,
        secret: bytes,
        reading: WeightReading | None = None,
        on_read: Callable[[], None] = lambda: None,
        epoch: int = 0,
    ) -> Self:
        """Load the model in the calling thread.

        `reading` tracks the progress of its weights. `on_read` is called before the copy to a GPU.
        `epoch` is that of an instance with stages in hosts.

        Raises:
            ConfigError: instance, model or engine settings are wrong.
        """
        node, settings = config.cluster.find(instance_id)
        if config.cluster.model is None:
            raise ConfigError("cluster.model: missing; allowed: a Hugging Face directory")
        engine = config.cluster.engine
        directory = Path(config.cluster.model)
        pace = config.cluster.engine.pace
        reading = reading or reading_of(directory, engine.disk_bytes_per_s, pace)
        units = ModelConfig.from_directory(directory).units
        layout = layout_of(settings, units, config.elastic)
        anchored = None
        if config.state_plane.enabled and layout is None:
            anchored = AnchoredMemory(config, node.id, instance_id, secret)
        started_s = time.monotonic()
        worker: ModelWorker
        if layout is None:
            worker = Worker(directory, engine, anchored, reading)
        elif settings.stage_hosts:
            reading.begin()
            worker = RanksOnNodes(config, node.id, settings, layout, secret, epoch)
        else:
            reading.begin()
            worker = RankGroup(directory, engine, layout, config.elastic)
        reads = layout is None or bool(settings.own_stages)  # Hosts apply the pace themselves.
        left_s = Pace(pace).load_s if reads and pace is not None else 0.0
        if engine.disk_bytes_per_s is None:
            left_s = max(0.0, left_s - (time.monotonic() - started_s))
        reading.end(left_s)
        if engine.disk_bytes_per_s is not None:
            on_read()
        try:
            time.sleep(left_s)
            return cls(worker, describe_model(config, directory, worker))
        except BaseException:
            if isinstance(worker, RankGroup | RanksOnNodes):
                worker.close()
            raise


_ANSWERED_S = 0.02


class EngineInstance(ServedInstance):
    """An instance of the embedded engine."""

    def __init__(
        self,
        config: Config,
        instance_id: InstanceId,
        epoch: int,
        secret: bytes,
        older: Sequence[bytes] = (),
        loaded: LoadedModel | None = None,
    ) -> None:
        """Load the model, unless `loaded`, and measure its prefill, in the calling thread.

        Raises:
            ConfigError: instance, model or engine settings are wrong.
        """
        loaded = loaded or LoadedModel.load(config, instance_id, secret, epoch=epoch)
        node, settings = config.cluster.find(instance_id)
        profile = config.cluster.engine.pace
        pace = None if profile is None else Pace(profile)
        self.worker = loaded.worker
        try:
            if isinstance(self.worker, Worker):
                self.worker.take_memory(epoch)
            self.links = SendingLinks(config.transfer, SendingFaults(), node.id)
            super().__init__(
                InstancePlace(config, node, settings, secret, epoch, self.links, older),
                loaded.served,
            )
            self.reloads = ReloadNotices(time.monotonic)
            drafted = config.speculation.source is DraftSourceName.DRAFT
            self.drafts = PairedDrafts(config.speculation, self.vocabulary) if drafted else None
            self._core = self._make_core(pace)
            self._reports = self._make_reports()
        except BaseException:
            if self.ranks is not None:
                self.ranks.close()
            raise
        self.skipped = ""  # The reason why the start made no drafts for other instances.

    def _make_core(self, pace: Pace | None) -> EngineCore:
        """Measure prefill, and create the core and the page port."""
        config, engine, kept = self._place.config, self.worker.settings, self.anchored
        share: Share = in_line
        if self.ranks is not None:
            own = measure_prefill(self.worker, self.max_model_len)
            self.ranks.predict, share = partial(predicted_s, own), PrefillShares(self.ranks, own)
            prefill = own if pace is None else pace.prefill
        elif pace is not None:
            prefill = pace.prefill
        else:
            # A measurement would write into kept pages.
            noted = None if kept is None else kept.prefill
            prefill = noted or prefill_table(
                self.worker, self.max_model_len, Path(config.cluster.model or "")
            )
        chunks = engine.max_batch_tokens, self.max_model_len
        self.prefill = prefill.chunked(*chunks)  # The declared table, for a single prompt.
        records = None if kept is None else kept.ledger
        pages = PageManager(engine.pages, engine.page_size_tokens, records)
        if kept is not None:
            kept.note_prefill(prefill)
            kept.adopt(pages, time.monotonic() + config.transfer.lease_s)
        fetcher, self.checkpointer = self.port.attach(
            pages,
            self.worker.pool,
            released=lambda: self.core.wake(),
            place=None if kept is None else kept.first_page,
        )
        # One batch per pipeline stage.
        depth = 1 if self.ranks is None else len(self.ranks.full.stages)
        core = EngineCore(
            self.worker,
            BatchScheduler(engine, pages, share, depth),
            pages,
            fetcher,
            clock=time.monotonic,
            lease_s=config.transfer.lease_s,
            prefill=prefill.shared(*chunks),
            drafts=self.drafts,
            batches=depth,
        )
        self._loans: StageLoans | None = None
        self._ring: StageRing | None = None
        if isinstance(self.ranks, RanksOnNodes) and config.elastic.enabled:
            self._loans = StageLoans(self.ranks, config.elastic, core, self.news)
            self._ring = self._make_ring(self.ranks, core)
        paced = None if pace is None else PaceHook(pace)
        hooks = self.checkpointer, self._ring, self._loans, self.ranks, kept, paced
        core.hooks[:0] = [hook for hook in hooks if hook is not None]
        return core

    def _make_ring(self, ranks: RanksOnNodes, core: EngineCore) -> StageRing | None:
        """Return the replication of the stages' parts; None: the instance keeps no replicas."""
        config, replicas = self._place.config, self.port.replicas
        if replicas is None or self.settings.group is None:
            return None
        others = [other.id for _, other in config.cluster.donors(self.settings.id)]
        book, clock = replicas.book, time.monotonic
        return StageRing(ranks, others, core, book, config.backup, config.transfer, clock)

    def _make_reports(self) -> RankReports | None:
        if self.ranks is None:
            return None
        nodes = self.settings.stage_nodes(self._place.node.id)
        given = nodes, self._place.epoch, self.prefill, self._core, self.port
        return RankReports(self.ranks, *given, self._loans, self._ring)

    @property
    def core(self) -> EngineCore:
        return self._core

    @property
    def pages(self) -> PageManager:
        return self._core.pages

    @property
    def ranks(self) -> RankGroup | RanksOnNodes | None:
        """The ranks of the instance; None: a single process."""
        return self.worker if isinstance(self.worker, RankGroup | RanksOnNodes) else None

    @property
    def anchored(self) -> AnchoredPool | None:
        """The pool in the agent's memory; None: pages end with the process."""
        return self.worker.anchored if isinstance(self.worker, Worker) else None

    def info(self) -> InstanceInfo:
        info = self._describe(self.prefill, CAPABILITIES, self.worker.gpus)
        if self.ranks is not None:
            ranks, layout = describe_ranks(
                self.ranks.layout,
                self.ranks.pids,
                self.settings.stage_nodes(info.node),
                loans_of(self.ranks),
                re_forms=self._place.config.elastic.enabled,
            )
            number = layout.number + (0 if self._loans is None else self._loans.changes)
            layout = msgspec.structs.replace(layout, number=number)
            return msgspec.structs.replace(info, ranks=ranks, layout=layout)
        if self.anchored is not None:
            return msgspec.structs.replace(info, kept=self.anchored.kept_now(self.pages))
        return info

    def reloading(self, notice: ReloadNotice) -> None:
        if notice.instance in self.registry:
            self.reloads.note(notice)

    async def draft_helper(self, request: Request) -> Response:
        if self.drafts is None:
            return await super().draft_helper(request)
        return await serve_websocket(request, self.drafts.serve)

    def load(self) -> LoadReport:
        scheduler = self.core.scheduler
        waiting = scheduler.waiting_by_queue
        return LoadReport(
            epoch=self.epoch,
            queued=scheduler.queued,
            running=scheduler.running,
            free_pages=self.pages.free_pages,
            total_pages=self.pages.pages,
            queue_delay_s=self.core.queue_delay_s(),
            links=self.port.puller.link_reports(),
            queued_reuse=waiting[Queue.REUSE],
            queued_recompute=waiting[Queue.RECOMPUTE],
            queued_new=waiting[Queue.NEW],
            checkpoint_lag_pages=self.port.lag_pages + (self._ring.lag_pages if self._ring else 0),
            damaged_pages=self.port.puller.damaged_pages,
            fetched_pages=self.core.fetched_pages,
            fetches=self.core.recent_fetches.reports(),
            kv_bytes=self._kv_bytes(),
            draining=self.core.is_draining,
            batches_in_flight=self.core.batches_in_flight,
            speculation=self._speculation(),
            progress=self.core.computed_tokens,
            step_s=self.core.step_times.step_s,
            slowness=self.core.step_times.slowness,
            **self._of_replicas(),
            **({} if self._reports is None else self._reports.facts()),
        )

    def _kv_bytes(self) -> dict[str, int]:
        moved, sent = self.port.kv_bytes(), 0 if self._ring is None else self._ring.sent_bytes
        checkpoint = TrafficClass.CHECKPOINT.label
        return moved | {checkpoint: moved[checkpoint] + sent}

    def _of_replicas(self) -> dict[str, Any]:
        if (replicas := self.port.replicas) is None:
            return {}
        kept = self.pages.replicas
        return {
            "replicas": replicas.book.changed(),
            "replica_pages": len(kept),
            "replica_dropped_pages": kept.dropped,
        }

    def _speculation(self) -> SpeculationReport | None:
        if self.drafts is None:
            return None
        report, reloads = self.drafts.report(), self.reloads.now()
        return msgspec.structs.replace(report, skipped=self.skipped, reloads=reloads)

    async def start(self) -> None:
        await self.port.start()
        loop = asyncio.get_running_loop()
        if self.ranks is not None:
            self.ranks.on_end = lambda lost: loop.call_soon_threadsafe(self.core.fail, lost)
            self.ranks.on_change = lambda: loop.call_soon_threadsafe(self._ranks_changed)
            if self._loans is not None:
                self._loans.start()
            if self._ring is not None:
                self._ring.start()
        works = [self.core.run(), self.port.probe(), self.checkpointer.run()]
        if self._ring is not None:
            works.append(self._ring.run())
        self.tasks = [loop.create_task(work) for work in works]

    def _ranks_changed(self) -> None:
        assert self.ranks is not None, "only ranks call this"
        now, wait = self.ranks.now.reforming, self.core.admission_wait
        note = wait.go_on if now is None or not now.way.pauses else wait.pause
        note(time.monotonic())
        self.core.wake()
        self.news.tell()

    def lose_device(self, rank: int | None) -> None:
        if self.ranks is None:
            if rank is not None:
                raise RequestError(
                    f"rank: got {rank}; allowed: none, the instance is one process", param="rank"
                )
            if self.anchored is not None:
                self.anchored.ledger.drop()
            # Answer this request first.
            kill = partial(os.kill, os.getpid(), signal.SIGKILL)
            asyncio.get_running_loop().call_later(_ANSWERED_S, kill)
            return
        if rank not in self.ranks.pids:
            allowed = ", ".join(map(str, self.ranks.pids))
            raise RequestError(f"rank: got {rank}; allowed: {allowed}", param="rank")
        try:
            cells = self.ranks.lose_device(rank, self.pages.bases)
        except TransferError as error:
            raise RequestError(f"rank: got {rank}; {error}", param="rank", status=409) from None
        if cells:
            self.core.lose_cells(cells)

    async def order_rank(self, order: RankRequest) -> str | None:
        if self.ranks is None:
            return await super().order_rank(order)
        if order.epoch != self.epoch:
            return f"epoch: got {order.epoch}; allowed: {self.epoch}"
        try:
            return await asyncio.wrap_future(self.ranks.order(order.rank, leaves=order.leaves))
        except TransferError as error:
            return str(error)

    async def close(self) -> None:
        await super().close()
        if self.ranks is not None:
            self.ranks.close()

    def drain(self) -> None:
        """Report from now on that the instance drains. Pages of moved streams can still be fetched
        for `MOVED_KEPT_S`.
        """
        self.core.is_draining = True
        self.core.keep_aborted_s = MOVED_KEPT_S
        if self.drafts is not None:
            self.drafts.end()

    def drained(self, *, watched: bool) -> bool:
        """Return whether no run is left, and no watching proxy needs the pages."""
        if self.core.runs:
            return False
        held, pages = 0 if self._loans is None else self._loans.held_pages, self.pages
        return not watched or (pages.free_pages + held == pages.pages and not pages.leased_pages)


def describe_model(config: Config, directory: Path, worker: ModelWorker) -> ServedModel:
    tokenizer = load_tokenizer(directory)
    engine = config.cluster.engine
    # A longer request could not finish, or its pages would not fit into one pull request.
    pages = min(engine.pages, frames.MAX_TAGS)
    longest = min(engine.max_model_len, worker.max_positions, pages * engine.page_size_tokens)
    return ServedModel(
        name=config.cluster.served_name or directory.name,
        vocabulary=Vocabulary(tokenizer, worker.vocab_size, worker.eos_token_ids),
        pieces=TokenPieces(tokenizer),
        chat_template=load_chat_template(directory),
        fingerprint=worker.fingerprint,
        geometry=worker.geometry,
        max_model_len=longest,
    )


@dataclass(frozen=True, slots=True)
class PrefillShares:
    """Divides a prefill batch among sequences (a `Share`): by RaidServe's Algorithm 1 if heads are
    spread, else first come, first served.
    """

    ranks: RankGroup | RanksOnNodes
    prefill: PrefillTable

    def __call__(self, waiting: Sequence[Waiting], budget: int) -> list[int]:
        layout = self.ranks.layout
        cost = prefill_cost(layout, self.ranks.units, self.prefill) if len(waiting) > 1 else None
        if cost is None:
            return in_line(waiting, budget)
        bases = layout.bases
        by_base = [Waiting(each.rank % bases, each.first, each.tokens) for each in waiting]
        return shared_out(by_base, budget, cost)


def predicted_s(prefill: PrefillTable, chunks: Sequence[Chunk]) -> float:
    """Return the predicted time of a batch by this machine's prefill table."""
    return prefill.step_overhead_s + sum(
        prefill.extra(chunk.first_position, len(chunk.token_ids)) - prefill.step_overhead_s
        for chunk in chunks
    )
