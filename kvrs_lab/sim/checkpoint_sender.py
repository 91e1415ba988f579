"""Sends newly filled pages to agents and peers as `kvrs/transfer/checkpoint_sender.py` does: the
real backlog says what goes next.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from kvrs.ids import InstanceId
from kvrs.protocol.page_messages import HeldPages, TrafficClass
from kvrs.protocol.tags import Tag
from kvrs.transfer.checkpoint_backlog import RETRY_MOST_S, RETRY_S, CheckpointDelivery
from kvrs.transfer.checkpoint_sender import GATHER_S
from kvrs_lab.sim.links import SimTransfer
from kvrs_lab.sim.site import LATENCY_S, SimKeeper, SimPagePool, Site

_Batch = list[
    tuple[CheckpointDelivery, int, list[int]]
]  # A delivery, its first page, and the pages.


class SimCheckpointSender:
    """One per instance; to each agent one round at a time."""

    def __init__(self, engine: SimPagePool, site: Site) -> None:
        self._engine = engine
        self._site = site
        self._settings = site.config.backup
        self._staging_pages = min(self._settings.staging_pages, max(1, engine.pages.pages // 4))
        self._rounds: dict[
            InstanceId, int
        ] = {}  # With the number of the round; agents that none is under way to are not in it.
        self._numbers = 0
        self._order = site.number_of
        self._pauses_s: dict[InstanceId, float] = {}
        self.pinned_pages = 0

    def look(self) -> None:
        """Begin a round to every agent for which there is something to do."""
        names = [name for name in self._engine.backlog.waited_for if name not in self._rounds]
        for name in sorted(names, key=self._order):
            holder, now_s = self._site.holders[name], self._engine.clock.now_s
            due_in_s = self._engine.backlog.due_in_s(name, now_s)
            if isinstance(holder, SimKeeper) and due_in_s is not None:
                self._numbers += 1
                self._rounds[name] = self._numbers
                begins_in_s = due_in_s + GATHER_S
                self._engine.later(begins_in_s, self._round, holder, self._numbers)

    def _round(self, agent: SimKeeper, number: int) -> None:
        """Ask about what has not been asked, then send one batch."""
        engine, backlog, now_s = self._engine, self._engine.backlog, self._engine.clock.now_s
        engine.pages.expire(now_s)
        for delivery in backlog.endings(agent.id):
            if not engine.pages.retained_tokens(delivery.claim.stream):
                backlog.drop(delivery)
        offers = [(each, each.known_tags) for each in backlog.offers(agent.id, now_s)]

        def ask() -> None:
            if agent.stalls:
                return
            answers = [agent.offer(each.claim, each.reserved_bytes, tags) for each, tags in offers]
            engine.later(
                LATENCY_S,
                lambda: self._answered(number, agent, list(zip(offers, answers, strict=True))),
            )

        if offers:
            agent.call(
                LATENCY_S, ask, lambda: engine.later(LATENCY_S, lambda: self._lost(number, agent))
            )
            engine.later(
                self._site.config.transfer.stall_timeout_s, lambda: self._lost(number, agent)
            )
        else:
            self._send(number, agent)

    def _answered(
        self,
        number: int,
        agent: SimKeeper,
        answers: list[tuple[tuple[CheckpointDelivery, tuple[Tag, ...]], HeldPages]],
    ) -> None:
        if self._rounds.get(agent.id) != number:
            return
        for (delivery, _), held in answers:
            self._engine.backlog.offered(delivery, held, self._engine.clock.now_s)
        self._numbers += 1  # From here on the transfer's own timeout holds.
        self._rounds[agent.id] = self._numbers
        self._send(self._numbers, agent)

    def _send(self, number: int, agent: SimKeeper) -> None:
        engine = self._engine
        parcel = self._pin(agent)
        if not parcel:
            self._over(agent, number)
            return
        batch = [
            (each, first, each.tags(first, first + len(pages))) for each, first, pages in parcel
        ]
        life = engine.life

        def begin() -> None:
            if agent.stalls:
                stalled = partial(self.stored, agent, parcel, None)
                engine.later(self._site.config.transfer.stall_timeout_s, stalled)
            elif engine.alive and engine.life == life:
                _Store(
                    self,
                    agent,
                    parcel,
                    [agent.begin(each.claim, first, tags) for each, first, tags in batch],
                ).send()

        agent.call(
            LATENCY_S,
            begin,
            lambda: engine.later(LATENCY_S, lambda: self.stored(agent, parcel, None)),
        )

    def _pin(self, agent: SimKeeper) -> _Batch:
        backlog, now_s = self._engine.backlog, self._engine.clock.now_s
        budget = backlog.budget_pages(self._staging_pages, self.pinned_pages)
        parcel: _Batch = []
        for delivery, first, end in list(backlog.ranges(agent.id, now_s, budget)):
            pages = self._engine.pages.match(delivery.tags(first, end))
            self.pinned_pages += len(pages)
            if pages:
                parcel.append((delivery, first, pages))
            else:
                backlog.missed(delivery)
        return parcel

    def stored(self, agent: SimKeeper, parcel: _Batch, answers: list[HeldPages] | None) -> None:
        """The pages are there, or None: they are not, as far as is known."""
        engine = self._engine
        for _, _, pages in parcel:
            engine.pages.release(pages)
            self.pinned_pages -= len(pages)
        number = self._rounds[agent.id]
        if answers is None:
            self._lost(number, agent)
        else:
            self._pauses_s.pop(agent.id, None)
            for (delivery, first, _), held in zip(parcel, answers, strict=True):
                engine.backlog.stored(delivery, first, held, engine.clock.now_s)
            self._over(agent, number)
        engine.look()

    def _lost(self, number: int, agent: SimKeeper) -> None:
        """It does not answer. A round that is over already is not lost any more."""
        if self._rounds.get(agent.id) != number:
            return
        self._numbers += 1
        self._rounds[agent.id] = pause = self._numbers
        self._engine.backlog.lost(agent.id)
        pause_s = self._pauses_s.get(agent.id, RETRY_S)
        self._pauses_s[agent.id] = min(2 * pause_s, RETRY_MOST_S)
        self._engine.later(pause_s, lambda: self._over(agent, pause))

    def _over(self, agent: SimKeeper, number: int) -> None:
        if self._rounds.get(agent.id) == number:
            del self._rounds[agent.id]
            self.look()

    # What the transfer of a parcel needs.

    @property
    def engine(self) -> SimPagePool:
        return self._engine

    @property
    def site(self) -> Site:
        return self._site


class _Store:
    """One parcel on its way."""

    def __init__(
        self,
        checkpoint_sender: SimCheckpointSender,
        agent: SimKeeper,
        parcel: _Batch,
        runs: Sequence[Any],
    ) -> None:
        self._checkpoint_sender = checkpoint_sender
        self._agent = agent
        self._agent_life = agent.life
        self._parcel = parcel
        self._runs = runs
        contents = checkpoint_sender.engine.contents_of(
            [page for _, _, pages in parcel for page in pages]
        )
        self._pages = len(contents)
        places = ((run, index) for run in runs for index in range(len(run.tags)))
        self._on_their_way = zip(places, contents, strict=True)

    def send(self) -> None:
        engine, site = self._checkpoint_sender.engine, self._checkpoint_sender.site
        site.links.send(
            SimTransfer(
                engine,
                self._agent,
                self._pages,
                site.geometry.page_bytes,
                TrafficClass.CHECKPOINT,
                self._arrived,
                self._ended,
            )
        )

    def _arrived(self, pages: int) -> bool:
        engine, commit = self._checkpoint_sender.engine, self._agent.commit
        for _ in range(pages):
            if engine.corrupt_pages:
                engine.corrupt_pages -= 1
                return False
            (run, index), content = next(self._on_their_way)
            commit(run, index, content)
        return True

    def _ended(self, error: str | None) -> None:
        answers: list[HeldPages] | None = None
        if self._agent.alive and self._agent.life == self._agent_life:
            answers = [self._agent.end(run) for run in self._runs]
        if error is not None:
            # Whatever it was, the agent has closed the connection: an offer tells what is there.
            answers = None
        sender = self._checkpoint_sender
        sender.engine.later(LATENCY_S, sender.stored, self._agent, self._parcel, answers)
