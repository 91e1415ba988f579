"""Fetches of pages for restores, in the thread of the page port.

Pages count one by one, as they arrive and are verified: what is there at a restore's deadline is
used.
"""

import asyncio
from collections.abc import Iterable, Mapping
from itertools import islice

from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.instance import SourceRange
from kvrs.protocol.page_messages import PullRequest, TrafficClass
from kvrs.transfer.peers import Peer
from kvrs.transfer.puller import PagePuller
from kvrs.vllm.staging import Staging
from kvrs.vllm.tracked import Restore


class RestoreFetches:
    """All fetches of one port."""

    def __init__(
        self,
        puller: PagePuller,
        agents: Mapping[InstanceId, Peer],
        staging: Staging,
    ) -> None:
        self._puller, self._agents, self._staging = puller, agents, staging
        self._tasks: dict[Restore, asyncio.Task[None]] = {}

    @property
    def tasks(self) -> Iterable[asyncio.Task[None]]:
        return self._tasks.values()

    def begin(self, restore: Restore) -> None:
        """Fill the slots of a restore from its sources, one after the other."""
        self._tasks[restore] = asyncio.create_task(self._fetch(restore))

    def end(self, restore: Restore) -> None:
        """Give its slots back once nothing is written to them any more."""
        task = self._tasks.pop(restore)
        task.add_done_callback(lambda _: self._staging.give_back(restore.slots))
        task.cancel()

    def fence(self, attempts: Mapping[StreamId, tuple[int, int]], *, slots_only: bool) -> None:
        """Nothing more is fetched for lower attempts; with `slots_only` for those under a slot."""
        for restore, task in self._tasks.items():
            if restore.attempt < attempts.get(restore.stream, restore.attempt) and (
                restore.slot_token or not slots_only
            ):
                restore.fault = "a fence has ended it"
                task.cancel()

    async def _fetch(self, restore: Restore) -> None:
        try:
            for source in restore.sources:
                peer = self._agents.get(source.id)
                next_page = restore.first_page + len(restore.slots)
                end = min(source.first_page + source.pages, len(restore.tags))
                if peer is None:
                    restore.fault = f"{source.id} is no agent of the configuration"
                    return
                if source.first_page > next_page:
                    restore.fault = restore.fault or f"no source has page {next_page}"
                    return
                wanted = max(0, end - next_page)
                if slots := self._staging.take(wanted):
                    restore.fault = ""  # What did not come before comes from here.
                    await self._pull(peer, restore, source, slots)
                if len(slots) < wanted:
                    has_room = f"staging had room for {len(slots)} of {wanted} pages"
                    restore.fault = restore.fault or has_room
        finally:
            restore.is_over = True

    async def _pull(
        self, peer: Peer, restore: Restore, source: SourceRange, slots: list[int]
    ) -> None:
        """Fill these slots with the next pages, as far as they come."""
        first, arriving = len(restore.slots), iter(slots)
        next_page = restore.first_page + first
        tags = tuple(restore.tags[next_page : next_page + len(slots)])

        def verified(pages: int) -> None:
            restore.slots += islice(arriving, pages)

        try:
            result = await self._puller.pull(
                peer,
                PullRequest(tags, traffic=TrafficClass.RECOVERY),
                [self._staging.view(slot) for slot in slots],
                None,
                expected_epoch=source.generation,
                verified=verified,
            )
            if result.full_pages < len(slots):
                has = f"it has {result.full_pages} of {len(slots)} pages"
                restore.fault = f"{peer.instance}: {result.error or has}"
        finally:
            self._staging.give_back(slots[len(restore.slots) - first :])
