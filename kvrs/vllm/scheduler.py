"""The connector in vLLM's scheduler: which pages are copied out of blocks and into them, and when a
request may start.

A load is staged: pages are fetched and verified before vLLM is promised any, and exactly those are
promised. So no load of vLLM waits for a peer, and none fails. Nothing here waits; all calls come
from vLLM's thread, and what has to do with sockets is the page port's.

vLLM loads only behind its own prefix cache. So what lies before the first page that is fetched is
computed by another request of the same attempt, the front, which neither loads nor saves. A request
waits as long as its front lives, `deadline_s` for the front to come, and `deadline_s` for pages
alone: before its front is there, they hold nothing up.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvrs.errors import RequestError
from kvrs.ids import StreamId
from kvrs.protocol.connector import unseal
from kvrs.protocol.instance import CheckpointTarget
from kvrs.protocol.tags import Tag, next_tag, page_tags, root_tag
from kvrs.vllm.ended import EndedStreams
from kvrs.vllm.staging import StagingPlace
from kvrs.vllm.tracked import CopyRequest, FilledPages, LiveRequest, Restore, SavedStream

log = logging.getLogger(__name__)


@dataclass(slots=True)
class WorkerStep:
    """Copies that workers make beside one step of vLLM; each one is pickled for them."""

    place: StagingPlace | None = None  # None: there is nothing to copy.
    saves: list[tuple[int, list[tuple[int, int]]]] = field(default_factory=list)  # By job.
    loads: list[tuple[str, list[tuple[int, int]]]] = field(default_factory=list)  # By request.


@dataclass(slots=True)
class Done:
    """Answers of workers: how many of them have done each job, and each load."""

    saves: dict[int, int] = field(default_factory=dict)
    loads: dict[str, int] = field(default_factory=dict)
    off_reason: str | None = None  # A worker does nothing any more.

    def add(self, other: "Done") -> None:
        """Add the answers of another worker."""
        for job, count in other.saves.items():
            self.saves[job] = self.saves.get(job, 0) + count
        for request_id, count in other.loads.items():
            self.loads[request_id] = self.loads.get(request_id, 0) + count
        self.off_reason = self.off_reason or other.off_reason


class Port(Protocol):
    """The page port; its methods may be called in any thread and return at once."""

    def fetch(self, restore: Restore) -> None:
        """Fill the slots of a restore."""

    def release(self, restore: Restore) -> None:
        """Its slots are not used any more; what is still being fetched is ended."""

    def settled(
        self, restore: Restore, loaded_tokens: int, computed_tokens: int, fault: str
    ) -> None:
        """So many tokens of the history were copied into blocks, and so many are computed, for this
        reason.
        """

    def follow(
        self, saved: SavedStream, checkpoints: Sequence[CheckpointTarget], *, handed_over: bool
    ) -> None:
        """Bring the pages of a stream to these agents. `handed_over`: the instance that computed
        its history sends the pages of that.
        """

    def filled(self, fills: Sequence[FilledPages]) -> None:
        """Streams have further full pages."""

    def copied(self, copies: Sequence[tuple[CopyRequest, int]]) -> None:
        """These copies were made: so many leading pages of each."""

    def ended(self, saved: SavedStream, *, send_rest: bool) -> None:
        """Nothing more is computed for it. What was not sent is forgotten, or with `send_rest`
        goes on being sent.
        """

    def is_sent(self, saved: SavedStream) -> bool:
        """It has ended, and nothing of it waits to be sent."""

    def is_fenced(self, stream: StreamId, attempt: tuple[int, int]) -> bool:
        """A higher attempt at the stream was announced."""


_Attempt = tuple[StreamId, tuple[int, int]]


@dataclass(slots=True, eq=False)
class _Tracked:
    request: LiveRequest
    tags: list[Tag]
    root: Tag
    saved: SavedStream | None
    restore: Restore | None
    front_of: _Attempt | None  # It may be the front of that one.
    has_front: bool = False  # A front has been seen.
    full_pages: int = 0
    local_tokens: int = 0  # Of vLLM's own prefix cache, at the last look.
    fault: str = ""  # Why what had come by then, or nothing, is loaded.
    loading: list[tuple[int, int]] | None = None  # Slots and blocks, while workers copy.
    loading_ranks: int = 0  # Workers that have not answered for it.


class SchedulerSide:
    """One per engine core. `ranks`: workers that answer for each job; `max_saved`: pages that they
    copy out of blocks beside one step.
    """

    def __init__(
        self,
        port: Port,
        place: StagingPlace,
        fingerprint: str,
        page_size_tokens: int,
        keys: Sequence[bytes],
        *,
        ranks: int,
        deadline_s: float,
        clock: Callable[[], float],
        max_pinned: int,
        max_saved: int,
    ) -> None:
        self.ended = EndedStreams(port.is_sent, max_pinned, clock)
        self.requested: deque[CopyRequest] = deque()  # The port appends to it.
        self._port, self._place = port, place
        self._fingerprint, self._page, self._keys = fingerprint, page_size_tokens, keys
        self._ranks, self._deadline_s, self._clock = ranks, deadline_s, clock
        self._max_saved = max_saved
        self._tracked: dict[str, _Tracked] = {}
        self._fronts: set[_Attempt] = set()
        self._loads: list[tuple[str, list[tuple[int, int]]]] = []
        self._jobs: dict[int, tuple[CopyRequest, int, int]] = {}  # Pages, and ranks to come.
        self._job = 0

    @property
    def has_work(self) -> bool:
        """Copies wait for a step, or workers' answers do, though no request may be left that needs
        one.
        """
        return bool(self.requested) or bool(self.ended) or bool(self._jobs)

    def arrived(
        self, request: LiveRequest, sealed: object, salt: str, *, handed_over: bool = False
    ) -> None:
        """A request has come with `kv_transfer_params.kvrs`. `handed_over`: with a hand-off of a
        prefill instance, too.

        Raises:
            RequestError: the parameters are not of a proxy of the cluster, or wrong.
        """
        params = unseal(sealed, self._keys)
        attempt = (params.owner_epoch, params.attempt)
        if self._port.is_fenced(params.stream, attempt):
            raise RequestError(f"stream {params.stream}: a higher attempt was announced")
        root = root_tag(self._fingerprint, salt)
        tags = page_tags(root, request.all_token_ids, self._page)
        restore = saved = None
        if params.sources and tags:
            restore = Restore(
                params.stream,
                attempt,
                tags,
                params.sources,
                self._clock() + self._deadline_s,
                params.sources[0].first_page,
                params.slot_token,
            )
            self._port.fetch(restore)
        if params.checkpoints:
            saved = SavedStream(
                request.request_id, params.stream, attempt, [*tags], request.num_tokens
            )
            self._port.follow(saved, params.checkpoints, handed_over=handed_over)
        front_of = None
        if not params.sources and not params.checkpoints:
            front_of = params.stream, attempt
            self._fronts.add(front_of)
        self._tracked[request.request_id] = _Tracked(request, tags, root, saved, restore, front_of)

    def match(self, request_id: str, computed_tokens: int) -> int | None:
        """Tokens that can be loaded behind those; None: not known yet."""
        tracked = self._tracked.get(request_id)
        if tracked is None or (restore := tracked.restore) is None or tracked.loading is not None:
            return 0
        tracked.local_tokens = computed_tokens
        if computed_tokens < restore.first_page * self._page:
            if self._front_may_come(tracked, restore):
                return None
            tracked.fault = "its front is not there"
        elif not restore.is_over and self._clock() < restore.deadline_s:
            return None
        else:
            if not restore.is_over:
                tracked.fault = f"no more had come after {self._deadline_s:g} s"
            end_page = restore.first_page + len(restore.slots)
            # At least one token is computed: its logits are the next token's.
            end_page = min(end_page, (tracked.request.num_tokens - 1) // self._page)
            if (found := end_page * self._page - computed_tokens) > 0:
                return found
        self._settle(tracked, 0)
        return 0

    def _front_may_come(self, tracked: _Tracked, restore: Restore) -> bool:
        """The pages before those of a restore may still get into vLLM's prefix cache."""
        now_s = self._clock()
        if (restore.stream, restore.attempt) in self._fronts:
            tracked.has_front = True
            # Only behind it the stream waits for pages alone.
            restore.deadline_s = now_s + self._deadline_s
            return True
        return not tracked.has_front and now_s < restore.deadline_s

    def allocated(self, request_id: str, block_ids: Sequence[int], external_tokens: int) -> None:
        """Blocks were allocated; so many tokens are to be loaded into them."""
        tracked = self._tracked.get(request_id)
        if tracked is None or (restore := tracked.restore) is None or tracked.loading is not None:
            return
        if not external_tokens:
            tracked.fault = "vLLM had no use for it"
            self._settle(tracked, 0)
            return
        first = tracked.local_tokens // self._page
        pages = range(first, first + external_tokens // self._page)
        tracked.loading = [
            (restore.slots[page - restore.first_page], block_ids[page]) for page in pages
        ]
        tracked.loading_ranks = self._ranks
        self._loads.append((request_id, tracked.loading))

    def step(
        self, scheduled: Mapping[str, int], blocks_of: Callable[[str], Sequence[int]]
    ) -> WorkerStep:
        """Copies beside the step that computes so many tokens of each request."""
        step = WorkerStep(loads=self._loads)
        self._loads = []
        known, fills, missed = dict[str, int](), list[FilledPages](), list[CopyRequest]()
        for request_id, tokens in scheduled.items():
            tracked = self._tracked.get(request_id)
            if tracked is not None and tracked.saved is not None:
                known[request_id] = self._fill(tracked, tracked.saved, tokens, fills)
        room = self._max_saved
        for _ in range(len(self.requested)):
            copy = self.requested.popleft()
            blocks = self._blocks_for(copy, known, blocks_of)
            if blocks is None or (blocks and not room):
                self.requested.append(copy)
                continue
            if not blocks:
                missed.append(copy)
                continue
            blocks = blocks[:room]  # The port asks for the others again.
            room -= len(blocks)
            self._job += 1
            self._jobs[self._job] = (copy, len(blocks), self._ranks)
            step.saves.append((self._job, [*zip(copy.slots, blocks, strict=False)]))
        if step.loads or step.saves:
            step.place = self._place
        # Each call wakes the port's thread.
        if fills:
            self._port.filled(fills)
        self._give_up(missed)
        for saved in self.ended.release():
            self._port.ended(saved, send_rest=False)
        return step

    def _blocks_for(
        self,
        copy: CopyRequest,
        known: Mapping[str, int],
        blocks_of: Callable[[str], Sequence[int]],
    ) -> Sequence[int] | None:
        """The blocks of the leading pages of a copy; None: of a request that is not in this step.
        `known`: full pages of those that are.
        """
        first, end = copy.first_page, copy.first_page + len(copy.slots)
        if (pages := known.get(copy.request_id)) is not None:
            return blocks_of(copy.request_id)[:pages][first:end]
        tracked = self._tracked.get(copy.request_id)
        if tracked is None:
            return self.ended.blocks(copy.request_id, first, end)
        if tracked.request.num_computed_tokens:
            return None
        # vLLM has preempted it, and it may wait for long. Once it has pages again, they are sent.
        tracked.full_pages = 0
        return []

    def done(self, done: Done) -> None:
        """Workers have answered."""
        copied = []
        for job, count in done.saves.items():
            copy, pages, ranks = self._jobs.pop(job)
            if ranks > count:
                self._jobs[job] = (copy, pages, ranks - count)
            else:
                copied.append((copy, pages))
        if copied:
            self._port.copied(copied)
        for request_id, count in done.loads.items():
            tracked = self._tracked.get(request_id)
            if tracked is None or tracked.loading is None:
                continue
            tracked.loading_ranks -= count
            # Until the last worker has answered it may read the slots.
            if not tracked.loading_ranks:
                # A worker that turns itself off answers for a load that it has not made.
                tracked.fault = tracked.fault or done.off_reason or ""
                pages = len(tracked.loading) if done.off_reason is None else 0
                tracked.loading = None
                self._settle(tracked, pages)

    def finished(
        self, request_id: str, block_ids: Sequence[int] = (), *, send_rest: bool = False
    ) -> None:
        """Nothing more is computed for a request, which has these blocks until this returns. With
        `send_rest` its pages go on being saved: another instance continues its stream.
        """
        tracked = self._tracked.pop(request_id, None)
        if tracked is None:
            return
        if tracked.front_of is not None:
            self._fronts.discard(tracked.front_of)
        if (saved := tracked.saved) is not None:
            send_rest = send_rest and self.ended.add(saved, block_ids[: tracked.full_pages])
            self._port.ended(saved, send_rest=send_rest)
        # Workers may still copy out of the slots of a load, into blocks that are not read again.
        self._drop_restore(tracked)
        if not send_rest:
            self._give_up([*self._take_requested(request_id)])

    def close(self) -> None:
        """The engine ends, or the connector is off: nothing waits any more."""
        for request_id, tracked in [*self._tracked.items()]:
            if tracked.loading is not None:
                # Workers may copy out of its slots, and its request goes on with what they load.
                tracked.restore = None
            self.finished(request_id)
        for saved in self.ended.release(everything=True):
            self._port.ended(saved, send_rest=False)
        copies = [copy for copy, _, _ in self._jobs.values()]
        while self.requested:
            copies.append(self.requested.popleft())
        self._give_up(copies)
        self._jobs.clear()

    def _take_requested(self, request_id: str) -> Iterator[CopyRequest]:
        """Copies that are asked for and were not begun. The port's thread goes on appending, so
        none is looked at before it was taken out.
        """
        for _ in range(len(self.requested)):
            copy = self.requested.popleft()
            if copy.request_id == request_id:
                yield copy
            else:
                self.requested.append(copy)

    def _give_up(self, copies: Sequence[CopyRequest]) -> None:
        if copies:
            self._port.copied([(copy, 0) for copy in copies])

    def _fill(
        self, tracked: _Tracked, saved: SavedStream, tokens: int, fills: list[FilledPages]
    ) -> int:
        """Add new full pages to `fills`; return how many there are after the step.

        Of asynchronous scheduling the newest token is known a step later; drafts never count.
        """
        request, page = tracked.request, self._page
        computed = min(request.num_computed_tokens + tokens, request.num_tokens)
        full = computed // page
        if full > tracked.full_pages:
            tags, known = tracked.tags, len(tracked.tags)
            for index in range(known, full):
                ids = request.all_token_ids[index * page : (index + 1) * page]
                tags.append(next_tag(tags[-1] if tags else tracked.root, ids))
            tracked.full_pages = full
            fills.append(FilledPages(saved, tags[known:], full * page))
        return full

    def _settle(self, tracked: _Tracked, loaded_pages: int) -> None:
        if (restore := tracked.restore) is not None:
            loaded = loaded_pages * self._page
            rest = tracked.request.num_tokens - tracked.local_tokens - loaded
            self._port.settled(restore, loaded, rest, tracked.fault or restore.fault)
        self._drop_restore(tracked)

    def _drop_restore(self, tracked: _Tracked) -> None:
        if tracked.restore is not None:
            restore, tracked.restore = tracked.restore, None
            self._port.release(restore)
