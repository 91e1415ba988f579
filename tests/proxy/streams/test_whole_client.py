"""The collector of whole answers, fed with pieces of any form."""

from contextlib import suppress

import msgspec
import pytest
from hypothesis import given

from kvrs.errors import UndecodableError
from kvrs.ids import StreamId
from kvrs.proxy.streams.whole_answers import WholeClient, answer
from kvrs.proxy.wire.journal import Journal
from kvrs.proxy.wire.requests import CHAT, read
from tests.protocol.test_undecodable_pieces import NULLS, streams

ASKED = read(CHAT, b'{"messages":[{"role":"user","content":"a"}]}')


def journal(head: bytes) -> Journal:
    made = Journal(StreamId("1"), ASKED, arrived_s=0.0, prompt_ids=[1])
    made.head = head
    return made


@given(streams)
def test_a_piece_of_any_form_is_collected_or_undecodable(stream: list[bytes]) -> None:
    """No other error comes out, and the answer of what was collected can be made."""
    client = WholeClient()

    with suppress(UndecodableError):
        client.send(stream)

    head = b'{"id":"7","created":1,"model":"m"'
    assert answer(ASKED, [journal(head)], [client], [None])


def test_a_collected_call_may_have_nulls() -> None:
    """Its fields are those of the pieces that have them."""
    client = WholeClient()
    client.send([msgspec.json.encode({"choices": [{"delta": {"tool_calls": NULLS}}]})])

    (call,) = client.choice(journal(b"{}"), 0, None)["message"]["tool_calls"]

    function = {"name": "f", "arguments": '{"q":1}'}
    assert call == {"id": "c", "type": "function", "function": function}


@pytest.mark.parametrize("head", [b'{"id":7,"created":1,"model":"m"', b'{"id":"7"'])
def test_a_head_of_another_form_is_undecodable(head: bytes) -> None:
    """An engine may answer without a model or a time."""
    with pytest.raises(UndecodableError):
        answer(ASKED, [journal(head)], [WholeClient()], [None])
