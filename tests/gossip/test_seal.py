import hmac
from hashlib import sha256
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrs.gossip import seal as module
from kvrs.gossip.seal import (
    MAX_OVERHEAD_BYTES,
    MAX_PAYLOAD_BYTES,
    MAX_SENDERS,
    WINDOW_PACKETS,
    Keyring,
    Opened,
    Outdated,
    Refusal,
    Seal,
    Unproven,
)
from kvrs.ids import NodeId
from kvrs.protocol.secrets import derive
from tests.gossip.sealing import NEW_SECRET, OLD_SECRET, A, B, C, acquaint, pair, seal_of


@given(payload=st.binary(max_size=1200), name=st.text(min_size=1, max_size=60))
@settings(deadline=None)
def test_what_is_sealed_is_opened_unchanged(payload: bytes, name: str) -> None:
    """Payloads are opaque, and names are any text."""
    node = NodeId(f"n{name}")
    a, b = seal_of(node), seal_of(B)
    acquaint(a, node, b, B)

    assert b.open(a.seal(B, payload)) == Opened(node, payload)
    assert b.open(a.seal(B, bytes(MAX_PAYLOAD_BYTES))) == Opened(node, bytes(MAX_PAYLOAD_BYTES))


@given(data=st.data())
@settings(deadline=None, max_examples=300)
def test_a_changed_packet_is_dropped_and_counted(data: st.DataObject) -> None:
    """Any bit of header, name, payload or mac."""
    a, b = pair()
    packet = bytearray(a.seal(B, b"who is dead"))
    packet[data.draw(st.integers(0, len(packet) - 1))] ^= data.draw(st.integers(1, 255))

    refusal = b.open(bytes(packet))

    assert isinstance(refusal, Refusal)
    assert b.refused[refusal] == 1


@given(data=st.data())
@settings(deadline=None)
def test_a_packet_cut_or_lengthened_anywhere_is_dropped(data: st.DataObject) -> None:
    a, b = pair()
    packet = a.seal(B, b"who is dead")
    cut = packet[: data.draw(st.integers(0, len(packet) - 1))]
    longer = packet + data.draw(st.binary(min_size=1, max_size=64))

    assert b.open(cut) in {Refusal.TRUNCATED, Refusal.FORGED}
    assert b.open(longer) is Refusal.FORGED


@given(packet=st.binary(max_size=2000), prefix=st.integers(0, 80))
@settings(deadline=None, max_examples=300)
def test_garbage_is_dropped_whatever_it_is(packet: bytes, prefix: int) -> None:
    """Also behind the start of a true packet."""
    a, b = pair()

    assert isinstance(b.open(a.seal(B, b"x")[:prefix] + packet), Refusal)


@given(order=st.permutations(range(40)), twice=st.sets(st.integers(0, 39)))
@settings(deadline=None)
def test_each_packet_is_taken_once_in_any_order(order: list[int], twice: set[int]) -> None:
    """The network may reorder and repeat."""
    a, b = pair()
    packets = [a.seal(B, bytes([n])) for n in range(40)]

    taken = [b.open(packets[n]) for n in order for _ in range(1 + (n in twice))]

    assert [result.payload[0] for result in taken if isinstance(result, Opened)] == order
    assert b.refused[Refusal.REPLAYED] == len(twice)


class Model:
    """Remembers every counter, which `Seal` may not."""

    def __init__(self) -> None:
        self.taken: set[int] = set()

    def open(self, counter: int) -> Refusal | None:
        if self.taken and max(self.taken) - counter >= WINDOW_PACKETS:
            return Refusal.BEHIND_WINDOW
        if counter in self.taken:
            return Refusal.REPLAYED
        self.taken.add(counter)
        return None


@given(seed=st.integers(0, 1 << 32), steps=st.sampled_from([1, 7, 600, WINDOW_PACKETS - 1, WINDOW_PACKETS, WINDOW_PACKETS + 1]))
@settings(deadline=None, max_examples=40)
def test_the_window_agrees_with_a_memory_of_everything(seed: int, steps: int) -> None:
    """At its edges too."""
    random, model, (a, b) = Random(seed), Model(), pair()
    model.taken = {1, 2}  # What `pair` sent.
    counter = 2
    for _ in range(60):
        counter = max(1, counter + random.choice([1, steps, -steps, -1, random.randint(-steps, steps)]))
        a._counter = counter - 1

        result = b.open(a.seal(B, b"x"))

        assert (result if isinstance(result, Refusal) else None) == model.open(counter)


def test_a_leap_of_the_counter_makes_no_long_number() -> None:
    """A sender that says it is at 2**64 - 1 would else allocate two exabytes."""
    a, b = pair()
    a._counter = (1 << 64) - 3

    assert b.open(a.seal(B, b"x")) == Opened(A, b"x")
    assert b._senders[A].seen.bit_length() <= WINDOW_PACKETS


def test_an_old_epoch_is_refused_once_a_newer_one_was_heard() -> None:
    """The packets that a dead run left on the way, or that somebody recorded, revive nothing."""
    a, b = pair()
    recorded = a.seal(B, b"alive")
    restarted = seal_of(A, epoch=2)

    assert b.open(restarted.seal(B, b"")) == Unproven(A)  # Enough: it is authentic.
    assert b.open(recorded) == Outdated(A, a._run, epoch=2)  # For which there is an answer, once.
    assert b.open(recorded) is Refusal.OLD_EPOCH
    assert b.refused[Refusal.OLD_EPOCH] == 2


def test_a_run_that_was_replaced_is_told_so_and_nobody_else_believes_it() -> None:
    """What it is told is sealed for that run: the one in use, and any other, finds nothing proven in it."""
    a, b = pair()
    late = a.seal(B, b"alive")
    restarted = seal_of(A, epoch=2)
    acquaint(restarted, A, b, B)
    old = b.open(late)
    assert isinstance(old, Outdated)

    told = b.seal(A, b"epoch 2", old.run)

    assert a.open(told) == Opened(B, b"epoch 2")
    assert restarted.open(told) == Unproven(B)


def test_a_run_that_rises_above_the_others_is_heard() -> None:
    """It began with too low an epoch, and was told."""
    a, b = pair()
    slow = seal_of(A, epoch=0, run=77)
    assert isinstance(b.open(slow.seal(B, b"")), Outdated)

    slow.rise(2)

    assert b.open(slow.seal(B, b"")) == Unproven(A)
    assert isinstance(b.open(a.seal(B, b"")), Outdated)


def test_a_restarted_receiver_takes_nothing_that_was_recorded_before() -> None:
    """It remembers no counter and no epoch, but its run has another number."""
    a, _ = pair()
    recorded = [a.seal(B, b"n9 is dead") for _ in range(3)]
    restarted = seal_of(B, epoch=2)

    assert [restarted.open(packet) for packet in recorded] == [Unproven(A)] * 3
    assert restarted.open(recorded[0]) is Refusal.REPLAYED  # So that nobody is made to answer twice.
    assert a.open(restarted.seal(A, b"")) == Opened(B, b"")
    assert restarted.open(a.seal(B, b"now")) == Opened(A, b"now")


def test_a_packet_for_another_node_is_not_taken() -> None:
    """A probe played back to somebody else would be answered in the wrong name."""
    a, b = pair()
    c = seal_of(C)
    acquaint(a, A, c, C)

    assert c.open(a.seal(B, b"probe")) == Unproven(A)
    assert b.open(a.seal(C, b"probe")) == Unproven(A)


def test_two_processes_of_one_name_and_epoch_do_not_mix() -> None:
    """The first one counts, the other is seen in the counter."""
    _, b = pair()
    twin = seal_of(A, run=77)

    assert b.open(twin.seal(B, b"x")) is Refusal.TWIN
    assert b.refused[Refusal.TWIN] == 1


def test_a_packet_reflected_to_its_sender_is_refused() -> None:
    a, _ = pair()

    assert a.open(a.seal(B, b"x")) is Refusal.OWN


def test_keys_rotate_without_a_gap() -> None:
    """New accepted everywhere, then sent everywhere, then old removed: in every mixture of neighbouring steps all is taken."""
    steps = [(OLD_SECRET,), (OLD_SECRET, NEW_SECRET), (NEW_SECRET, OLD_SECRET), (NEW_SECRET,)]
    a, b = pair()

    for before, after in pairwise(steps):
        for of_a, of_b in ((after, before), (before, after), (after, after)):
            a.use(Keyring(of_a))
            b.use(Keyring(of_b))
            assert b.open(a.seal(B, b"x")) == Opened(A, b"x")
            assert a.open(b.seal(A, b"x")) == Opened(B, b"x")

    stale = seal_of(C)
    assert a.open(stale.seal(A, b"x")) is Refusal.KEY


def test_clusters_that_share_a_secret_do_not_mix() -> None:
    other = Seal("other", A, 1, bytes([1] * 8), Keyring([OLD_SECRET]))
    _, b = pair()

    assert b.open(other.seal(B, b"x")) is Refusal.CLUSTER


def test_sizes_are_checked_before_anything_else() -> None:
    _, b = pair()

    assert b.open(bytes(MAX_PAYLOAD_BYTES + MAX_OVERHEAD_BYTES + 1)) is Refusal.OVERSIZED
    assert b.open(bytes(100 + MAX_OVERHEAD_BYTES + 1), most_payload_bytes=100) is Refusal.OVERSIZED
    assert b.open(b"") is Refusal.TRUNCATED
    assert b.open(b"GET / HTTP/1.1\r\n" * 10) is Refusal.NOT_GOSSIP


def test_a_version_of_another_time_is_named() -> None:
    a, b = pair()
    packet = bytearray(a.seal(B, b"x"))
    packet[4] += 1

    assert b.open(bytes(packet)) is Refusal.VERSION


def test_a_name_that_is_no_text_is_refused() -> None:
    """Sealed with the key, so it is a bug of a member; it must not raise."""
    a, b = pair()
    a._own_name = b"\xff\xfe"

    assert b.open(a.seal(B, b"x")) is Refusal.NAME


def test_a_name_longer_than_the_packet_is_refused() -> None:
    """Sealed with the key too: the name would reach into the mac."""
    a, b = pair()
    packet = bytearray(a.seal(B, b"")[:-32])
    packet[module._HEADER.size - 1] += 1
    sealed = bytes(packet) + hmac.digest(derive(OLD_SECRET, b"kvrs-gossip"), packet, sha256)

    assert b.open(sealed) is Refusal.TRUNCATED


def test_what_is_remembered_of_senders_is_bounded() -> None:
    """Whoever has the key can invent names."""
    _, b = pair()
    for n in range(MAX_SENDERS + 10):
        b.open(seal_of(NodeId(f"invented-{n}")).seal(B, b"x"))

    assert b.senders == MAX_SENDERS
    assert b.refused[Refusal.TOO_MANY_SENDERS] == 11  # A was there before.


def test_forged_packets_leave_no_trace_of_their_sender() -> None:
    """No name, epoch or counter of a packet counts before its mac is right."""
    _, b = pair()
    forger = Seal("test", A, 99, bytes([9] * 8), Keyring([NEW_SECRET]))
    forger._keys.sending_id = Keyring([OLD_SECRET]).sending_id

    assert b.open(forger.seal(B, b"x")) is Refusal.FORGED
    assert b._senders[A].epoch == 1


def test_the_mac_is_hmac_sha256_over_header_name_and_payload() -> None:
    """As the page of the format says it, written a second time."""
    a, _ = pair()
    packet = a.seal(B, b"payload")

    assert packet[-32:] == hmac.digest(derive(OLD_SECRET, b"kvrs-gossip"), packet[:-32], sha256)
    assert packet[:-32].endswith(b"n0payload")
    assert len(packet) <= len(b"payload") + MAX_OVERHEAD_BYTES


def test_short_secrets_are_refused() -> None:
    with pytest.raises(AssertionError, match="less than 16"):
        Keyring([b"short"])
