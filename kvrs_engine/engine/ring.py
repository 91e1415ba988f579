"""The replication of an instance whose stages are in hosts: each host sends its part of full pages
to the same stage's host of the next instance along the ring of ids (KevlarFlow).

The ring of a stage changes with its members: a host that is lost or lent to another instance
accepts no parts, and the next one is asked. Stages replicate independently: a stage's parts can be
used for a loan (`stage_loans`) before the whole page has arrived, and whole pages by streams that
move here.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvrs.config.backup import BackupSettings
from kvrs.config.sections import TransferSettings
from kvrs.errors import TransferError
from kvrs.ids import InstanceId
from kvrs.protocol.instance import CheckpointTarget
from kvrs.protocol.pages import HeldPages, StoreCode, Tag
from kvrs.transfer.checkpoint_backlog import CheckpointDelivery
from kvrs.transfer.checkpoint_sender import DueRange, HolderMovedError
from kvrs.transfer.peers import Peer
from kvrs_engine.engine.checkpoints import PageSending
from kvrs_engine.engine.core import EngineCore
from kvrs_engine.engine.ranks.connection import PartsRefusedError
from kvrs_engine.engine.ranks.link import (
    IS_HERE,
    NOT_TAKEN,
    PartsHeld,
    PartsOffered,
    PartsOver,
    PartsRange,
    RefuseParts,
    TakeParts,
)
from kvrs_engine.engine.ranks.nodes import RanksOnNodes
from kvrs_engine.engine.ranks.remote import RemoteStage
from kvrs_engine.engine.requests import GenerationRun
from kvrs_engine.engine.stage_loans import in_loop
from kvrs_engine.scheduling.replicas import ReplicaBook, ReplicaRun

log = logging.getLogger(__name__)

# Pauses before an instance that refused parts is asked again: while another instance accepts parts,
# and while none does.
_LAY_AGAIN_S = 5.0
_RETRY_MAX_S = 1.0


@dataclass(slots=True, eq=False)
class RingStage:
    """The destination of one stage's parts, and its counters."""

    stage: RemoteStage
    target: InstanceId | None = None
    last_target: InstanceId | None = None
    sent_bytes: int = 0
    dropped_pages: int = 0  # Pages that a target refused or has evicted.
    refusals: dict[InstanceId, tuple[float, str]] = field(default_factory=dict)

    @property
    def unprotected(self) -> str | None:
        """The reason why there is no target; None: there is one."""
        if self.target is not None:
            return None
        return "; ".join(reason for _, reason in self.refusals.values()) or "nothing was sent yet"

    def next_target(self, ring: Sequence[InstanceId], now_s: float) -> InstanceId | None:
        """Return the first instance along the ring that has not refused recently; None: all have,
        and may be asked again at the next call.
        """
        for name in ring:
            until_s, _ = self.refusals.get(name, (0.0, ""))
            if until_s <= now_s:
                return name
        self.target = None
        self.refusals = {name: (0.0, reason) for name, (_, reason) in self.refusals.items()}
        return None


class StageRing(PageSending):
    """Sends parts of pages to other instances, and accepts theirs. Methods run in the event loop of
    the instance.
    """

    def __init__(
        self,
        ranks: RanksOnNodes,
        others: Sequence[InstanceId],
        core: EngineCore,
        book: ReplicaBook,
        settings: BackupSettings,
        transfer: TransferSettings,
        clock: Callable[[], float],
    ) -> None:
        """`others` are the other members of the group, along the ring from this instance."""
        self._others, self._book, self._core = others, book, core
        own = {stage.at.instance: RingStage(stage) for stage in ranks.remote}
        self._stages = own
        holders: dict[InstanceId, Peer] = {name: each.stage.at for name, each in own.items()}
        self._max_arriving = min(settings.staging_pages, max(1, core.pages.pages // 4))
        if (rate := transfer.link_bytes_per_s) is not None:
            # The link must carry the pinned pages well before their host gives up.
            layers = max(len(stage.layers) for stage in ranks.remote)
            part_bytes = ranks.geometry.page_bytes * layers // ranks.geometry.layers
            most = max(1, int(rate * transfer.stall_timeout_s / part_bytes))
            pinned = min(settings.staging_pages, most)
            settings = settings.model_copy(update={"staging_pages": pinned})
        super().__init__(core.pages, holders, settings, clock, core.wake, _RETRY_MAX_S)
        # Arriving pages, by stage and number of the offer.
        self._arriving: dict[tuple[int, int], list[ReplicaRun]] = {}

    def start(self) -> None:
        """Begin to accept parts of other instances."""
        for each in self._stages.values():
            each.stage.on_offered = in_loop(partial(self._offered, each.stage))
            each.stage.on_brought = in_loop(partial(self._brought, each.stage))

    @property
    def lag_pages(self) -> int:
        """Number of full pages that are not completely replicated: the lag of the slowest stage."""
        return max(map(self.backlog.lag_of, self._stages), default=0)

    @property
    def sent_bytes(self) -> int:
        return sum(each.sent_bytes for each in self._stages.values())

    def facts_of(self, stage: int) -> dict[str, Any]:
        """Return fields of `kvrs.protocol.instance.StageInfo`."""
        own = next(each for each in self._stages.values() if stage in each.stage.stages)
        return {
            "replica_to": own.target,
            "unprotected": own.unprotected,
            "replica_lag_pages": self.backlog.lag_of(own.stage.at.instance),
            "replica_sent_bytes": own.sent_bytes,
            "replica_dropped_pages": own.dropped_pages,
        }

    # Called by the batch loop.

    def began(self, run: GenerationRun) -> None:
        """Begin to send the run's pages, if the proxy wants the stream protected."""
        if run.checkpoints:
            targets = [CheckpointTarget(name, 0) for name in self._stages]
            self.backlog.follow(run.sequence, targets, handed_over=False)

    def held(self, run: GenerationRun) -> Mapping[InstanceId, int]:
        """Return the leading full pages that another instance is known to have whole."""
        held = self.backlog.held(run.sequence)
        targets = {each.last_target for each in self._stages.values()}
        pages = min(held.get(name, 0) for name in self._stages)
        # If the parts are at different instances, none has whole pages.
        return {target: pages for target in targets if target and pages and len(targets) == 1}

    def replicated(self, run: GenerationRun) -> int:
        lost = [each for each in self._stages.values() if each.stage.now.reforming is not None]
        held = self.backlog.held(run.sequence)
        return min((held.get(each.stage.at.instance, 0) for each in lost), default=0)

    # Called by the sender. A holder is the own host of a stage, which sends its parts on.

    async def offer(self, agent: Peer, delivery: CheckpointDelivery) -> HeldPages:
        lane = self._stages[agent.instance]
        ranges = [PartsRange(delivery.claim.stream, 0, list(delivery.known_tags))]
        while True:
            if (target := lane.next_target(self._others, self.clock())) is None:
                raise TransferError(lane.unprotected or "no other instance")
            if (answer := await self._ask(lane, target, ranges, [])) is not None:
                break
        if target != lane.target:
            # Pages at the previous target do not count.
            self.backlog.moved(agent.instance)
            log.info(
                "replicas have a target", extra={"stage": lane.stage.stages.start, "to": target}
            )
        lane.target = lane.last_target = target
        lane.refusals.pop(target, None)
        lane.dropped_pages += max(0, delivery.held_pages - answer.held[0])
        return HeldPages(StoreCode.OK, answer.held[0])

    async def send(
        self, agent: Peer, ranges: Sequence[DueRange]
    ) -> list[tuple[int, HeldPages] | None]:
        lane = self._stages[agent.instance]
        target = lane.next_target(self._others, self.clock())
        if target is None or target != lane.target:
            raise HolderMovedError("the ring is laid again")
        async with self.pinned(ranges) as found:
            parts = [
                PartsRange(delivery.claim.stream, first, list(delivery.tags(first, first + count)))
                for (delivery, first, _), pages in zip(ranges, found, strict=True)
                if (count := len(pages))
            ]
            if not parts:
                return [None] * len(ranges)
            own = [page for pages in found for page in pages]
            if (answer := await self._ask(lane, target, parts, own)) is None:
                lane.target = None
                raise HolderMovedError(lane.unprotected or target)
        lane.sent_bytes += answer.sent_bytes
        held = iter(answer.held)
        answers = [(len(pages), next(held)) if pages else None for pages in found]
        for (_, first, _), each in zip(ranges, answers, strict=True):
            if each is not None:
                lane.dropped_pages += max(0, first + each[0] - each[1])
        return [
            None if each is None else (each[0], HeldPages(StoreCode.OK, each[1]))
            for each in answers
        ]

    async def _ask(
        self,
        lane: RingStage,
        target: InstanceId,
        ranges: Sequence[PartsRange],
        pages: Sequence[int],
    ) -> PartsHeld | None:
        """Send parts to the target; None: the target refuses them now.

        Raises:
            TransferError: the own host cannot send them.
        """
        try:
            answer = await lane.stage.bring(target, ranges, pages)
        except PartsRefusedError as error:
            lane.refusals[target] = self.clock() + _LAY_AGAIN_S, str(error)
            return None
        if len(answer.held) != len(ranges):
            raise TransferError(f"{len(answer.held)} answers; allowed: {len(ranges)}")
        return answer

    # Parts of other instances.

    def _offered(self, stage: RemoteStage, offered: PartsOffered) -> None:
        offer, cells = offered.offer, stage.cells
        if self._core.is_draining:
            self._answer(stage, RefuseParts(0, 0, offer, "the instance is draining"))
            return
        if not offered.are_sent:
            held = [self._book.offer(each.stream, each.tags, cells) for each in offered.ranges]
            if any(each.code is StoreCode.FULL for each in held):
                self._answer(stage, RefuseParts(0, 0, offer, "no room for replicas"))
            else:
                self._answer(stage, TakeParts(0, 0, offer, [each.pages for each in held], []))
            return
        runs: list[ReplicaRun] = []
        numbers: list[int] = []
        leading: list[int] = []
        for each in offered.ranges:
            most = self._max_arriving - self._arriving_pages(runs)
            run = self._book.begin(each.stream, each.first_page, each.tags, cells, max(0, most))
            runs.append(run)
            leading.append(self._book.held(each.stream, cells).pages)
            numbers += [
                page if page is not None else self._unused(tag, stage)
                for tag, page in zip(each.tags, run.taken, strict=True)
            ]
        number = stage.stages.start
        self._arriving[number, offer] = runs
        has_pages = any(page >= 0 for page in numbers)
        told = self._answer(stage, TakeParts(0, 0, offer, leading, numbers))
        if has_pages:
            told.add_done_callback(partial(self._told, stage, offer))
        else:  # The end of an empty offer is not reported.
            self._end(number, offer, [])

    def _unused(self, tag: Tag, stage: RemoteStage) -> int:
        return IS_HERE if self.pages.parts.has(tag, stage.cells) else NOT_TAKEN

    def _arriving_pages(self, more: Sequence[ReplicaRun]) -> int:
        runs = [*more, *(run for runs in self._arriving.values() for run in runs)]
        return sum(page is not None for run in runs for page in run.taken)

    def _answer(
        self, stage: RemoteStage, answer: TakeParts | RefuseParts
    ) -> "asyncio.Future[None]":
        told = asyncio.wrap_future(stage.answer(answer))
        told.add_done_callback(_note)
        return told

    def _told(self, stage: RemoteStage, offer: int, told: "asyncio.Future[None]") -> None:
        if not told.cancelled() and told.exception() is not None:
            self._end(stage.stages.start, offer, [])

    def _brought(self, stage: RemoteStage, over: PartsOver | None) -> None:
        """Handle the end of an offer; None: of all offers, with the end of the host's session."""
        number = stage.stages.start
        if over is not None:
            self._end(number, over.offer, over.filled)
            return
        lane = self._stages[stage.at.instance]
        lane.target = None
        lane.refusals.clear()
        for key in [key for key in self._arriving if key[0] == number]:
            self._end(*key, [])

    def _end(self, number: int, offer: int, filled: Sequence[int]) -> None:
        come, place = {*filled}, 0
        for run in self._arriving.pop((number, offer), ()):
            for index, page in enumerate(run.taken):
                if page is not None and place + index in come:
                    self._book.arrived(run, index)
            place += len(run.taken)
            self._book.end(run)
        self._core.wake()


def _note(told: "asyncio.Future[None]") -> None:
    """Ignore a failed answer: the loss of the host is handled elsewhere."""
    if not told.cancelled():
        told.exception()
