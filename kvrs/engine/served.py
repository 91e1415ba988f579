"""What the HTTP face needs of an instance, whichever engine computes behind it."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from kvrs.config import InstanceSettings
from kvrs.engine.chat import ChatTemplate
from kvrs.engine.fencing import Attempt
from kvrs.engine.requests import Model, Run
from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.instance import InstanceInfo, LoadReport
from kvrs.protocol.openai import ChatRequest, CompletionRequest
from kvrs.protocol.tags import Tag
from kvrs.scheduling.pages import PageManager
from kvrs.text.pieces import TokenPieces
from kvrs.transfer.faults import SendingFaults
from kvrs.transfer.peers import Peer

# Within one start of the process an instance's epoch rises with every fence, and where a stage can come back with its lives.
EPOCHS_PER_START = 1 << 20


class Runs(Protocol):
    """Who works on runs. All calls come from the event loop."""

    def submit(self, run: Run) -> None:
        """Begin a run; a lower attempt at the same stream is over from now on. Raises FencedError."""

    def abort(self, run: Run) -> None:
        """Forget a run; nothing happens if it has ended."""


class ServedInstance(Protocol):
    """One instance of the configuration."""

    secret: bytes
    older: Sequence[bytes]  # Secrets that are accepted beside it.
    model: str
    served: Model
    pieces: TokenPieces
    chat_template: ChatTemplate | None
    max_model_len: int
    registry: dict[InstanceId, Peer]
    settings: InstanceSettings
    # A stream may come without a prefill call before, so its first event names the prompt's ids.
    one_call: bool

    @property
    def core(self) -> Runs: ...

    @property
    def pages(self) -> PageManager: ...

    @property
    def faults(self) -> SendingFaults:
        """What may be done on purpose to all that it sends."""

    def root(self, cache_salt: str) -> Tag:
        """The tag from which all pages of one tenant are chained."""

    def info(self) -> InstanceInfo: ...
    def load(self) -> LoadReport: ...

    def refuse(self, asked: CompletionRequest | ChatRequest) -> None:
        """Raises RequestError: this engine cannot do what is asked."""

    def fence(self, attempts: Mapping[StreamId, Attempt]) -> None:
        """Drop lower attempts, and raise the epoch."""

    def end_transfers(self, attempts: Mapping[StreamId, Attempt]) -> None:
        """Drop lower attempts that still fetch under a slot, and refuse such from now on; nothing else changes."""

    def down(self) -> str | None:
        """Why it cannot serve now, though its process lives."""

    def failed(self) -> BaseException | None:
        """The bug that ended its work: it must not look alive any more."""

    async def start(self) -> None:
        """Serve pages and begin to compute."""

    async def close(self) -> None: ...
