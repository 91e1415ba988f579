"""DistServe's own endpoint, `POST /generate`: the third form in which clients may ask. To engines it is a completion.

It answers as DistServe does (all text so far in every event; the prompt before the text of a whole answer), but for two
things: events are framed as server-sent events, where DistServe concatenates JSON; and what it would ignore is refused.
"""

from collections.abc import Callable, Sequence

import msgspec

from kvrs.errors import RequestError
from kvrs.protocol.openai import CompletionRequest
from kvrs.proxy.answers import WholeClient
from kvrs.proxy.clients import Client
from kvrs.proxy.forms import COMPLETIONS, Asked, read

PATH = "/generate"

# DistServe's sampling parameters mean what OpenAI's mean, and are checked as those are.
_SAMPLING = (
    *("n", "best_of", "presence_penalty", "frequency_penalty", "temperature", "top_p", "top_k", "use_beam_search"),
    *("stop", "ignore_eos", "max_tokens", "logprobs"),
)
_ALLOWED = ("prompt", "stream", *_SAMPLING)
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


class _Choice(msgspec.Struct):
    text: str = ""


class _Event(msgspec.Struct):
    choices: list[_Choice] = []


_EVENT = msgspec.json.Decoder(_Event)


def read_generate(body: bytes) -> Asked:
    """Check a body and make it a completion.

    Raises:
        RequestError: it is malformed, or asks for what has no place in the answer.
    """
    try:
        fields = _FIELDS.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None
    if unknown := sorted(fields.keys() - set(_ALLOWED)):
        raise RequestError(f"{unknown[0]!r:.80} is not known; allowed: {', '.join(_ALLOWED)}", param=unknown[0][:80])
    # DistServe decodes greedily, whatever its default says.
    fields.setdefault("temperature", msgspec.Raw(b"0"))
    asked = read(COMPLETIONS, msgspec.json.encode(fields))
    assert isinstance(asked.request, CompletionRequest)
    if not isinstance(asked.request.prompt, str):
        raise RequestError("prompt must be a string", param="prompt")
    if asked.request.n != 1:
        raise RequestError(f"n must be 1, got {asked.request.n}: the answer has one text", param="n")
    if asked.request.logprobs is not None:
        raise RequestError("logprobs is not supported: the answer has no place for them", param="logprobs")
    return asked


def _text_of(event: bytes) -> str:
    return "".join(choice.text for choice in _EVENT.decode(event).choices)


class GenerateClient:
    """Passes a stream on in DistServe's words: every event has all text so far."""

    def __init__(self, inner: Client) -> None:
        self._inner = inner
        self._text = ""

    @property
    def blocked(self) -> bool:
        return self._inner.blocked

    async def send(self, events: Sequence[bytes]) -> None:
        said: list[bytes] = []
        for event in events:
            self._text += _text_of(event)
            said.append(msgspec.json.encode({"text": self._text}))
        await self._inner.send(said)


class WholeGenerateClient(WholeClient):
    """Gathers a whole answer, and when its parts came."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self._clock = clock
        self._text = ""
        self._timestamps: list[float] = []

    async def send(self, events: Sequence[bytes]) -> None:
        self._text += "".join(map(_text_of, events))
        self._timestamps += [self._clock()] * len(events)

    def answer(self, asked: Asked) -> bytes:
        """DistServe's: `timestamps` are on the proxy's clock, one per event; of the engine's own events nothing is known."""
        assert isinstance(asked.request, CompletionRequest)
        return msgspec.json.encode(
            {"text": f"{asked.request.prompt}{self._text}", "timestamps": self._timestamps, "lifetime_events": []}
        )
