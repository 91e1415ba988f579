"""A stage of an instance in a host, as the instance's process sees it."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from kvrs.config.engine import EngineSettings
from kvrs.elastic.layouts import Layout
from kvrs.engine.layers.tiles import padded_rows
from kvrs.engine.model_config import ModelConfig
from kvrs.engine.ranks.cells import of_layers
from kvrs.engine.ranks.link import (
    VERSION,
    WORDS,
    Begin,
    ComputeStage,
    EndRank,
    FromStage,
    PagesDone,
    ReadPages,
    StageChannel,
    StageComputed,
    StageComputing,
    StageLink,
    StageLost,
    StageReady,
    StageRefused,
    ToStage,
    WritePages,
    most_page_payload,
    page_groups,
)
from kvrs.engine.ranks.sessions import StageRefusedError
from kvrs.engine.ranks.wire import batch_of
from kvrs.engine.worker import geometry_of
from kvrs.errors import KvrsError, RanksLostError, TransferError
from kvrs.names import first_address
from kvrs.scheduling.sequences import Chunk
from kvrs.transfer.handshake import PeerRefusedError, introduce
from kvrs.transfer.peers import Identity, Peer
from kvrs.transfer.stream import SocketStream, page_socket

# A host starts with its instance, and loads as much.
HOST_WAIT_S = 100.0
_AGAIN_S = 0.1
# For the way of a batch and its answer, beside the time that it may be computed.
_ON_THE_WAY_S = 0.25
_FLOAT_BYTES = 4

Result = TypeVar("Result")
Answer = TypeVar("Answer", StageReady, PagesDone)


@dataclass(frozen=True, slots=True)
class StageAt:
    """Where a stage is, and what opens it."""

    peer: Peer
    own: Identity  # Its epoch is that of the sessions.
    key: bytes
    stall_timeout_s: float
    wait_s: float = HOST_WAIT_S


class RemoteStage:
    """A `StageGroup`. Its connections belong to an event loop in a thread of its own: batches come
    from threads that compute, one at a time, pages from the instance's loop.
    """

    def __init__(
        self,
        at: StageAt,
        config: ModelConfig,
        settings: EngineSettings,
        layout: Layout,
        stage: int,
    ) -> None:
        """Connect, and wait until the host of the stage has loaded it.

        Raises:
            KvrsError: it refuses, or does not answer.
        """
        geometry = geometry_of(config, settings)
        self._at = at
        self.stages = range(stage, stage + 1)
        self.layers = layout.layers(self.stages)
        self.ranks = layout.stages[stage].ranks
        # Floats of what the stage answers for each row, or where it is the last for each that is
        # sampled from.
        self._is_last = stage + 1 == len(layout.stages)
        self._width = config.vocab if self._is_last else config.hidden
        self._most_rows = padded_rows(settings.max_batch_tokens)
        self._page_size_tokens = geometry.page_size_tokens
        self._part_bytes = of_layers(geometry, self.layers).page_bytes
        self.on_end: Callable[[RanksLostError], object] | None = None
        self._batch = 0
        self._answer: asyncio.Future[Tensor | None] | None = None  # None: it is lost.
        self._answer_bytes = 0
        self._is_heard = False  # Since the last look at it.
        self._links: list[StageLink] = []
        self._session = 0, 0  # Its number and its epoch, which every order names.
        self._listening: asyncio.Task[None] | None = None
        self._error: RanksLostError | None = None
        self._asking = asyncio.Lock()
        self._computing = threading.Lock()
        self._is_closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="stage", daemon=True)
        self._thread.start()
        try:
            self.ready = self._call(self._open()).result()
        except BaseException:
            self.close()
            raise

    def execute(self, chunks: Sequence[Chunk], rows: Tensor | None, limit_s: float) -> Tensor:
        count = (
            sum(chunk.logits for chunk in chunks)
            if self._is_last
            else padded_rows(sum(len(chunk.token_ids) for chunk in chunks))
        )
        with self._computing:
            self._answer_bytes = count * self._width * _FLOAT_BYTES
            found = self._call(self._execute(chunks, rows, limit_s)).result()
        return found.view(torch.float32).view(count, self._width)

    async def read(self, pages: Sequence[int]) -> Tensor:
        return await asyncio.wrap_future(self._call(self._read(pages)))

    async def write(self, pages: Sequence[int], parts: Tensor) -> None:
        await asyncio.wrap_future(self._call(self._write(pages, parts)))

    def kill_rank(self, rank: int) -> None:
        self._call(self._ask(EndRank(*self._session, rank), None, 0))

    def end(self) -> None:
        if not self._is_closed:
            self._loop.call_soon_threadsafe(self._give_up)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._call(self._shut()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # In the loop.

    def _call(self, work: Coroutine[Any, Any, Result]) -> "Future[Result]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _open(self) -> StageReady:
        until_s = time.monotonic() + self._at.wait_s
        peer = self._at.peer
        where = f"stage {self.stages.start} on node {peer.node!r} ({peer.host}:{peer.port})"
        while True:
            try:
                return await self._begin()
            except PeerRefusedError as error:
                raise KvrsError(
                    f"{where}: {error}; allowed: the same secret, model, engine settings and "
                    f"stages at both"
                ) from None
            except StageRefusedError as error:
                raise KvrsError(f"{where}: {error}") from None
            except (OSError, TransferError) as error:
                if time.monotonic() > until_s:
                    raise KvrsError(f"{where} cannot be used: {error}") from None
                await asyncio.sleep(_AGAIN_S)

    async def _begin(self) -> StageReady:
        max_bytes = self._most_rows * self._width * _FLOAT_BYTES
        links: list[StageLink] = []
        try:
            ready: StageReady = await self._link(
                links, Begin(VERSION, StageChannel.BATCHES), max_bytes, StageReady
            )
            begin = Begin(VERSION, StageChannel.PAGES, ready.session)
            await self._link(links, begin, most_page_payload(self._part_bytes), PagesDone)
        except BaseException:
            for link in links:
                link.stream.close()
            raise
        self._batches, self._pages = self._links = links
        self._session = ready.session, self._at.own.epoch
        self._listening = self._loop.create_task(self._listen())
        return ready

    async def _link(
        self, links: list[StageLink], begin: Begin, most_payload_bytes: int, kind: type[Answer]
    ) -> Answer:
        """Open one more link; its first answer, of that kind."""
        at = self._at
        peer = replace(at.peer, host=await first_address(at.peer.host))
        sock = page_socket(peer.host)
        stream = SocketStream(sock, at.stall_timeout_s)
        try:
            async with asyncio.timeout(at.stall_timeout_s):
                await self._loop.sock_connect(sock, (peer.host, peer.port))
                await introduce(stream, at.key, at.own, peer)
        except BaseException:
            stream.close()
            raise
        link = StageLink(stream, FromStage, most_payload_bytes)
        links.append(link)
        await link.send(begin)
        # The host answers once the session before has ended.
        answer, _ = await link.receive(at.stall_timeout_s)
        if isinstance(answer, StageRefused):
            raise StageRefusedError(answer.reason)
        if not isinstance(answer, kind):
            raise TransferError(f"a message out of turn: {type(answer).__name__}")
        return answer

    async def _listen(self) -> None:
        """Receive messages that come at any time: results, and the end."""
        try:
            while True:
                message, payload = await self._batches.receive()
                match message:
                    case StageComputing(batch=batch):
                        if self._answer is None or self._answer.done() or batch != self._batch:
                            raise TransferError(f"word of batch {batch} out of turn")
                        self._is_heard = True
                    case StageComputed(batch=batch):
                        if self._answer is None or self._answer.done() or batch != self._batch:
                            raise TransferError(f"a result of batch {batch} out of turn")
                        if len(payload) != self._answer_bytes:
                            raise TransferError(
                                f"a result of {len(payload)} bytes; allowed: {self._answer_bytes}"
                            )
                        self._answer.set_result(payload)
                    case StageLost(ranks=ranks, reason=reason):
                        self._lost(ranks, reason)
                        return
                    case StageRefused(reason=reason):
                        self._lost(self.ranks, f"is refused by its host: {reason}")
                        return
                    case _:
                        raise TransferError(f"a message out of turn: {type(message).__name__}")
        except TransferError as error:
            self._lost(self.ranks, f"is lost with its node {self._at.peer.node}: {error}")

    async def _execute(
        self, chunks: Sequence[Chunk], rows: Tensor | None, limit_s: float
    ) -> Tensor:
        if self._error is not None:
            raise self._error
        self._batch += 1
        answer: asyncio.Future[Tensor | None] = self._loop.create_future()
        self._answer = answer
        wire = batch_of(0, self._batch, chunks, self._page_size_tokens)
        message = ComputeStage(*self._session, self._batch, wire.chunks, limit_s)
        silent_s = limit_s + _ON_THE_WAY_S
        try:
            async with asyncio.timeout(silent_s):
                await self._batches.send(message, rows)
            if (found := await self._answered(answer, silent_s)) is not None:
                return found
        except TimeoutError:
            self._lost(self.ranks, f"has not answered for {silent_s:.1f} s")
        except TransferError as error:
            self._lost(self.ranks, f"is lost with its node {self._at.peer.node}: {error}")
        assert self._error is not None, "it was lost now"
        raise self._error

    async def _answered(
        self, answer: "asyncio.Future[Tensor | None]", silent_s: float
    ) -> Tensor | None:
        """Raises TimeoutError: nothing is heard for so long."""
        looks = 0
        while not answer.done():
            self._is_heard = False
            await asyncio.wait({answer}, timeout=silent_s / WORDS)
            looks = 0 if self._is_heard else looks + 1
            if looks == WORDS and not answer.done():
                raise TimeoutError
        return answer.result()

    async def _read(self, pages: Sequence[int]) -> Tensor:
        parts = torch.empty(len(pages), self._part_bytes, dtype=torch.uint8)
        for group in page_groups(pages, self._part_bytes):
            wanted = [pages[place] for place in group]
            size = len(wanted) * self._part_bytes
            found = await self._ask(ReadPages(*self._session, wanted), None, size)
            parts[group.start : group.stop] = found.view(len(wanted), -1)
        return parts

    async def _write(self, pages: Sequence[int], parts: Tensor) -> None:
        for group in page_groups(pages, self._part_bytes):
            wanted = [pages[place] for place in group]
            own = parts[group.start : group.stop].contiguous()
            await self._ask(WritePages(*self._session, wanted), own, 0)

    async def _ask(self, message: ToStage, payload: Tensor | None, answer_bytes: int) -> Tensor:
        async with self._asking:
            if self._error is not None:
                raise TransferError(str(self._error))
            try:
                await self._pages.send(message, payload)
                found: Tensor
                answer, found = await self._pages.receive(self._at.stall_timeout_s)
                if isinstance(answer, StageRefused):
                    raise StageRefusedError(answer.reason)
                if not isinstance(answer, PagesDone) or len(found) != answer_bytes:
                    raise TransferError(f"{len(found)} bytes of pages; allowed: {answer_bytes}")
            except TransferError as error:
                self._lost(self.ranks, f"is lost with its node {self._at.peer.node}: {error}")
                raise
            return found

    def _lost(self, ranks: Sequence[int], reason: str) -> None:
        if self._error is not None:
            return
        self._error = RanksLostError(ranks, reason)
        self._give_up()
        if self.on_end is not None and not self._is_closed:
            self.on_end(self._error)

    def _give_up(self) -> None:
        self._error = self._error or RanksLostError(self.ranks, "has ended")
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(None)
        for link in self._links:
            link.stream.shut()

    async def _shut(self) -> None:
        self._give_up()
        if self._listening is not None:
            await self._listening
        async with self._asking:
            for link in self._links:
                link.stream.close()
