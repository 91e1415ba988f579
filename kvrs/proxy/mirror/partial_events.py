"""The rest of an event of which a client has a part: after a resume, an engine may send tokens in
one event that the client had from two.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tokenizers import Tokenizer

from kvrs.protocol.mirror import StreamEvent, pack_ids, unpack_ids
from kvrs.protocol.openai.chunks import CHUNK
from kvrs.protocol.token_ids import packed
from kvrs.proxy.streams.continuation import Continuation
from kvrs.proxy.wire.journal import Journal


def rest_of(
    event: StreamEvent, ids: Sequence[int], has: int, journal: Journal, tokenizer: Tokenizer
) -> StreamEvent:
    """The event that a kvrs engine would have sent after `ids`, the stream's output before this
    event, and the first `has` ids of the event.

    The text is made by the code that made the event (`kvrs.text`), so that the two pieces join to
    the whole.
    """
    assert journal.head is not None
    received = CHUNK.decode(event.data)
    assert received.choices
    whole, own = received.choices[0], unpack_ids(event.ids).tolist()
    continuation = Continuation(
        replace(journal, output_ids=packed([*ids, *own[:has]]), text_sent=None), tokenizer
    )
    missing = own[has:]
    piece = (
        continuation.end()
        if continuation.ended
        else continuation.take(missing, whole.finish_reason, whole.stop_reason)
    )
    choice: Any = journal.parsed.endpoint.choice(piece.delta)
    choice.finish_reason, choice.stop_reason = whole.finish_reason, whole.stop_reason
    if logprobs := whole.logprob_lists():
        choice.logprobs = {name: values and values[has:] for name, values in logprobs.items()}
    if journal.wants_ids:
        choice.token_ids = missing
    data = journal.parsed.endpoint.event(journal.head, [choice], received.usage)
    return StreamEvent(event.seq, pack_ids(missing), data)
