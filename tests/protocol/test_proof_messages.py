"""Bytes of the hand-shake of two processes, however they are divided."""

import pytest

from kvrs.protocol.secrets import END, MAX_MESSAGE_BYTES, NONCE_BYTES, ProofError, ServerProof

_BEGINNING, _NONCE = b"KVRS-PROOF/1 ", b" " + b"00" * NONCE_BYTES


def answer(message: bytes, step: int) -> bytes | str:
    """The answers of a server to a HELLO that comes in pieces, or its error."""
    proof, answers = ServerProof([], bytes(NONCE_BYTES)), list[bytes]()
    try:
        for at in range(0, len(message), step):
            answers.append(proof.receive(message[at : at + step])[0])
    except ProofError as error:
        return str(error)
    return b"".join(answers)


@pytest.mark.parametrize("excess", [-2, 0, 2, 1000])
def test_the_limit_of_a_message_does_not_depend_on_where_it_is_cut(excess: int) -> None:
    """A long name of a key is refused as one, or for its length, by its length alone."""
    digits = MAX_MESSAGE_BYTES + excess - len(_BEGINNING) - len(_NONCE)
    message = _BEGINNING + b"0" * (digits & ~1) + _NONCE + END

    answers = [answer(message, step) for step in (len(message), len(message) - 1, 7, 1)]

    assert answers == answers[:1] * 4
    assert (answers[0] == "a message without an end") == (len(message) - 4 > MAX_MESSAGE_BYTES)
