"""The product's checkpoint sender in a simulated instance. Pages go over simulated links."""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

from kvrs.errors import TransferError
from kvrs.protocol.instance import CheckpointTarget
from kvrs.protocol.pages import HeldPages, TrafficClass
from kvrs.transfer.checkpoint_backlog import CheckpointDelivery
from kvrs.transfer.checkpoint_sender import CheckpointSender, DueRange
from kvrs.transfer.peers import Peer
from kvrs_lab.sim.event_loop import SimLoop
from kvrs_lab.sim.links import SimTransfer
from kvrs_lab.sim.process import ask
from kvrs_lab.sim.site import LATENCY_S, SimKeeper, SimPagePool, Site


class SimCheckpointSender(CheckpointSender):
    """The sender of one life of an instance."""

    def __init__(self, engine: SimPagePool, site: Site, loop: SimLoop) -> None:
        backup = site.config.backup
        most = min(backup.staging_pages, max(1, engine.pages.pages // 4))
        super().__init__(engine.pages.page_size_tokens, {}, backup, most, loop.time)
        self._engine, self._site, self._loop = engine, site, loop
        self._stall_s = site.config.transfer.stall_timeout_s

    def learn_of(self, checkpoints: list[CheckpointTarget]) -> None:
        """Start to serve each holder that gets pages for the first time."""
        for name in {each.agent: None for each in checkpoints if each.agent not in self.agents}:
            self.learn({name: Peer(name, self._site.holders[name].node, "simulated", 0)})
            self._loop.create_task(self.serve(name))

    def is_over(self, delivery: CheckpointDelivery) -> bool:
        pages = self._engine.pages
        pages.expire(self._engine.clock.now_s)
        return not pages.retained_tokens(delivery.claim.stream)

    async def offer(self, agent: Peer, delivery: CheckpointDelivery) -> HeldPages:
        holder = self._holder(agent)
        offered = delivery.claim, delivery.reserved_bytes, delivery.known_tags

        def answer() -> HeldPages | None:
            return None if holder.stalls else holder.offer(*offered)

        try:
            return await ask(self._loop, holder, answer, lambda: LATENCY_S, self._stall_s)
        except OSError:
            raise TransferError("no answer") from None

    async def send(
        self, agent: Peer, ranges: Sequence[DueRange]
    ) -> list[tuple[int, HeldPages] | None]:
        engine, pool = self._engine, self._engine.pages
        found = [pool.match(delivery.tags(first, end)) for delivery, first, end in ranges]
        batch = [
            (delivery.claim, first, delivery.tags(first, first + len(pages)))
            for (delivery, first, _), pages in zip(ranges, found, strict=True)
            if pages
        ]
        pages = [page for each in found for page in each]
        try:
            store = _Store(engine, self._site, self._holder(agent), batch, pages, self._loop)
            answers = iter(await store.answered() if batch else ())
            return [(len(each), next(answers)) if each else None for each in found]
        finally:
            pool.release(pages)
            if not self._loop.is_closed():
                engine.look()

    def _holder(self, agent: Peer) -> SimKeeper:
        holder = self._site.holders[agent.instance]
        assert isinstance(holder, SimKeeper)
        return holder


class _Store:
    """One batch of pages on its way."""

    def __init__(
        self,
        engine: SimPagePool,
        site: Site,
        holder: SimKeeper,
        batch: Sequence[Any],
        pages: list[int],
        loop: SimLoop,
    ) -> None:
        self._engine, self._site, self._holder = engine, site, holder
        self._holder_life = 0
        self._batch, self._loop = batch, loop
        self._runs: list[Any] = []
        self._pages = pages
        self._answers: asyncio.Future[list[HeldPages] | None] = loop.create_future()

    async def answered(self) -> list[HeldPages]:
        """Send the batch; return the answers. Raises TransferError."""
        self._holder.call(LATENCY_S, self._begin, partial(self._over, None))
        if (answers := await self._answers) is None:
            raise TransferError("not stored")
        return answers

    def _begin(self) -> None:
        holder, engine = self._holder, self._engine
        if self._loop.is_closed():
            return  # The instance has died.
        if holder.stalls:
            self._loop.call_later(self._site.config.transfer.stall_timeout_s, self._over, None)
            return
        self._holder_life = holder.life
        contents = engine.contents_of(self._pages)
        self._runs = [holder.begin(*each) for each in self._batch]
        places = ((run, index) for run in self._runs for index in range(len(run.tags)))
        self._on_their_way = zip(places, contents, strict=True)
        transfer = SimTransfer(
            engine,
            holder,
            len(contents),
            self._site.geometry.page_bytes,
            TrafficClass.CHECKPOINT,
            self._arrived,
            self._ended,
        )
        self._site.links.send(transfer)

    def _arrived(self, pages: int) -> bool:
        for _ in range(pages):
            if self._engine.corrupt_pages:
                self._engine.corrupt_pages -= 1
                return False
            (run, index), content = next(self._on_their_way)
            self._holder.commit(run, index, content)
        return True

    def _ended(self, error: str | None) -> None:
        answers: list[HeldPages] | None = None
        if self._holder.alive and self._holder.life == self._holder_life:
            answers = [self._holder.end(run) for run in self._runs]
        # The agent closes the connection on every error; the next offer tells what it has.
        self._over(answers if error is None else None)

    def _over(self, answers: list[HeldPages] | None) -> None:
        self._loop.call_later(LATENCY_S, self._answers.set_result, answers)
