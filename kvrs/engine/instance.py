"""One instance put together: worker, scheduler, page server, puller, and what it says of itself."""

import asyncio
import os
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from kvrs.agent.config import BackupMode
from kvrs.config import Config, InstanceSettings, NodeSettings
from kvrs.engine.chat import load_chat_template
from kvrs.engine.checkpoints import Checkpointer
from kvrs.engine.core import EngineCore
from kvrs.engine.fencing import Attempt
from kvrs.engine.pages import EnginePages
from kvrs.engine.requests import Model
from kvrs.engine.worker import Worker
from kvrs.errors import ConfigError
from kvrs.ids import InstanceId, StreamId
from kvrs.profiles.tables import PrefillTable
from kvrs.protocol import frames
from kvrs.protocol.instance import Capability, InstanceInfo, LoadReport, MeasuredPrefill
from kvrs.protocol.openai import ChatRequest, CompletionRequest
from kvrs.protocol.tags import Tag, root_tag
from kvrs.scheduling.batches import BatchScheduler
from kvrs.scheduling.chunks import Chunk
from kvrs.scheduling.pace import Pace
from kvrs.scheduling.pages import PageManager
from kvrs.scheduling.sequences import Queue
from kvrs.text.output import load_tokenizer
from kvrs.text.pieces import TokenPieces
from kvrs.transfer.faults import SendingFaults
from kvrs.transfer.links import SendingLinks
from kvrs.transfer.peers import Identity, Peer
from kvrs.transfer.puller import PagePuller
from kvrs.transfer.pusher import PagePusher
from kvrs.transfer.server import PageServer

CAPABILITIES = [
    Capability.PULL_PAGES,
    Capability.RETAIN,
    Capability.FENCE,
    Capability.SPLIT,
    Capability.CHECKPOINT,
    Capability.EXACT_RESUME,
]

# An instance measures its own prefill table at its start: a few lengths, in well under a second on a small model.
WARM_UP_REPEATS = 3
WARM_UP_LONGEST_TOKENS = 1024
# Streams are taken away from an instance that is about to end. Their next ones fetch what it has at once, or not at all.
MOVED_KEPT_S = 5.0


class EngineInstance:
    """An instance of role, node and ports that the configuration gives. `start` needs a running event loop."""

    def __init__(self, config: Config, instance_id: InstanceId, epoch: int, secret: bytes, older: Sequence[bytes] = ()) -> None:
        self.node, self.settings = find_instance(config, instance_id)
        if config.cluster.model is None:
            raise ConfigError(["cluster.model: missing; allowed: a Hugging Face directory"])
        self.config = config
        self.secret, self.older = secret, older
        self.epoch = epoch
        self.model = Path(config.cluster.model).name
        tokenizer = load_tokenizer(Path(config.cluster.model))
        self.pieces = TokenPieces(tokenizer)
        self.chat_template = load_chat_template(Path(config.cluster.model))
        engine = config.cluster.engine
        pace = Pace(engine.pace) if engine.pace is not None else None
        started_s = time.monotonic()
        self.worker = Worker(Path(config.cluster.model), engine)
        if pace is not None:
            time.sleep(max(0.0, pace.load_s - (time.monotonic() - started_s)))
        self.served = Model(tokenizer, self.worker.vocab_size, self.worker.eos_token_ids)
        # Whatever is longer could never finish here, or its pages could not be asked for in one question.
        pages = min(engine.pages, frames.MAX_TAGS)
        self.max_model_len = min(engine.max_model_len, self.worker.max_positions, pages * engine.page_size_tokens)
        self.pages = PageManager(engine.pages, engine.page_size_tokens)
        self.prefill = pace.prefill if pace is not None else measure_prefill(self.worker, self.max_model_len)
        self.puller = PagePuller(self.identity, secret, config.transfer, time.monotonic)
        source = EnginePages(self.pages, self.worker.pool, released=lambda: self.core.wake())
        # All that this process sends, whoever sends it, shares the links to the other nodes.
        self.links = SendingLinks(config.transfer, SendingFaults(), self.node.id)
        self.page_server = PageServer(self.identity, source, secret, config.transfer, self.links, older=older)
        self.pusher = PagePusher(self.identity, secret, config.transfer, self.links)
        self.registry = peers_of(config)
        self.checkpointer = Checkpointer(
            self.pages,
            self.worker.pool,
            self.pusher,
            agents_of(config),
            config.backup,
            clock=time.monotonic,
            released=lambda: self.core.wake(),
        )
        self.core = EngineCore(
            self.worker,
            BatchScheduler(engine, self.pages),
            self.pages,
            self.puller,
            self.registry,
            clock=time.monotonic,
            lease_s=config.transfer.lease_s,
            prefill=self.prefill,
            pace=pace,
            checkpoints=self.checkpointer,
        )
        self.one_call = False
        self.draining = False
        self.tasks: list[asyncio.Task[None]] = []  # None of them ends by itself.

    def identity(self) -> Identity:
        return Identity(
            instance=self.settings.id,
            node=self.node.id,
            epoch=self.epoch,
            fingerprint=self.worker.fingerprint,
            page_bytes=self.worker.geometry.page_bytes,
        )

    def root(self, cache_salt: str) -> Tag:
        """The tag from which all pages of one tenant are chained."""
        return root_tag(self.worker.fingerprint, cache_salt)

    @property
    def faults(self) -> SendingFaults:
        return self.page_server.faults

    def refuse(self, asked: CompletionRequest | ChatRequest) -> None:
        """What this engine cannot do has no name in the API as we know it, so it was refused already."""

    def fence(self, attempts: Mapping[StreamId, Attempt]) -> None:
        """Drop lower attempts; the raised epoch tells everybody that what they knew of this instance is void."""
        self.core.fence(attempts)
        self.epoch += 1

    def end_transfers(self, attempts: Mapping[StreamId, Attempt]) -> None:
        self.core.end_transfers(attempts)

    def down(self) -> str | None:
        """It serves as long as its process lives."""
        return None

    def info(self) -> InstanceInfo:
        return InstanceInfo(
            id=self.settings.id,
            node=self.node.id,
            role=self.settings.role,
            epoch=self.epoch,
            pid=os.getpid(),
            model=self.model,
            fingerprint=self.worker.fingerprint,
            geometry=self.worker.geometry,
            max_model_len=self.max_model_len,
            page_port=self.settings.page_port,
            capabilities=CAPABILITIES,
            prefill=MeasuredPrefill(
                label=self.prefill.label, step_tokens=self.prefill.step_tokens, seconds=list(self.prefill.seconds)
            ),
            gpus=self.worker.gpus,
        )

    def load(self) -> LoadReport:
        scheduler = self.core.scheduler
        waiting = scheduler.waiting_by_queue
        return LoadReport(
            epoch=self.epoch,
            queued=scheduler.waiting + scheduler.pulling,
            running=scheduler.running,
            free_pages=self.pages.free_pages,
            queue_delay_s=self.core.queue_delay_s(),
            links=self.puller.link_reports(),
            queued_reuse=waiting[Queue.REUSE],
            queued_recompute=waiting[Queue.RECOMPUTE],
            queued_new=waiting[Queue.NEW],
            checkpoint_lag_pages=self.checkpointer.lag_pages,
            damaged_pages=self.puller.damaged_pages,
            draining=self.draining,
        )

    async def start(self) -> None:
        """Serve pages and begin to compute; the HTTP side is the caller's."""
        await self.page_server.start(self.settings.host, self.settings.page_port)
        loop = asyncio.get_running_loop()
        probes = probe_links(self.puller, self.registry.values(), self.settings.id, self.config.transfer.probe_interval_s)
        self.tasks = [loop.create_task(work) for work in (self.core.run(), probes, self.checkpointer.run())]

    def drain(self) -> None:
        """Say from now on that this instance is about to end; what is taken away from it can still be fetched for a moment."""
        self.draining = True
        self.core.keep_aborted_s = MOVED_KEPT_S

    def drained(self, *, watched: bool) -> bool:
        """Whether nothing runs here, and nobody who watches us needs pages of what did."""
        return not self.core.runs and (not watched or self.pages.unused)

    def failed(self) -> BaseException | None:
        """The bug that ended one of the tasks, if one did: an instance that cannot compute must not look alive."""
        return next((task.exception() for task in self.tasks if task.done() and not task.cancelled()), None)

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.page_server.close()
        await self.puller.close()
        await self.pusher.close()


async def probe_links(puller: PagePuller, peers: Iterable[Peer], own: InstanceId, interval_s: float) -> None:
    """Keep an estimate of every link into an instance; links with traffic of their own are left alone."""
    nodes = {peer.instance: peer.node for peer in peers}
    # Its neighbours on its node probe the same links.
    probers = list(nodes.values()).count(nodes[own])
    while True:
        for peer in peers:
            # Where one answered, its neighbours on that node are not asked.
            if peer.instance != own:
                await puller.probe(peer, probers)
        await asyncio.sleep(interval_s)


def peers_of(config: Config) -> dict[InstanceId, Peer]:
    """Where pages may come from and go to: all instances, then the agents if there are any."""
    peers = [
        Peer(instance=instance.id, node=node.id, host=instance.host, port=instance.page_port)
        for node, instance in config.cluster.instances()
    ]
    return {peer.instance: peer for peer in peers} | agents_of(config)


def agents_of(config: Config) -> dict[InstanceId, Peer]:
    """Where checkpoints go."""
    if config.backup.mode is BackupMode.OFF:
        return {}
    return {
        node.agent_id: Peer(instance=node.agent_id, node=node.id, host=node.agent.host, port=node.agent.page_port)
        for node in config.cluster.nodes
    }


def measure_prefill(worker: Worker, max_model_len: int) -> PrefillTable:
    """Time prefill of a few lengths on this machine, before any page is in use: the instance's own table."""
    longest = min(max_model_len, WARM_UP_LONGEST_TOKENS, worker.pool.pages * worker.geometry.page_size_tokens)
    step = max(1, longest // 8)
    # One token is the overhead of a step, which stands at zero tokens; it also warms the first run up.
    lengths = {0: 1, step: step, 2 * step: 2 * step, 4 * step: 4 * step, 8 * step: 8 * step}
    times = {at: statistics.median(_prefill_s(worker, tokens) for _ in range(WARM_UP_REPEATS)) for at, tokens in lengths.items()}
    return PrefillTable.from_points(f"measured at start on {worker.settings.device}", "this instance", times)


def _prefill_s(worker: Worker, tokens: int) -> float:
    size, step = worker.geometry.page_size_tokens, worker.settings.max_batch_tokens
    pages = range(-(-tokens // size))
    started_s = time.perf_counter()
    for first in range(0, tokens, step):
        ids = [1 + position % (worker.vocab_size - 1) for position in range(first, min(first + step, tokens))]
        worker.execute([Chunk(token_ids=ids, first_position=first, pages=pages, wants_logits=first + step >= tokens)])
    return time.perf_counter() - started_s


def find_instance(config: Config, instance_id: InstanceId) -> tuple[NodeSettings, InstanceSettings]:
    for node, instance in config.cluster.instances():
        if instance.id == instance_id:
            return node, instance
    allowed = ", ".join(instance.id for _, instance in config.cluster.instances())
    raise ConfigError([f"instance {instance_id!r} is not in cluster.nodes; allowed: {allowed}"])
