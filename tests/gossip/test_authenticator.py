import hmac
from hashlib import sha256
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrs.gossip import authenticator as module
from kvrs.gossip.authenticator import (
    MAX_OVERHEAD_BYTES,
    MAX_PAYLOAD_BYTES,
    MAX_SENDERS,
    WINDOW_PACKETS,
    Keyring,
    Opened,
    Outdated,
    PacketAuthenticator,
    Rejection,
    Unproven,
)
from kvrs.ids import NodeId
from kvrs.protocol.secrets import derive
from kvrs_testkit.examples import examples
from tests.gossip.authenticators import NEW_SECRET, OLD_SECRET, A, B, C, acquaint, pair, seal_of


@given(payload=st.binary(max_size=1200), name=st.text(min_size=1, max_size=60))
@settings(deadline=None)
def test_a_sealed_payload_is_opened_unchanged(payload: bytes, name: str) -> None:
    """Payloads are opaque, and names any text."""
    node = NodeId(f"node {name}")
    a, b = seal_of(node), seal_of(B)
    acquaint(a, node, b, B)

    assert b.open(a.seal(B, payload)) == Opened(node, payload)
    assert b.open(a.seal(B, bytes(MAX_PAYLOAD_BYTES))) == Opened(node, bytes(MAX_PAYLOAD_BYTES))


@given(data=st.data())
@examples(300)
def test_a_changed_packet_is_rejected_and_counted(data: st.DataObject) -> None:
    """Any bit of header, name, payload or mac."""
    a, b = pair()
    packet = bytearray(a.seal(B, b"n9 is dead"))
    packet[data.draw(st.integers(0, len(packet) - 1))] ^= data.draw(st.integers(1, 255))

    reason = b.open(bytes(packet))

    assert isinstance(reason, Rejection)
    assert b.rejected[reason] == 1


@given(data=st.data())
@settings(deadline=None)
def test_a_packet_of_another_length_is_rejected(data: st.DataObject) -> None:
    """Cut at any place, or with bytes appended."""
    a, b = pair()
    packet = a.seal(B, b"n9 is dead")
    cut = packet[: data.draw(st.integers(0, len(packet) - 1))]
    longer = packet + data.draw(st.binary(min_size=1, max_size=64))

    assert b.open(cut) in {Rejection.TRUNCATED, Rejection.FORGED}
    assert b.open(longer) is Rejection.FORGED


@given(packet=st.binary(max_size=2000), prefix=st.integers(0, 80))
@examples(300)
def test_garbage_is_rejected(packet: bytes, prefix: int) -> None:
    """Also behind the start of a valid packet."""
    a, b = pair()

    assert isinstance(b.open(a.seal(B, b"x")[:prefix] + packet), Rejection)


@given(order=st.permutations(range(40)), twice=st.sets(st.integers(0, 39)))
@settings(deadline=None)
def test_each_packet_is_accepted_once_in_any_order(order: list[int], twice: set[int]) -> None:
    """The network may reorder and duplicate."""
    a, b = pair()
    packets = [a.seal(B, bytes([n])) for n in range(40)]

    taken = [b.open(packets[n]) for n in order for _ in range(1 + (n in twice))]

    assert [result.payload[0] for result in taken if isinstance(result, Opened)] == order
    assert b.rejected[Rejection.REPLAYED] == len(twice)


class Model:
    """Keeps every counter, unlike `PacketAuthenticator`."""

    def __init__(self) -> None:
        self.taken: set[int] = set()

    def open(self, counter: int) -> Rejection | None:
        if self.taken and max(self.taken) - counter >= WINDOW_PACKETS:
            return Rejection.BEHIND_WINDOW
        if counter in self.taken:
            return Rejection.REPLAYED
        self.taken.add(counter)
        return None


@given(
    seed=st.integers(0, 1 << 32),
    steps=st.sampled_from([1, 7, 600, WINDOW_PACKETS - 1, WINDOW_PACKETS, WINDOW_PACKETS + 1]),
)
@examples(40)
def test_the_replay_window_agrees_with_an_unbounded_one(seed: int, steps: int) -> None:
    """At its edges too."""
    random, model, (a, b) = Random(seed), Model(), pair()
    model.taken = {1, 2}  # What `pair` sent.
    counter = 2
    for _ in range(60):
        counter = max(
            1, counter + random.choice([1, steps, -steps, -1, random.randint(-steps, steps)])
        )
        a._counter = counter - 1

        result = b.open(a.seal(B, b"x"))

        assert (result if isinstance(result, Rejection) else None) == model.open(counter)


def test_a_jump_of_the_counter_does_not_grow_the_window() -> None:
    """A counter of 2**64 - 1 would otherwise allocate two exabytes."""
    a, b = pair()
    a._counter = (1 << 64) - 3

    assert b.open(a.seal(B, b"x")) == Opened(A, b"x")
    assert b.senders[A].window.bit_length() <= WINDOW_PACKETS


def test_an_old_epoch_is_rejected_after_a_newer_one() -> None:
    """Late or recorded packets of a dead run revive nothing; the first is answered."""
    a, b = pair()
    recorded = a.seal(B, b"alive")
    restarted = seal_of(A, epoch=2)

    assert b.open(restarted.seal(B, b"")) == Unproven(A)  # Authentic, so its epoch counts.
    assert b.open(recorded) == Outdated(A, a._run, epoch=2)  # Answered once.
    assert b.open(recorded) is Rejection.OLD_EPOCH
    assert b.rejected[Rejection.OLD_EPOCH] == 2


def test_the_answer_to_a_replaced_run_is_valid_for_that_run_only() -> None:
    """It is sealed for that run; every other run gets it as unproven. A run that began with too low
    an epoch raises it, and is accepted.
    """
    a, b = pair()
    restarted = seal_of(A, epoch=2)
    acquaint(restarted, A, b, B)
    old = b.open(a.seal(B, b"alive"))
    assert isinstance(old, Outdated)

    sent = b.seal(A, b"epoch 2", old.run)
    a.epoch = 3

    assert a.open(sent) == Opened(B, b"epoch 2")
    assert restarted.open(sent) == Unproven(B)
    assert b.open(a.seal(B, b"now")) == Opened(A, b"now")
    assert isinstance(b.open(restarted.seal(B, b"")), Outdated)


def test_a_restarted_receiver_rejects_recorded_packets() -> None:
    """It has no counters and epochs, but another run."""
    a, _ = pair()
    recorded = [a.seal(B, b"n9 is dead") for _ in range(3)]
    restarted = seal_of(B, epoch=2)

    assert [restarted.open(packet) for packet in recorded] == [Unproven(A)] * 3
    # A replayed packet is not answered twice.
    assert restarted.open(recorded[0]) is Rejection.REPLAYED
    assert a.open(restarted.seal(A, b"")) == Opened(B, b"")
    assert restarted.open(a.seal(B, b"now")) == Opened(A, b"now")


def test_a_packet_for_another_node_is_rejected() -> None:
    """A probe replayed to another node would be answered in the wrong name."""
    a, b = pair()
    c = seal_of(C)
    acquaint(a, A, c, C)

    assert c.open(a.seal(B, b"probe")) == Unproven(A)
    assert b.open(a.seal(C, b"probe")) == Unproven(A)


def test_two_processes_of_one_name_do_not_mix() -> None:
    """With the same epoch the first one is accepted; a packet with the receiver's own name may be
    reflected.
    """
    a, b = pair()

    assert b.open(seal_of(A, run=77).seal(B, b"x")) is Rejection.DUPLICATE
    assert a.open(a.seal(B, b"x")) is Rejection.OWN


def test_keys_rotate_without_a_gap() -> None:
    """The new one is accepted by all, then used by all, then the old one removed; all packets are
    accepted in every mixture of adjacent steps.
    """
    steps = [(OLD_SECRET,), (OLD_SECRET, NEW_SECRET), (NEW_SECRET, OLD_SECRET), (NEW_SECRET,)]

    for before, after in pairwise(steps):
        for of_a, of_b in ((after, before), (before, after), (after, after)):
            a, b = seal_of(A, secrets=of_a), seal_of(B, secrets=of_b)
            acquaint(a, A, b, B)
            assert b.open(a.seal(B, b"x")) == Opened(A, b"x")
            assert a.open(b.seal(A, b"x")) == Opened(B, b"x")

    stale = seal_of(C)
    assert a.open(stale.seal(A, b"x")) is Rejection.KEY


def test_sizes_are_checked_before_anything_else() -> None:
    """Before any hash is computed."""
    _, b = pair()

    assert b.open(bytes(MAX_PAYLOAD_BYTES + MAX_OVERHEAD_BYTES + 1)) is Rejection.OVERSIZED
    assert b.open(b"") is Rejection.TRUNCATED
    assert b.open(b"GET / HTTP/1.1\r\n" * 10) is Rejection.NOT_GOSSIP


def test_another_version_has_its_own_reason() -> None:
    """A release of another version is not taken for a forger."""
    a, b = pair()
    packet = bytearray(a.seal(B, b"x"))
    packet[4] ^= 1

    assert b.open(bytes(packet)) is Rejection.VERSION


def test_a_name_that_is_not_utf8_or_longer_than_the_packet_is_rejected() -> None:
    """Sealed with the key, so it is an error of a member; it must not raise."""
    a, b = pair()
    packet = bytearray(a.seal(B, b"")[:-32])
    packet[module._HEADER.size - 1] += 1
    sealed = bytes(packet) + hmac.digest(derive(OLD_SECRET, b"kvrs-gossip"), packet, sha256)
    a._own_name = b"\xff\xfe"

    assert b.open(sealed) is Rejection.TRUNCATED
    assert b.open(a.seal(B, b"x")) is Rejection.NAME


def test_the_number_of_senders_is_bounded() -> None:
    """A holder of the key can invent names."""
    _, b = pair()
    for n in range(MAX_SENDERS + 10):
        b.open(seal_of(NodeId(f"invented-{n}")).seal(B, b"x"))

    assert len(b.senders) == MAX_SENDERS
    assert b.rejected[Rejection.TOO_MANY_SENDERS] == 11  # A was there before.


def test_forged_packets_change_no_state() -> None:
    """No name, epoch or counter of a packet counts before its mac is verified."""
    _, b = pair()
    forger = PacketAuthenticator(A, 99, bytes([9] * 8), Keyring([NEW_SECRET]))
    forger._keys.sending_id = Keyring([OLD_SECRET]).sending_id

    assert b.open(forger.seal(B, b"x")) is Rejection.FORGED
    assert b.senders[A].epoch == 1


def test_the_mac_is_hmac_sha256_over_header_name_and_payload() -> None:
    """The documented format, computed a second time, gives the same MAC."""
    a, _ = pair()
    packet = a.seal(B, b"payload")

    assert packet[-32:] == hmac.digest(derive(OLD_SECRET, b"kvrs-gossip"), packet[:-32], sha256)
    assert packet[:-32].endswith(b"n0payload")
    assert len(packet) <= len(b"payload") + MAX_OVERHEAD_BYTES


def test_short_secrets_are_rejected() -> None:
    """By an assertion; the configuration checks them before."""
    with pytest.raises(AssertionError, match="less than 16"):
        Keyring([b"short"])
