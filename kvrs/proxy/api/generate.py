"""DistServe's own endpoint, `POST /generate`. To engines its requests are completions.

Responses are DistServe's (all text so far in every event; the prompt before the text of a whole
response) with two differences: events are framed as server-sent events, where DistServe
concatenates JSON; and fields that DistServe ignores are refused.
"""

from collections.abc import Callable, Sequence

import msgspec

from kvrs.errors import RequestError, UnknownFieldError
from kvrs.protocol.openai.chunks import CHUNK
from kvrs.protocol.openai.fields import EMBEDDED
from kvrs.protocol.openai.requests import CompletionRequest, decode_as
from kvrs.protocol.openai.structure import MAX_ELEMENTS
from kvrs.proxy.streams.clients import Client
from kvrs.proxy.streams.responses import WholeClient
from kvrs.proxy.wire.requests import COMPLETIONS, ParsedRequest, read

PATH = "/generate"

# DistServe's sampling parameters mean what OpenAI's mean, and are checked as those are.
_SAMPLING = (
    *("n", "best_of", "presence_penalty", "frequency_penalty", "temperature", "top_p", "top_k"),
    *("use_beam_search", "stop", "ignore_eos", "max_tokens", "logprobs"),
)
ALLOWED = ("prompt", "stream", *_SAMPLING)
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


def read_generate(
    body: bytes, backend: str = EMBEDDED, max_elements: int = MAX_ELEMENTS
) -> ParsedRequest:
    """Check a body and convert it to a completion.

    Raises:
        RequestError: it is malformed, or has a field that the response has no place for.
    """
    fields = decode_as(_FIELDS, body)
    if unknown := sorted(fields.keys() - set(ALLOWED)):
        raise UnknownFieldError(unknown[0], ALLOWED)
    # DistServe decodes greedily, whatever its default says.
    if bytes(fields.get("temperature", b"null")) == b"null":
        fields["temperature"] = msgspec.Raw(b"0")
    parsed = read(COMPLETIONS, msgspec.json.encode(fields), backend, max_elements)
    assert isinstance(parsed.request, CompletionRequest)
    if parsed.more or not isinstance(parsed.request.prompt, str):
        raise RequestError("prompt must be a string", param="prompt")
    if parsed.request.n != 1:
        raise RequestError(
            f"n must be 1, got {parsed.request.n}: the answer has one text", param="n"
        )
    if parsed.request.logprobs is not None:
        raise RequestError(
            "logprobs is not supported: the answer has no place for them", param="logprobs"
        )
    return parsed


def _text_of(event: bytes) -> str:
    return "".join(choice.text for choice in CHUNK.decode(event).choices or ())


class GenerateClient:
    """Converts the events of a stream to DistServe's form, in which each has all text so far."""

    direct = None
    take_token = None

    def __init__(self, inner: Client) -> None:
        self._inner = inner
        self._text = ""

    @property
    def blocked(self) -> bool:
        return self._inner.blocked

    def when_free(self, resume: Callable[[], None]) -> None:
        self._inner.when_free(resume)

    def send(self, events: Sequence[bytes]) -> None:
        converted: list[bytes] = []
        for event in events:
            self._text += _text_of(event)
            converted.append(msgspec.json.encode({"text": self._text}))
        self._inner.send(converted)


class WholeGenerateClient(WholeClient):
    """Gathers a whole response, and the times of its events."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self._clock = clock
        self._text = ""
        self._timestamps: list[float] = []

    def send(self, events: Sequence[bytes]) -> None:
        self._text += "".join(map(_text_of, events))
        self._timestamps += [self._clock()] * len(events)

    def answer(self, prompt: str) -> bytes:
        """DistServe's: `timestamps` are on the proxy's clock, one per event; of the engine's own
        events nothing is known.
        """
        return msgspec.json.encode(
            {
                "text": f"{prompt}{self._text}",
                "timestamps": self._timestamps,
                "lifetime_events": [],
            }
        )
