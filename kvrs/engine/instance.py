"""One instance of the embedded engine, put together: worker, scheduler, core and page port."""

import asyncio
import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec

from kvrs.config.cluster import InstanceSettings, NodeSettings
from kvrs.config.file import Config
from kvrs.engine.anchored import AnchoredMemory, AnchoredPool
from kvrs.engine.chat import load_chat_template
from kvrs.engine.core import EngineCore
from kvrs.engine.models.config import ModelConfig
from kvrs.engine.page_port import InstancePlace
from kvrs.engine.ranks.group import RankGroup, describe_ranks
from kvrs.engine.ranks.settings import layout_of
from kvrs.engine.requests import Vocabulary
from kvrs.engine.served import ServedInstance, ServedModel
from kvrs.engine.worker import ModelWorker, Worker
from kvrs.errors import ConfigError, RequestError
from kvrs.ids import InstanceId
from kvrs.profiles.tables import PrefillTable
from kvrs.protocol import frames
from kvrs.protocol.instance import Capability, InstanceInfo, LoadReport
from kvrs.scheduling.pace import Pace
from kvrs.scheduling.pages import MOVED_KEPT_S, PageManager
from kvrs.scheduling.scheduler import BatchScheduler
from kvrs.scheduling.sequences import Chunk, Queue
from kvrs.text.output import load_tokenizer
from kvrs.text.pieces import TokenPieces
from kvrs.transfer.links import SendingLinks
from kvrs.transfer.send_faults import SendingFaults

CAPABILITIES = [
    Capability.PULL_PAGES,
    Capability.RETAIN,
    Capability.FENCE,
    Capability.SPLIT,
    Capability.CHECKPOINT,
    Capability.EXACT_RESUME,
]

# An instance measures its own prefill table at its start: a few lengths, in well under a second on
# a small model.
WARM_UP_REPEATS = 3
WARM_UP_LONGEST_TOKENS = 1024


class EngineInstance(ServedInstance):
    """An instance of the embedded engine."""

    def __init__(
        self,
        config: Config,
        instance_id: InstanceId,
        epoch: int,
        secret: bytes,
        older: Sequence[bytes] = (),
    ) -> None:
        """Load the model and measure its prefill, in the calling thread.

        Raises:
            ConfigError: instance, model or engine settings are wrong.
        """
        node, settings = find_instance(config, instance_id)
        if config.cluster.model is None:
            raise ConfigError(["cluster.model: missing; allowed: a Hugging Face directory"])
        engine = config.cluster.engine
        pace = Pace(engine.pace) if engine.pace is not None else None
        started_s = time.monotonic()
        directory = Path(config.cluster.model)
        layout = layout_of(settings, ModelConfig.from_directory(directory).units)
        anchored = None
        if config.state_plane.enabled and layout is None:
            anchored = AnchoredMemory(config, node.id, instance_id, epoch, secret)
        self.worker: ModelWorker = (
            Worker(directory, engine, anchored)
            if layout is None
            else RankGroup(directory, engine, layout)
        )
        try:
            if pace is not None:
                time.sleep(max(0.0, pace.load_s - (time.monotonic() - started_s)))
            self.links = SendingLinks(config.transfer, SendingFaults(), node.id)
            super().__init__(
                InstancePlace(config, node, settings, secret, epoch, self.links, older),
                _describe_model(config, directory, self.worker),
            )
            self._core = self._make_core(pace)
        except BaseException:
            if self.ranks is not None:
                self.ranks.close()
            raise
        self.draining = False

    def _make_core(self, pace: Pace | None) -> EngineCore:
        """Measure prefill, and put together what computes and what moves pages."""
        config, engine, kept = self._place.config, self.worker.settings, self.anchored
        if self.ranks is not None:
            own = measure_prefill(self.worker, self.max_model_len)
            self.ranks.predict = partial(predicted_s, own)
            self.prefill = own if pace is None else pace.prefill
        elif pace is not None:
            self.prefill = pace.prefill
        else:
            # Where pages were kept, a measurement would write into them.
            noted = None if kept is None else kept.prefill
            self.prefill = noted or measure_prefill(self.worker, self.max_model_len)
        records = None if kept is None else kept.ledger
        pages = PageManager(engine.pages, engine.page_size_tokens, records)
        if kept is not None:
            kept.note_prefill(self.prefill)
            kept.adopt(pages, time.monotonic() + config.transfer.lease_s)
        fetcher, self.checkpointer = self.port.attach(
            pages, self.worker.pool, released=lambda: self.core.wake()
        )
        return EngineCore(
            self.worker,
            BatchScheduler(engine, pages),
            pages,
            fetcher,
            clock=time.monotonic,
            lease_s=config.transfer.lease_s,
            prefill=self.prefill,
            pace=pace,
            checkpoints=self.checkpointer,
            anchored=kept,
        )

    @property
    def core(self) -> EngineCore:
        return self._core

    @property
    def pages(self) -> PageManager:
        return self._core.pages

    @property
    def ranks(self) -> RankGroup | None:
        """None: the instance is one process."""
        return self.worker if isinstance(self.worker, RankGroup) else None

    @property
    def anchored(self) -> AnchoredPool | None:
        """None: its pages end with the process."""
        return self.worker.anchored if isinstance(self.worker, Worker) else None

    def info(self) -> InstanceInfo:
        info = self._describe(self.prefill, CAPABILITIES, self.worker.gpus)
        if self.ranks is not None:
            ranks, layout = describe_ranks(self.ranks, info.node)
            return msgspec.structs.replace(info, ranks=ranks, layout=layout)
        if self.anchored is not None:
            return msgspec.structs.replace(info, kept=self.anchored.kept_now(self.pages))
        return info

    def load(self) -> LoadReport:
        scheduler = self.core.scheduler
        waiting = scheduler.waiting_by_queue
        return LoadReport(
            epoch=self.epoch,
            queued=scheduler.queued,
            running=scheduler.running,
            free_pages=self.pages.free_pages,
            queue_delay_s=self.core.queue_delay_s(),
            links=self.port.puller.link_reports(),
            queued_reuse=waiting[Queue.REUSE],
            queued_recompute=waiting[Queue.RECOMPUTE],
            queued_new=waiting[Queue.NEW],
            checkpoint_lag_pages=self.port.lag_pages,
            damaged_pages=self.port.puller.damaged_pages,
            fetched_pages=self.core.fetched_pages,
            kv_bytes=self.port.kv_bytes(),
            draining=self.draining,
        )

    async def start(self) -> None:
        await self.port.start()
        loop = asyncio.get_running_loop()
        if self.ranks is not None:
            self.ranks.on_loss = lambda lost: loop.call_soon_threadsafe(self.core.fail, lost)
        self.tasks = [
            loop.create_task(work)
            for work in (self.core.run(), self.port.probe(), self.checkpointer.run())
        ]

    def lose_device(self, rank: int) -> None:
        if self.ranks is None:
            super().lose_device(rank)
            return
        if rank not in self.ranks.pids:
            allowed = ", ".join(map(str, self.ranks.pids))
            raise RequestError(f"rank: got {rank}; allowed: {allowed}", param="rank")
        self.ranks.lose_device(rank)

    async def close(self) -> None:
        await super().close()
        if self.ranks is not None:
            self.ranks.close()

    def drain(self) -> None:
        """Report from now on that this instance is about to end. The pages of streams that are
        moved away can still be fetched for a moment.
        """
        self.draining = True
        self.core.keep_aborted_s = MOVED_KEPT_S

    def drained(self, *, watched: bool) -> bool:
        """Whether nothing runs here, and no proxy that watches this instance needs its pages."""
        return not self.core.runs and (not watched or self.pages.unused)


def _describe_model(config: Config, directory: Path, worker: ModelWorker) -> ServedModel:
    tokenizer = load_tokenizer(directory)
    engine = config.cluster.engine
    # A longer request could never finish here, or its pages could not be asked for in one
    # question.
    pages = min(engine.pages, frames.MAX_TAGS)
    longest = min(engine.max_model_len, worker.max_positions, pages * engine.page_size_tokens)
    return ServedModel(
        name=directory.name,
        vocabulary=Vocabulary(tokenizer, worker.vocab_size, worker.eos_token_ids),
        pieces=TokenPieces(tokenizer),
        chat_template=load_chat_template(directory),
        fingerprint=worker.fingerprint,
        geometry=worker.geometry,
        max_model_len=longest,
    )


def predicted_s(prefill: PrefillTable, chunks: Sequence[Chunk]) -> float:
    """Of a batch by the table of this machine."""
    return prefill.step_overhead_s + sum(
        prefill.extra(chunk.first_position, len(chunk.token_ids)) - prefill.step_overhead_s
        for chunk in chunks
    )


def measure_prefill(worker: ModelWorker, max_model_len: int) -> PrefillTable:
    """Time prefill of a few lengths on this machine, before any page is in use: the instance's own
    table.
    """
    longest = min(max_model_len, worker.settings.pages * worker.geometry.page_size_tokens)
    times = {
        at: statistics.median(_prefill_s(worker, tokens) for _ in range(WARM_UP_REPEATS))
        for at, tokens in warm_up_lengths(longest).items()
    }
    return PrefillTable.from_points(
        f"measured at start on {worker.settings.device}", "this instance", times
    )


def warm_up_lengths(longest_tokens: int) -> dict[int, int]:
    """Where on a prefill table to measure, and with how many tokens.

    One token is the overhead of a step, which stands at zero tokens; it also warms the engine up.
    """
    step = max(1, min(longest_tokens, WARM_UP_LONGEST_TOKENS) // 8)
    return {0: 1} | {times * step: times * step for times in (1, 2, 4, 8)}


def _prefill_s(worker: ModelWorker, tokens: int) -> float:
    size, step = worker.geometry.page_size_tokens, worker.settings.max_batch_tokens
    pages = range(-(-tokens // size))
    started_s = time.perf_counter()
    for first in range(0, tokens, step):
        ids = [
            1 + position % (worker.vocab_size - 1)
            for position in range(first, min(first + step, tokens))
        ]
        worker.execute(
            [
                Chunk(
                    token_ids=ids,
                    first_position=first,
                    pages=pages,
                    wants_logits=first + step >= tokens,
                )
            ]
        )
    return time.perf_counter() - started_s


def find_instance(config: Config, instance_id: InstanceId) -> tuple[NodeSettings, InstanceSettings]:
    for node, instance in config.cluster.instances():
        if instance.id == instance_id:
            return node, instance
    allowed = ", ".join(instance.id for _, instance in config.cluster.instances())
    raise ConfigError([f"instance {instance_id!r} is not in cluster.nodes; allowed: {allowed}"])
