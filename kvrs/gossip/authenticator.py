"""Authentication of gossip packets: HMAC and a replay window. A packet not sealed with the
cluster's secret, recently and for this process, is rejected before its payload is parsed.

    magic  version  key  epoch   run  echo  counter  name of the sender   payload   mac
      4       1      8     8      8     8      8     2 + up to 256 bytes              32

The MAC is an HMAC-SHA-256 over everything before it. Three fields prevent replay:

- `counter` rises with every packet of a process run. Per sender a window of the last 4,096 is
  kept; older packets are rejected.
- `epoch` rises with every run of the sender. Once a packet of a newer run was authenticated, older
  runs are rejected. They get an answer though (`Outdated`), so that a run that began with too low
  an epoch, or that was replaced, learns of it.
- `run` is a random number of the sender's process, `echo` the receiver's `run` as the sender last
  received it. So a process that has just started, with an empty window, rejects what was sealed
  before its start, or for another receiver.

A packet without the right echo is `Unproven`: its payload is dropped, and the answer is any packet
(an empty payload is enough), from which the sender learns the receiver's run.

A holder of the secret can forge packets of any member: the mac proves that a packet comes from the
cluster, not from which member. The payload is not encrypted.

Authentication costs a hash of the packet, so it is limited before anything is known of the sender:
`ReceiveRates` has token buckets per source and in total. A source from which an authentic packet
came has a bucket of its own for packets that echo the run of this process; all other packets share
one that is much smaller than the total. So a flood costs members nothing, whatever source addresses
it forges, unless the attacker reads their packets.

Pure: time and the run are arguments.
"""

import hmac
import struct
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256
from typing import ClassVar

import msgspec

from kvrs.gossip.wire import MAX_PACKET_BYTES
from kvrs.ids import NodeId
from kvrs.protocol.secrets import MIN_SECRET_BYTES, derive

Address = tuple[str, int]  # Numeric host, and port.

MAX_PAYLOAD_BYTES = MAX_PACKET_BYTES
# Length of the replay window per sender, in packets: a packet that more have overtaken is rejected.
WINDOW_PACKETS = 4096
# Most senders that are remembered, at about 700 bytes each; packets of further senders are
# rejected.
MAX_SENDERS = 4096
RUN_BYTES = 8

_MAGIC = b"KVRG"
_VERSION = 2
_MAC_BYTES = 32
_HEADER = struct.Struct("!4sB8sQ8s8sQH")
_MAX_NAME_BYTES = 256  # Longest name in UTF-8: 64 characters of up to four bytes.
_MIN_BYTES = _HEADER.size + 1 + _MAC_BYTES
# Bytes of a packet beyond its payload, with the longest name.
MAX_OVERHEAD_BYTES = _HEADER.size + _MAX_NAME_BYTES + _MAC_BYTES
_NO_ECHO = bytes(RUN_BYTES)
_WINDOW_MASK = (1 << WINDOW_PACKETS) - 1
_MAX_SOURCES = 4096


class Rejection(StrEnum):
    """Reason for which a packet is rejected, in the order of the checks."""

    OVERSIZED = "oversized"
    TRUNCATED = "truncated"
    NOT_GOSSIP = "not_gossip"
    VERSION = "version"
    # The packet's key is not in the keyring: it is a key of another cluster, for example.
    KEY = "key"
    # The MAC is wrong: the packet was made without the key, or changed on its way.
    FORGED = "forged"
    NAME = "name"  # The sender's name is not UTF-8.
    # The sender has this node's name: the packet was sent back, or two processes have one name.
    OWN = "own"
    TOO_MANY_SENDERS = "too_many_senders"
    OLD_EPOCH = "old_epoch"
    DUPLICATE = (
        # Another process has the sender's name and epoch; only the one heard first is accepted.
        "twin"
    )
    REPLAYED = "replayed"
    BEHIND_WINDOW = "behind_window"  # More than `WINDOW_PACKETS` packets have overtaken this one.
    UNPROVEN = "unproven"  # The packet does not echo this process's run.


class Opened(msgspec.Struct, frozen=True):
    sender: NodeId
    payload: bytes


@dataclass(frozen=True, slots=True)
class Unproven:
    """An authentic packet that may be a replay: the sender must learn this process's run first."""

    sender: NodeId
    reason: ClassVar = Rejection.UNPROVEN


@dataclass(frozen=True, slots=True)
class Outdated:
    """A packet of a run of `sender` that a run with a higher `epoch` has replaced."""

    sender: NodeId
    run: bytes
    epoch: int
    reason: ClassVar = Rejection.OLD_EPOCH


class Keyring:
    """One key per secret of the cluster: packets are sealed with the first and opened with any.

    A secret is rotated without a gap in three steps, each at all nodes before the next: append the
    new one, move it to the front, remove the old one.
    """

    def __init__(self, secrets: Sequence[bytes]) -> None:
        assert secrets, "a keyring without a key"
        assert min(map(len, secrets)) >= MIN_SECRET_BYTES, (
            f"a secret of less than {MIN_SECRET_BYTES} bytes"
        )
        keys = [derive(secret, b"kvrs-gossip") for secret in secrets]
        # Keys by id. An id that is derived from its key reveals nothing of it, and needs no
        # registry.
        self.by_id = {derive(key, b"id")[:8]: key for key in keys}
        self.sending_id, self.sending_key = next(iter(self.by_id.items()))


@dataclass(slots=True)
class _Sender:
    epoch: int
    run: bytes
    newest: int
    window: int  # Bit i: packet `newest - i` was accepted.
    # The older run that sent a packet last, and the counter of its newest packet; empty: none did.
    older_run: bytes = b""
    older_counter: int = 0


class PacketAuthenticator:
    """Seals and opens the packets of one process run; `epoch` is higher than in all earlier runs
    under this name.
    """

    def __init__(self, own: NodeId, epoch: int, run: bytes, keys: Keyring) -> None:
        self._own_name = own.encode()
        assert 0 < len(self._own_name) <= _MAX_NAME_BYTES, f"a name of {len(self._own_name)} bytes"
        assert len(run) == RUN_BYTES, f"a run's number of {len(run)} bytes"
        assert run != _NO_ECHO, "a run's number of zeros means none"
        self.epoch = epoch  # Epoch in sealed packets, which only rises.
        self._own, self._run, self._keys = own, run, keys
        self._counter = 0
        # Nodes from which a packet was accepted, so that packets to them can echo their run.
        self.senders: dict[NodeId, _Sender] = {}
        self.rejected: Counter[Rejection] = Counter()

    def seal(self, to: NodeId, payload: bytes, run: bytes | None = None) -> bytes:
        """Return the sealed packet of a payload, which echoes `run`, or else the receiver's run in
        its last accepted packet.
        """
        assert len(payload) <= MAX_PAYLOAD_BYTES, f"a payload of {len(payload)} bytes"
        self._counter += 1
        known = self.senders.get(to)
        header = _HEADER.pack(
            _MAGIC,
            _VERSION,
            self._keys.sending_id,
            self.epoch,
            self._run,
            run or (known.run if known else _NO_ECHO),
            self._counter,
            len(self._own_name),
        )
        sealed = b"".join((header, self._own_name, payload))
        return sealed + hmac.digest(self._keys.sending_key, sealed, sha256)

    def is_answer(self, packet: bytes | memoryview) -> bool:
        """Return whether the packet echoes this process's random run: then it comes from a node
        that has received a packet of this process, or from an attacker who reads packets. The check
        needs no hash.
        """
        if len(packet) < _MIN_BYTES:
            return False
        magic, version, key_id, _, _, echo, _, _ = _HEADER.unpack_from(packet)
        return (magic, version) == (_MAGIC, _VERSION) and (
            key_id in self._keys.by_id and hmac.compare_digest(echo, self._run)
        )

    def open(self, packet: bytes | memoryview) -> Opened | Unproven | Outdated | Rejection:
        """Return the payload and its sender, or the reason for the rejection, which is counted."""
        result = self._open(memoryview(packet))
        if not isinstance(result, Opened):
            self.rejected[result if isinstance(result, Rejection) else result.reason] += 1
        return result

    def _open(self, packet: memoryview) -> Opened | Unproven | Outdated | Rejection:
        # Before the mac is verified, nothing of the packet is kept or copied.
        if len(packet) > MAX_PAYLOAD_BYTES + MAX_OVERHEAD_BYTES:
            return Rejection.OVERSIZED
        if len(packet) < _MIN_BYTES:
            return Rejection.TRUNCATED
        magic, version, key_id, epoch, run, echo, counter, name_bytes = _HEADER.unpack_from(packet)
        payload_start, payload_end = _HEADER.size + name_bytes, len(packet) - _MAC_BYTES
        if magic != _MAGIC:
            return Rejection.NOT_GOSSIP
        if version != _VERSION:
            return Rejection.VERSION
        if (key := self._keys.by_id.get(key_id)) is None:
            return Rejection.KEY
        if not name_bytes or payload_start > payload_end:
            return Rejection.TRUNCATED
        if not hmac.compare_digest(
            hmac.digest(key, packet[:payload_end], sha256), packet[payload_end:]
        ):
            return Rejection.FORGED
        try:
            name = NodeId(str(packet[_HEADER.size : payload_start], "utf-8"))
        except UnicodeDecodeError:
            return Rejection.NAME
        if name == self._own:
            return Rejection.OWN
        if (reason := self._check_replay(name, epoch, run, counter)) is not None:
            return self._outdated(name, run, counter) if reason is Rejection.OLD_EPOCH else reason
        return (
            Opened(name, bytes(packet[payload_start:payload_end]))
            if echo == self._run
            else Unproven(name)
        )

    def _outdated(self, name: NodeId, run: bytes, counter: int) -> Outdated | Rejection:
        """Return the answer that tells a replaced run of its successor, or the rejection of a
        packet that was answered before: a replay gets no second answer.
        """
        sender = self.senders[name]
        if sender.older_run == run and counter <= sender.older_counter:
            return Rejection.OLD_EPOCH
        sender.older_run, sender.older_counter = run, counter
        return Outdated(name, run, sender.epoch)

    def _check_replay(self, name: NodeId, epoch: int, run: bytes, counter: int) -> Rejection | None:
        """Enter an authentic packet into the replay window; return the reason if it is rejected.

        Unproven packets are entered too: their epoch is genuine, and they are answered only once.
        """
        sender = self.senders.get(name)
        if sender is None and len(self.senders) >= MAX_SENDERS:
            return Rejection.TOO_MANY_SENDERS
        if sender is None or epoch > sender.epoch:
            self.senders[name] = _Sender(epoch, run, counter, window=1)
            return None
        if epoch < sender.epoch:
            return Rejection.OLD_EPOCH
        if run != sender.run:
            return Rejection.DUPLICATE
        age = sender.newest - counter
        if age >= WINDOW_PACKETS:
            return Rejection.BEHIND_WINDOW
        if age >= 0:
            if sender.window >> age & 1:
                return Rejection.REPLAYED
            sender.window |= 1 << age
            return None
        # The shift is bounded: otherwise the sender could make the number as long as it likes.
        sender.window = (sender.window << min(-age, WINDOW_PACKETS) | 1) & _WINDOW_MASK
        sender.newest = counter
        return None


class TokenBucket:
    def __init__(self, per_s: float, burst: float, now_s: float) -> None:
        self._per_s, self._burst = per_s, burst
        self._tokens, self._at_s = burst, now_s

    def take(self, now_s: float) -> bool:
        self._tokens = min(self._burst, self._tokens + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Most packets per second that are authenticated: of one member, of all unknown sources, and in
    total. Each bucket holds those of `burst_s`. In a cluster of 1,000 a member receives about 50
    packets per second.
    """

    member_per_s: float = 200.0
    unknown_per_s: float = 500.0
    total_per_s: float = 5000.0
    burst_s: float = 2.0


RATES = Rates()


class ReceiveRates:
    def __init__(self, rates: Rates, now_s: float) -> None:
        self._rates = rates
        self._total = self._bucket(rates.total_per_s, now_s)
        self._unknown = self._bucket(rates.unknown_per_s, now_s)
        self._members: OrderedDict[Address, TokenBucket] = OrderedDict()

    def admit(self, source: Address, is_answer: bool, now_s: float) -> bool:
        """Return whether one more packet of this source may be authenticated now; `is_answer`: the
        packet echoes this process's run.
        """
        own = self._members.get(source) if is_answer else None
        return (own or self._unknown).take(now_s) and self._total.take(now_s)

    def on_authentic(self, source: Address, now_s: float) -> None:
        """Give this source a bucket of its own. Above `_MAX_SOURCES` the source that was silent for
        longest loses its bucket.
        """
        if source in self._members:
            self._members.move_to_end(source)
            return
        self._members[source] = self._bucket(self._rates.member_per_s, now_s)
        if len(self._members) > _MAX_SOURCES:
            self._members.popitem(last=False)

    def _bucket(self, per_s: float, now_s: float) -> TokenBucket:
        return TokenBucket(per_s, max(1.0, per_s * self._rates.burst_s), now_s)
