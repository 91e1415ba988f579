"""Seals gossip packets and opens them again: what was not sealed by a holder of the cluster's secret, just now and for this
process, is refused before any of it is parsed.

    magic  version  cluster  key  epoch   run  echo  counter  name of the sender   payload   mac
      4       1        8      8     8      8     8      8     2 + up to 256 bytes              32

The mac is an HMAC-SHA-256 over all before it. Three things keep a recorded packet from being played back:

- `counter` rises with every packet of a process run; per sender the last 4,096 are remembered one by one, older ones are refused.
- `epoch` rises with every run of the sender; once a packet of a newer one was authenticated, older ones are refused. They are
  answered though (`Outdated`): a run that began with too low a number, or that was replaced, would not find out otherwise.
- `run` is a number that a process draws at its start, `echo` the receiver's `run` as the sender last heard it. So a process that
  has just started, and remembers nothing, still takes nothing that was sealed before its start, or for somebody else.

A packet without the right echo is `Unproven`: its payload is dropped, and the answer is any packet (an empty payload will do),
from which the sender learns what to echo.

Who knows the secret can speak for every node: the secret says that a packet comes from the cluster, not from which member of it.
The payload is not encrypted. Pure: the run's number is an argument.
"""

import hmac
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b, sha256

from kvrs.ids import NodeId
from kvrs.protocol.secrets import MIN_SECRET_BYTES, derive

MAX_PAYLOAD_BYTES = 1 << 16
WINDOW_PACKETS = 4096  # What may be overtaken by this many packets of its sender, over TCP for example, is still taken.
MAX_SENDERS = 4096  # Bounds what is remembered: about 700 bytes for each.
RUN_BYTES = 8

_MAGIC = b"KVRG"
_VERSION = 1
_MAC_BYTES = 32
_HEADER = struct.Struct("!4sB8s8sQ8s8sQH")
_MAX_NAME_BYTES = 256  # 64 characters.
_MIN_BYTES = _HEADER.size + 1 + _MAC_BYTES
MAX_OVERHEAD_BYTES = _HEADER.size + _MAX_NAME_BYTES + _MAC_BYTES  # How much longer than its payload a packet is, with any name.
_NO_ECHO = bytes(RUN_BYTES)
_SEEN_MASK = (1 << WINDOW_PACKETS) - 1


class Refusal(StrEnum):
    """Why a packet was dropped, in the order of the checks; each is counted."""

    OVERSIZED = "oversized"
    TRUNCATED = "truncated"
    NOT_GOSSIP = "not_gossip"
    VERSION = "version"
    CLUSTER = "cluster"
    KEY = "key"  # Sealed with a key that is not on the ring.
    FORGED = "forged"  # The mac is wrong: made without the key, or changed on its way.
    NAME = "name"  # The sender's name is not UTF-8.
    OWN = "own"  # Says that it comes from this node: played back to its sender, or two processes have one name.
    TOO_MANY_SENDERS = "too_many_senders"
    OLD_EPOCH = "old_epoch"
    TWIN = "twin"  # Another process with the same name and epoch is in use; the first one counts.
    REPLAYED = "replayed"
    BEHIND_WINDOW = "behind_window"  # Too old to say whether it was seen.
    UNPROVEN = "unproven"


@dataclass(frozen=True, slots=True)
class Opened:
    sender: NodeId
    payload: bytes


@dataclass(frozen=True, slots=True)
class Unproven:
    """Comes from the cluster, but nobody knows when: tell `sender` what to echo."""

    sender: NodeId


@dataclass(frozen=True, slots=True)
class Outdated:
    """Comes from a run of `sender` that another with a higher `epoch` has replaced, or from long ago."""

    sender: NodeId
    run: bytes
    epoch: int


class Keyring:
    """One key for each of the cluster's secrets: packets are sealed with the first, and opened with any.

    A secret is rotated without a gap in three steps, each at all nodes before the next: append the new one, move it to the front,
    remove the old one.
    """

    def __init__(self, secrets: Sequence[bytes]) -> None:
        assert secrets, "a key ring without a key"
        assert min(map(len, secrets)) >= MIN_SECRET_BYTES, f"a secret of less than {MIN_SECRET_BYTES} bytes"
        keys = [derive(secret, b"kvrs-gossip") for secret in secrets]
        # An id that is derived too says nothing of the key, and needs no book-keeping.
        self.by_id = {derive(key, b"id")[:8]: key for key in keys}
        self.sending_id, self.sending_key = next(iter(self.by_id.items()))


@dataclass(slots=True)
class _Sender:
    epoch: int
    run: bytes
    newest: int
    seen: int  # Bit i: packet `newest - i` was taken.
    older_run: bytes = b""  # The last older run that was heard, and its newest packet.
    older_counter: int = 0


class Seal:
    """One per process run; `epoch` is higher than in all earlier runs under this name."""

    def __init__(self, cluster: str, own: NodeId, epoch: int, run: bytes, keys: Keyring) -> None:
        self._own_name = own.encode()
        assert 0 < len(self._own_name) <= _MAX_NAME_BYTES, f"a name of {len(self._own_name)} bytes"
        assert len(run) == RUN_BYTES, f"a run's number of {len(run)} bytes"
        assert run != _NO_ECHO, "a run's number of zeros means none"
        self._cluster = blake2b(cluster.encode(), digest_size=8).digest()
        self._own, self._epoch, self._run, self._keys = own, epoch, run, keys
        self._counter = 0
        self._senders: dict[NodeId, _Sender] = {}
        self.refused: Counter[Refusal] = Counter()

    @property
    def senders(self) -> int:
        return len(self._senders)

    def use(self, keys: Keyring) -> None:
        """Rotate: the next packet is sealed and opened with these."""
        self._keys = keys

    def can_prove_to(self, node: NodeId) -> bool:
        """Whether it is known what to echo to the node: it was heard."""
        return node in self._senders

    def rise(self, epoch: int) -> None:
        """From now on this run has that epoch, which is not lower than before."""
        assert epoch >= self._epoch, f"epoch {epoch} after {self._epoch}"
        self._epoch = epoch

    def seal(self, to: NodeId, payload: bytes, run: bytes | None = None) -> bytes:
        """`run`: for that run of the receiver, and not for the one that is in use."""
        assert len(payload) <= MAX_PAYLOAD_BYTES, f"a payload of {len(payload)} bytes"
        self._counter += 1
        known = self._senders.get(to)
        header = _HEADER.pack(
            _MAGIC,
            _VERSION,
            self._cluster,
            self._keys.sending_id,
            self._epoch,
            self._run,
            run or (known.run if known else _NO_ECHO),
            self._counter,
            len(self._own_name),
        )
        sealed = b"".join((header, self._own_name, payload))
        return sealed + hmac.digest(self._keys.sending_key, sealed, sha256)

    def open(
        self, packet: bytes | memoryview, most_payload_bytes: int = MAX_PAYLOAD_BYTES
    ) -> Opened | Unproven | Outdated | Refusal:
        """The payload and who sent it; or why the packet is dropped, which is counted."""
        result = self._open(memoryview(packet), most_payload_bytes)
        match result:
            case Refusal():
                self.refused[result] += 1
            case Unproven():
                self.refused[Refusal.UNPROVEN] += 1
            case Outdated():
                self.refused[Refusal.OLD_EPOCH] += 1
        return result

    def _open(self, packet: memoryview, most_payload_bytes: int) -> Opened | Unproven | Outdated | Refusal:
        # Until the mac is found right, nothing of the packet is kept, copied or believed.
        if len(packet) > most_payload_bytes + MAX_OVERHEAD_BYTES:
            return Refusal.OVERSIZED
        if len(packet) < _MIN_BYTES:
            return Refusal.TRUNCATED
        magic, version, cluster, key_id, epoch, run, echo, counter, name_bytes = _HEADER.unpack_from(packet)
        payload_start, payload_end = _HEADER.size + name_bytes, len(packet) - _MAC_BYTES
        if magic != _MAGIC:
            return Refusal.NOT_GOSSIP
        if version != _VERSION:
            return Refusal.VERSION
        if cluster != self._cluster:
            return Refusal.CLUSTER
        if (key := self._keys.by_id.get(key_id)) is None:
            return Refusal.KEY
        if not name_bytes or payload_start > payload_end:
            return Refusal.TRUNCATED
        if not hmac.compare_digest(hmac.digest(key, packet[:payload_end], sha256), packet[payload_end:]):
            return Refusal.FORGED
        try:
            name = NodeId(str(packet[_HEADER.size : payload_start], "utf-8"))
        except UnicodeDecodeError:
            return Refusal.NAME
        if name == self._own:
            return Refusal.OWN
        if (refusal := self._take(name, epoch, run, counter)) is not None:
            return self._outdated(name, run, counter) if refusal is Refusal.OLD_EPOCH else refusal
        return Opened(name, bytes(packet[payload_start:payload_end])) if echo == self._run else Unproven(name)

    def _outdated(self, name: NodeId, run: bytes, counter: int) -> Outdated | Refusal:
        """Each packet of an older run is answered once at most: whoever recorded it could have us send for ever."""
        sender = self._senders[name]
        if sender.older_run == run and counter <= sender.older_counter:
            return Refusal.OLD_EPOCH
        sender.older_run, sender.older_counter = run, counter
        return Outdated(name, run, sender.epoch)

    def _take(self, name: NodeId, epoch: int, run: bytes, counter: int) -> Refusal | None:
        """Remember an authentic packet; why it is refused if it was seen, or may have been.

        What is unproven is remembered as well: its epoch was reached, whenever that was, and it is answered once only.
        """
        sender = self._senders.get(name)
        if sender is None and len(self._senders) >= MAX_SENDERS:
            return Refusal.TOO_MANY_SENDERS
        if sender is None or epoch > sender.epoch:
            self._senders[name] = _Sender(epoch, run, counter, seen=1)
            return None
        if epoch < sender.epoch:
            return Refusal.OLD_EPOCH
        if run != sender.run:
            return Refusal.TWIN
        age = sender.newest - counter
        if age >= WINDOW_PACKETS:
            return Refusal.BEHIND_WINDOW
        if age >= 0:
            if sender.seen >> age & 1:
                return Refusal.REPLAYED
            sender.seen |= 1 << age
            return None
        # A shift by more than the window would make a number as long as the sender likes.
        sender.seen = (sender.seen << min(-age, WINDOW_PACKETS) | 1) & _SEEN_MASK
        sender.newest = counter
        return None
