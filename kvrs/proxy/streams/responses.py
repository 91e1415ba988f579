"""Whole responses made from streams' events, for clients that do not stream."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from kvrs.errors import UndecodableError
from kvrs.protocol.openai.chunks import (
    EngineFacts,
    ReceivedChoice,
    ReceivedDelta,
    facts_together,
    usage_of,
    with_facts,
)
from kvrs.protocol.openai.decoding import UNREADABLE
from kvrs.protocol.openai.requests import ChatRequest
from kvrs.protocol.openai.translated import CallLog, chunk_of
from kvrs.protocol.token_ids import encode
from kvrs.proxy.streams.clients import Client
from kvrs.proxy.wire.journal import Journal
from kvrs.proxy.wire.requests import ParsedRequest


class _Head(msgspec.Struct):
    id: str
    created: int
    model: str


_HEAD = msgspec.json.Decoder(_Head)


class Parsers:
    """Parsers that engines were seen to use, beyond those that requests imply."""

    reasoning = False
    # The text behind a thought is that of its ids, as a complete answer has shown; None: not known.
    plain_answers: bool | None = None


class BeginsAgain(ABC):
    """A client that has nothing before the end of the answer, so that a recovery may make the
    request again.
    """

    @abstractmethod
    def begin_again(self) -> None:
        """Forget the events so far."""


class HeldBack(BeginsAgain):
    """Holds the events of a recorded stream back until its end, for a client that gets a whole
    answer: neither the client nor the record has any of it before.
    """

    blocked = False
    direct = None
    take_token = None

    def __init__(self, inner: Client, journal: Journal) -> None:
        self._inner = inner
        self._journal = journal
        self._events: list[bytes] = []

    def when_free(self, resume: Callable[[], None]) -> None:
        resume()

    def send(self, events: Sequence[bytes]) -> None:
        self._events += events
        if self._journal.finished:
            held, self._events = self._events, []
            self._inner.send(held)

    def begin_again(self) -> None:
        self._events.clear()
        if self._journal.marks is not None:
            self._journal.marks.clear()


class WholeClient(BeginsAgain):
    """Collects one choice of an unstreamed response. The engine streams the choice, so that it can
    recover too, or answers in one piece (`whole_answers.py`).
    """

    blocked = False
    direct = None
    take_token = None

    def when_free(self, resume: Callable[[], None]) -> None:
        resume()

    def __init__(self, parsers: Parsers | None = None) -> None:
        self._parsers = parsers or Parsers()
        self.begin_again()

    def begin_again(self) -> None:
        # The choice as the engine gave it in one piece; None: collected from events.
        self._whole: dict[str, Any] | None = None
        self._texts: list[str] = []
        self._reasoning: dict[str, list[str]] = {"reasoning_content": [], "reasoning": []}
        self._log = CallLog()
        self._logprobs: dict[str, list[msgspec.Raw]] | None = None

    def take_whole(self, choice: dict[str, Any]) -> None:
        """Take the choice in one piece, from an engine that was asked without a stream."""
        self._whole = choice

    def send(self, events: Sequence[bytes]) -> None:
        """Take events. Raises UndecodableError: one of them is no event of an answer."""
        for event in events:
            for choice in chunk_of(event).choices or ():
                self._take(choice)

    def choice(self, journal: Journal, index: int, echo: str | None) -> dict[str, Any]:
        """Return the finished choice, with its keys in the order of the embedded engine."""
        made: dict[str, Any]
        if self._whole is not None:
            return {"index": index, **self._whole}
        if isinstance(journal.parsed.request, ChatRequest):
            made = {"index": index, "message": self._message()}
        else:
            made = {"text": (echo or "") + "".join(self._texts), "index": index}
        made |= {
            "logprobs": self._logprobs,
            "finish_reason": journal.finish_reason,
            "stop_reason": journal.stop_reason,
        }
        if journal.wants_ids:
            if "text" in made:
                made["prompt_token_ids"] = journal.prompt_ids
            made["token_ids"] = journal.output_ids
        return made

    def _take(self, choice: ReceivedChoice) -> None:
        self._texts.append(choice.plain_text)
        if choice.is_parsed:
            self._take_parsed(choice.delta)
        try:
            lists = choice.logprob_lists()
        except UNREADABLE:
            raise UndecodableError("the engine sent malformed log probabilities") from None
        for name, values in lists.items():
            self._logprobs = self._logprobs or {}
            self._logprobs.setdefault(name, []).extend(values or ())

    def _take_parsed(self, delta: ReceivedDelta) -> None:
        for name, texts in self._reasoning.items():
            if text := getattr(delta, name):
                texts.append(text)
                self._parsers.reasoning = True
        for call in delta.tool_calls or ():
            self._log.take(call)

    def _message(self) -> dict[str, Any]:
        content, calls = "".join(self._texts), self._log.calls
        message: dict[str, Any] = {
            "content": content if content or not calls else None,
            "role": "assistant",
        }
        message |= {name: "".join(texts) for name, texts in self._reasoning.items() if texts}
        if calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "function": {"name": call.name, "arguments": call.arguments},
                    "type": call.type or "function",
                }
                for _, call in sorted(calls.items())
            ]
        return message


def answer(
    parsed: ParsedRequest,
    journals: Sequence[Journal],
    clients: Sequence[WholeClient],
    echoes: Sequence[str | None],
) -> bytes:
    """Make the body of a response whose choices are all complete.

    Raises:
        UndecodableError: the engine's head of the response is no head of an answer.
    """
    first = journals[0]
    assert first.head is not None
    try:
        head = _HEAD.decode(first.head + b"}")
    except UNREADABLE:
        raise UndecodableError("the engine's first event has no id, time and model") from None
    usage, facts = total_usage(journals)
    is_chat = isinstance(parsed.request, ChatRequest)
    made: dict[str, Any] = {
        "id": head.id,
        "created": head.created,
        "model": head.model,
        "choices": [
            client.choice(journal, index, echo)
            for index, (journal, client, echo) in enumerate(
                zip(journals, clients, echoes, strict=True)
            )
        ],
        "object": "chat.completion" if is_chat else "text_completion",
        "usage": usage,
    }
    made |= facts.beside
    if is_chat and first.wants_ids:
        made["prompt_token_ids"] = first.prompt_ids
    return encode(made)


def total_usage(journals: Sequence[Journal]) -> tuple[Mapping[str, Any], EngineFacts]:
    """Return the usage of all choices together, with the engines' facts; a prompt shared by several
    choices counts once, by its first choice.
    """
    firsts = list({id(journal.parsed): journal for journal in reversed(journals)}.values())
    prompt = sum(journal.usage.prompt_tokens for journal in firsts)
    produced = sum(journal.usage.completion_tokens for journal in journals)
    cached = [journal.cached_tokens for journal in firsts if journal.cached_tokens is not None]
    usage = usage_of(prompt, produced, sum(cached) if len(cached) == len(firsts) else None)
    facts = facts_together([(each.facts, each in firsts) for each in journals])
    return with_facts(usage, facts), facts
