"""The rest of an event of which a client has a part: what came to it in two pieces was made again in one."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
from tokenizers import Tokenizer

from kvrs.protocol.mirror import Said
from kvrs.proxy.continuation import Continuation
from kvrs.proxy.journal import Journal


class _Choice(msgspec.Struct):
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: dict[str, list[Any] | None] | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice]


_EVENT = msgspec.json.Decoder(_Event)


def rest_of(event: Said, ids: Sequence[int], has: int, journal: Journal, tokenizer: Tokenizer) -> Said:
    """What an engine of ours would have said after `ids`, the stream's output before the event and `has` ids of its own.

    Its text is that of the machine which made the event (`kvrs.text`), so that the two pieces together are the whole.
    """
    assert journal.head is not None
    whole = _EVENT.decode(event.data).choices[0]
    continuation = Continuation(replace(journal, output_ids=[*ids, *event.ids[:has]], text_sent=None), tokenizer)
    missing = event.ids[has:]
    piece = continuation.end() if continuation.ended else continuation.take(missing, whole.finish_reason, whole.stop_reason)
    choice: Any = journal.asked.form.choice(piece.delta)
    choice.finish_reason, choice.stop_reason = whole.finish_reason, whole.stop_reason
    if whole.logprobs is not None:
        choice.logprobs = {name: values and values[has:] for name, values in whole.logprobs.items()}
    if journal.wants_ids:
        choice.token_ids = missing
    return Said(event.seq, missing, journal.asked.form.event(journal.head, [choice]))
