"""The environment that all simulated processes share, and page transfers between them."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Any

from kvrs.config.cluster import EngineSettings
from kvrs.config.file import Config
from kvrs.ids import InstanceId, StreamId
from kvrs.profiles.tables import PrefillTable
from kvrs.protocol.geometry import KvGeometry
from kvrs.protocol.pages import CheckpointClaim, HeldPages, Tag, TrafficClass
from kvrs.transfer.checkpoint_backlog import CheckpointBacklog
from kvrs.transfer.meter import LinkMeter
from kvrs_engine.scheduling.pace import Pace
from kvrs_engine.scheduling.pages import PageManager
from kvrs_engine.scheduling.replicas import ReplicaBook, ReplicaRun
from kvrs_lab.sim.first_token import FirstToken
from kvrs_lab.sim.hosts import SimHost
from kvrs_lab.sim.links import SimLinks, SimTransfer
from kvrs_lab.sim.process import Clock, SimProcess, Step, require
from kvrs_lab.sim.rank_model import PipelineModel, RankModel


@dataclass(slots=True)
class StreamTally:
    """Count of open streams at all proxies."""

    open: int = 0

    def begun(self) -> None:
        self.open += 1

    def over(self) -> None:
        self.open -= 1


LATENCY_S = 0.0002  # One-way latency between any two processes.


@dataclass(frozen=True, slots=True)
class InstancePace:
    """Step times of an instance."""

    pace: Pace
    prefill: PrefillTable  # For a single prompt, in chunks.
    queued_prefill: PrefillTable  # For prompts that share steps.

    @classmethod
    def of(cls, profile: str, engine: EngineSettings) -> "InstancePace":
        pace, chunks = Pace(profile), (engine.max_batch_tokens, engine.max_model_len)
        return cls(pace, pace.prefill.chunked(*chunks), pace.prefill.shared(*chunks))


@dataclass(frozen=True, slots=True)
class Site:
    config: Config
    clock: Clock
    links: SimLinks
    pace: "InstancePace"
    geometry: KvGeometry
    root: Tag
    rank_model: RankModel
    pipeline_model: PipelineModel
    hosts: dict[InstanceId, list[SimHost]]  # Hosts of instances that have one per stage.
    first_token: FirstToken = FirstToken.DECODE
    tally: StreamTally = field(default_factory=StreamTally)
    holders: dict[InstanceId, "SimHolder"] = field(default_factory=dict)  # Instances and agents.


@dataclass(frozen=True, slots=True)
class PageRequest:
    """A request for pages by tag, and possibly for the partial page of a hand-off."""

    tags: tuple[Tag, ...]
    traffic: TrafficClass
    epoch: int | None = None
    handoff: StreamId | None = None
    tail_index: int | None = None
    page_share: float = 1.0  # Share of a page's bytes, if only some cells are fetched.
    within_s: float = inf


@dataclass(frozen=True, slots=True)
class OpenedPages:
    """The pages of the requested prefix that a holder has, pinned until `close`. `contents` has the
    true tag of each page.
    """

    contents: list[Tag | None]
    has_tail: bool
    close: Step


class SimHolder(SimProcess):
    stalls_until_s = 0.0  # The page port accepts connections, but does not answer until then.

    def start(self) -> None:
        super().start()
        self.stalls_until_s = 0.0

    @property
    def stalls(self) -> bool:
        return self.clock.now_s < self.stalls_until_s

    @abstractmethod
    def open(self, asked: PageRequest) -> OpenedPages: ...

    def end_transfer(self, stream: StreamId, below: tuple[int, int]) -> None:
        """Handle the end of the slot of attempts `below` a number."""

    @abstractmethod
    def check_at_rest(self) -> None:
        """Raises AssertionError if anything is left after the last stream."""


class SimKeeper(SimHolder):
    """A holder that keeps pages of other processes. `begin` places a range, `commit` stores each
    page, and `end` ends the range.
    """

    @abstractmethod
    def offer(
        self, claim: CheckpointClaim, reserved_bytes: int, tags: tuple[Tag, ...]
    ) -> HeldPages: ...

    @abstractmethod
    def begin(self, claim: CheckpointClaim, first_page: int, tags: tuple[Tag, ...]) -> Any: ...

    @abstractmethod
    def commit(self, run: Any, index: int, content: Tag | None) -> None:
        """Store a page that has arrived with the right checksum."""

    @abstractmethod
    def end(self, run: Any) -> HeldPages: ...


class SimPagePool(SimKeeper):
    """A holder that computes pages, sends checkpoints of them, and keeps replicas for others."""

    pages: PageManager
    backlog: CheckpointBacklog
    replicas: ReplicaBook
    contents: list[Tag | None]  # Content of each full page, by number.

    # Pages from other instances.

    def offer(
        self, claim: CheckpointClaim, reserved_bytes: int, tags: tuple[Tag, ...]
    ) -> HeldPages:
        return self.replicas.offer(claim.stream, tags)

    def begin(self, claim: CheckpointClaim, first_page: int, tags: tuple[Tag, ...]) -> ReplicaRun:
        return self.replicas.begin(claim.stream, first_page, tags)

    def commit(self, run: ReplicaRun, index: int, content: Tag | None) -> None:
        if (page := run.taken[index]) is not None:
            if content != run.tags[index]:
                require(False, f"{self.id} is sent another page than was promised")
            self.received(page, run.tags[index])
            self.replicas.arrived(run, index)

    def end(self, run: ReplicaRun) -> HeldPages:
        held = self.replicas.end(run)
        self.later(0.0, self.look)
        return held

    @abstractmethod
    def received(self, page: int, content: Tag) -> None:
        """Note the content of a page."""

    @abstractmethod
    def look(self) -> None:
        """Begin all work that can begin, since pages may have become free."""

    def contents_of(self, pages: list[int]) -> list[Tag | None]:
        """Return the true content of each page."""
        return [self.contents[page] for page in pages]


class Fetch:
    """One pull. `done` is called once, with the number of full pages that arrived intact and
    whether the partial page did.
    """

    def __init__(
        self,
        site: Site,
        target: SimProcess,
        meter: LinkMeter,
        source: SimHolder,
        asked: PageRequest,
        page: Callable[[int], None],
        done: Callable[[int, bool], None],
    ) -> None:
        self._site = site
        self._target = target
        self._life = target.life
        self._meter = meter
        self._source = source
        self._asked = asked
        self._page = page
        self._done = done
        self._page_bytes = round(site.geometry.page_bytes * asked.page_share)
        self._opened: OpenedPages | None = None
        self._pages = 0
        self._is_over = False
        self._transfer: SimTransfer | None = None
        source.call(LATENCY_S, self._answer, self._end)
        site.clock.after(site.config.transfer.stall_timeout_s, self._give_up)
        if asked.within_s < inf:
            site.clock.after(asked.within_s, self._stop)

    def _answer(self) -> None:
        if self._is_over or self._target.life != self._life or self._source.stalls:
            return
        self._opened = opened = self._source.open(self._asked)
        pages = len(opened.contents) + opened.has_tail
        if not pages:
            self._close()
            self._end()
            return
        self._meter.begin(self._source.node, self._site.clock.now_s)
        self._transfer = SimTransfer(
            self._source,
            self._target,
            pages,
            self._page_bytes,
            self._asked.traffic,
            self._arrived,
            self._ended,
        )
        self._site.links.send(self._transfer)

    def _arrived(self, pages: int) -> bool:
        assert self._opened is not None
        self._meter.add(self._source.node, pages * self._page_bytes, self._site.clock.now_s)
        for _ in range(pages):
            if self._source.corrupt_pages:
                self._source.corrupt_pages -= 1
                return False
            if self._pages < len(self._opened.contents):
                # The checksum was right: the page has the holder's content, which must be the
                # requested one.
                asked, got = self._asked.tags[self._pages], self._opened.contents[self._pages]
                if got != asked:
                    source, target = self._source.id, self._target.id
                    require(False, f"{source} delivers another page than {target} asked for")
                self._page(self._pages)
            self._pages += 1
        return True

    def _ended(self, error: str | None) -> None:
        self._meter.end(self._source.node, self._site.clock.now_s)
        self._close()
        self._end()

    def _close(self) -> None:
        assert self._opened is not None
        self._source.later(0.0, self._opened.close)

    def _give_up(self) -> None:
        if self._opened is None:
            self._end()

    def _stop(self) -> None:
        if self._transfer is not None:
            self._site.links.stop(self._transfer, "it takes too long")
        else:
            self._end()

    def _end(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        full = 0 if self._opened is None else min(self._pages, len(self._opened.contents))
        tail = self._opened is not None and self._pages > len(self._opened.contents)
        if self._target.alive and self._target.life == self._life:
            self._target.later(LATENCY_S, lambda: self._done(full, tail))
