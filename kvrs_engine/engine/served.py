"""The interface between an instance of any engine and its HTTP routes."""

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from kvrs.errors import RequestError
from kvrs.ids import StreamId
from kvrs.net import http
from kvrs.net.http import News
from kvrs.net.routes import Request, Response
from kvrs.profiles.tables import PrefillTable
from kvrs.protocol.geometry import KvGeometry
from kvrs.protocol.instance import (
    Capability,
    InstanceInfo,
    LoadReport,
    MeasuredPrefill,
    RankRequest,
    ReloadNotice,
)
from kvrs.protocol.openai.requests import ChatRequest, CompletionRequest
from kvrs.protocol.pages import Tag, root_tag
from kvrs.text.output import TokenPieces
from kvrs.transfer.limiter import SendingFaults
from kvrs_engine.engine.chat import ChatTemplate
from kvrs_engine.engine.page_port import InstancePlace, PagePort
from kvrs_engine.engine.requests import Vocabulary
from kvrs_engine.engine.runs import Attempt, RunCore
from kvrs_engine.scheduling.pages import PageManager


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The facts about a served model that clients and peers see."""

    name: str
    vocabulary: Vocabulary
    pieces: TokenPieces
    chat_template: ChatTemplate | None
    fingerprint: str
    geometry: KvGeometry
    max_model_len: int


class ServedInstance(ABC):
    """An instance that serves requests over HTTP. `start` needs a running event loop."""

    def __init__(self, place: InstancePlace, model: ServedModel) -> None:
        self.settings, self.ring = place.settings, [place.secret, *place.older]
        self.security = place.config.security
        self.model, self.vocabulary, self.pieces = model.name, model.vocabulary, model.pieces
        self.chat_template, self.max_model_len = model.chat_template, model.max_model_len
        # A stream may come without an earlier prefill call; its first event then has the prompt's
        # token ids.
        self.one_call = False
        self.port = PagePort(place, model.fingerprint, model.geometry)
        self.registry = self.port.registry
        self.tasks: list[asyncio.Task[None]] = []  # None of them ends by itself.
        self.news = News()  # Requests load reports at once.
        self._place, self._model = place, model

    @property
    @abstractmethod
    def core(self) -> RunCore: ...

    @property
    @abstractmethod
    def pages(self) -> PageManager: ...

    @property
    def epoch(self) -> int:
        return self.port.epoch

    @property
    def faults(self) -> SendingFaults:
        """The faults to inject into the instance's transfers."""
        return self.port.server.faults

    def root(self, cache_salt: str) -> Tag:
        """Return the root tag of one tenant's pages."""
        return root_tag(self._model.fingerprint, cache_salt)

    def refuse(self, asked: CompletionRequest | ChatRequest) -> None:  # noqa: B027  # Optional.
        """Check a request; raises RequestError if this engine does not support it."""

    def fence(self, attempts: Mapping[StreamId, Attempt]) -> None:
        """Drop lower attempts and raise the epoch, so that peers forget this instance's pages."""
        self.core.fence(attempts)
        self.port.epoch += 1

    def end_transfers(self, attempts: Mapping[StreamId, Attempt]) -> None:
        """Drop lower attempts that still fetch under a transfer slot, and refuse such attempts from
        now on.
        """
        self.core.end_transfers(attempts)

    def lose_device(self, rank: int | None) -> None:
        """Kill a rank, or the only process (None), and drop the memory of its KV, as a fault of an
        experiment.

        Raises:
            RequestError: the instance has no such rank, or no such memory.
        """
        raise RequestError(f"rank: got {rank}; this engine has no device to lose", param="rank")

    async def order_rank(self, order: RankRequest) -> str | None:
        """Let a rank leave or come back; return the reason of a refusal, or None."""
        return f"rank: got {order.rank}; allowed: none, the instance is one process"

    # Optional: only instances with a source of drafts use notices.
    def reloading(self, notice: ReloadNotice) -> None:  # noqa: B027
        """Handle the notice of another instance that is restarting."""

    async def draft_helper(self, request: Request) -> Response:
        """Serve the connection of an instance that drafts tokens for this one."""
        return http.error(404, "drafts are not verified here", kind="invalid_request_error")

    def down(self) -> str | None:
        """The reason why the instance cannot serve now; None: it can."""
        return None

    @abstractmethod
    def info(self) -> InstanceInfo: ...

    @abstractmethod
    def load(self) -> LoadReport: ...

    @abstractmethod
    async def start(self) -> None:
        """Start to serve pages and to compute; the caller starts the HTTP server."""

    def failed(self) -> BaseException | None:
        """Return the exception that ended a task, if any; the instance must then stop serving."""
        ended = (task for task in self._running() if task.done() and not task.cancelled())
        return next((task.exception() for task in ended), None)

    async def close(self) -> None:
        running = self._running()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self.port.close()

    def _running(self) -> list[asyncio.Task[None]]:
        """Return all tasks that must not end before `close`."""
        return self.tasks

    def _describe(
        self, prefill: PrefillTable, capabilities: list[Capability], gpus: list[str] | None
    ) -> InstanceInfo:
        return InstanceInfo(
            id=self.settings.id,
            node=self._place.node.id,
            role=self.settings.role,
            epoch=self.epoch,
            pid=os.getpid(),
            model=self.model,
            fingerprint=self._model.fingerprint,
            geometry=self._model.geometry,
            max_model_len=self.max_model_len,
            page_port=self.settings.page_port,
            capabilities=capabilities,
            prefill=MeasuredPrefill(
                label=prefill.label,
                step_tokens=prefill.step_tokens,
                seconds=list(prefill.seconds),
                covered_tokens=prefill.covered_to_tokens,
            ),
            gpus=gpus,
            step_tokens=self._place.config.cluster.engine.max_batch_tokens,
        )
