"""Updates for a helper fit into messages, however many tokens the streams have."""

import msgspec

from kvrs.protocol.instance import MAX_MESSAGE_BYTES, DraftChoice, MirrorUpdate, in_messages

CHOICE = DraftChoice(0.0, 1.0, 0, 0.0, 0)
LARGEST_ID = (1 << 32) - 1


def test_long_histories_go_in_several_messages_in_order() -> None:
    """All tokens of 400 streams, 16,000 each, are more than one message takes."""
    updates = [MirrorUpdate(n, [LARGEST_ID] * 16_000, CHOICE) for n in range(400)]
    assert len(msgspec.msgpack.encode(updates)) > MAX_MESSAGE_BYTES

    messages = [*in_messages(updates)]

    assert [update for message in messages for update in message] == updates
    assert max(len(msgspec.msgpack.encode(message)) for message in messages) < MAX_MESSAGE_BYTES
    assert 1 < len(messages) < 100


def test_few_updates_are_one_message_and_none_are_none() -> None:
    updates = [MirrorUpdate(1, [5]), MirrorUpdate(2)]
    assert [*in_messages(updates)] == [updates]
    assert [*in_messages([])] == []
