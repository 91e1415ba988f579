"""Sends packets that must be rejected to the authenticator of gossip (a million), a part of them
to real sockets.

    python -m experiments.gossip_fuzz.run [--packets N] [--datagrams N] [--streams N] [--seed N]

Every packet must be rejected and counted, valid packets in between must be accepted, and memory
must not grow. The exit status is 1 otherwise. Writes
`gossip_fuzz.json` and `gossip_fuzz.txt` into `results/`.
"""

import argparse
import asyncio
import resource
import socket
import struct
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import uvloop

from experiments.record import Record
from kvrs.gossip.authenticator import (
    MAX_OVERHEAD_BYTES,
    MAX_PAYLOAD_BYTES,
    WINDOW_PACKETS,
    Keyring,
    Opened,
    PacketAuthenticator,
    Rates,
    Rejection,
)
from kvrs.gossip.transport import Drop, Limits, Transport
from kvrs.ids import NodeId

RESULTS = Path(__file__).parent / "results"
SECRET, FOREIGN_SECRET = b"secret of the cluster", b"secret of another cluster"
OWN, MEMBER = NodeId("n0"), NodeId("n1")
TRUE_EVERY = 1000  # One valid packet after so many bad ones.
MOST_GROWTH_BYTES = (
    4 << 20
)  # The memory of a whole table of senders; the packets together are hundreds of times that.
UNLIMITED = Rates(member_per_s=1e9, unknown_per_s=1e9, total_per_s=1e9)
DATAGRAM_PAYLOAD_BYTES = Limits().datagram_payload_bytes
DATAGRAM_BYTES = DATAGRAM_PAYLOAD_BYTES + MAX_OVERHEAD_BYTES
LENGTH = struct.Struct("!I")


def seal_of(node: NodeId, epoch: int, run: int, secret: bytes = SECRET) -> PacketAuthenticator:
    return PacketAuthenticator(node, epoch, run.to_bytes(8, "big"), Keyring([secret]))


class Attacker:
    """Has recorded all packets to `victim`, but not the secret."""

    def __init__(self, victim: PacketAuthenticator, random: Random) -> None:
        self.random = random
        self.member = seal_of(MEMBER, epoch=2, run=12)
        self._foreign = seal_of(MEMBER, epoch=9, run=14, secret=FOREIGN_SECRET)
        self._to_others = seal_of(NodeId("n2"), epoch=1, run=15)
        earlier = seal_of(MEMBER, epoch=1, run=11)
        for seal in (earlier, self.member):
            victim.open(seal.seal(OWN, b""))
            assert isinstance(seal.open(victim.seal(MEMBER, b"")), Opened)
            if seal is earlier:
                self._of_old_epoch = [seal.seal(OWN, self._payload()) for _ in range(200)]
        self.taken: deque[bytes] = deque(maxlen=2 * WINDOW_PACKETS)
        for _ in range(2 * WINDOW_PACKETS):
            assert isinstance(victim.open(self.true_packet()), Opened)
        # Authentic and never seen by the victim, but not for it: each costs one answer and is a
        # replay from then on.
        self._not_for_victim = [
            self._to_others.seal(NodeId("n3"), self._payload()) for _ in range(200)
        ]
        self._kinds: list[Callable[[], bytes]] = [
            self._flipped,
            self._overwritten,
            self._foreign_key,
            self._replayed,
            self._old,
            self._elsewhere,
            self._truncated,
            self._lengthened,
            self._oversized,
            self._garbage,
            self._garbage_behind_header,
            self._claimed_name,
        ]

    def true_packet(self) -> bytes:
        packet = self.member.seal(OWN, self._payload())
        self.taken.append(packet)
        return packet

    def bad_packets(self, count: int) -> Iterator[tuple[str, bytes]]:
        for _ in range(count):
            kind = self.random.choice(self._kinds)
            yield kind.__name__.strip("_"), kind()

    def _payload(self) -> bytes:
        return self.random.randbytes(self.random.choice((0, 1, 40, 300, 1200)))

    def _recorded(self) -> bytes:
        return self.random.choice(self.taken)

    def _flipped(self) -> bytes:
        packet = bytearray(self._recorded())
        packet[self.random.randrange(len(packet))] ^= 1 << self.random.randrange(8)
        return bytes(packet)

    def _overwritten(self) -> bytes:
        packet = bytearray(self._recorded())
        start = self.random.randrange(len(packet))
        patch = self.random.randbytes(self.random.randint(1, 16))
        packet[start : start + len(patch)] = patch
        # The rare patch that changes nothing makes a replay.
        return bytes(packet)

    def _foreign_key(self) -> bytes:
        packet = self._foreign.seal(OWN, self._payload())
        if self.random.random() < 0.5:
            # With the id of the cluster's key.
            packet = packet[:13] + self._recorded()[13:21] + packet[21:]
        return packet

    def _replayed(self) -> bytes:
        return self._recorded()

    def _old(self) -> bytes:
        return self.random.choice(self._of_old_epoch)

    def _elsewhere(self) -> bytes:
        return self.random.choice(self._not_for_victim)

    def _truncated(self) -> bytes:
        packet = self._recorded()
        return packet[: self.random.randrange(len(packet))]

    def _lengthened(self) -> bytes:
        return self._recorded() + self.random.randbytes(self.random.randint(1, 64))

    def _oversized(self) -> bytes:
        return self._recorded() + bytes(DATAGRAM_BYTES + self.random.randrange(10_000))

    def _garbage(self) -> bytes:
        return self.random.randbytes(self.random.randrange(DATAGRAM_BYTES))

    def _garbage_behind_header(self) -> bytes:
        packet = self._recorded()
        return packet[: self.random.randrange(len(packet))] + self.random.randbytes(
            self.random.randrange(200)
        )

    def _claimed_name(self) -> bytes:
        """The length field of the sender's name is too large or too small."""
        packet = bytearray(self._recorded())
        packet[54] = self.random.randrange(256)
        return bytes(packet)


def fuzz_opener(packets: int, seed: int) -> dict[str, Any]:
    victim = seal_of(OWN, epoch=1, run=10)
    attacker = Attacker(victim, Random(seed))
    known = len(victim.senders)
    kinds: Counter[str] = Counter()
    taken, true_taken = 0, 0
    before_bytes, before = 0, victim.rejected.copy()
    started_s = time.perf_counter()
    for n, (kind, packet) in enumerate(attacker.bad_packets(packets)):
        if n == packets // 100:
            before_bytes = rss_bytes()
        if n % TRUE_EVERY == 0:
            true_taken += isinstance(victim.open(attacker.true_packet()), Opened)
        kinds[kind] += 1
        taken += isinstance(victim.open(packet, DATAGRAM_PAYLOAD_BYTES), Opened)
    return {
        "packets": packets,
        "taken": taken,
        "dropped_and_counted": (victim.rejected - before).total(),
        "by_reason": by_name(victim.rejected - before),
        "by_kind": dict(sorted(kinds.items())),
        "true_packets_between": -(-packets // TRUE_EVERY),
        "true_packets_taken": true_taken,
        "senders_remembered": len(victim.senders),
        "senders_expected": known + 1,
        "growth_bytes": rss_bytes() - before_bytes,
        "seconds": round(time.perf_counter() - started_s, 1),
    }


class Target:
    """A transport that listens, with its counters."""

    def __init__(self, limits: Limits) -> None:
        self.seal = seal_of(OWN, epoch=1, run=10)
        self.heard = 0
        self.transport = Transport(self.seal, lambda node: None, self._hear, time.monotonic, limits)

    def _hear(self, sender: NodeId, payload: bytes) -> None:
        self.heard += 1

    def begin(self) -> None:
        """Count from now on."""
        self._before = self.seal.rejected.copy()

    def reasons(self) -> dict[str, int]:
        return by_name(self.seal.rejected - self._before) | by_name(self.transport.dropped)

    def counted(self) -> int:
        return sum(self.reasons().values())

    async def until(self, counted: int, heard: int = 0) -> None:
        async with asyncio.timeout(30):
            while self.counted() < counted or self.heard < heard:
                await asyncio.sleep(0)


async def fuzz_datagrams(datagrams: int, seed: int) -> dict[str, Any]:
    """Every packet is really checked: without rate limits, and not sent faster than it is read."""
    target = Target(Limits(rates=UNLIMITED))
    attacker = Attacker(target.seal, Random(seed))
    port = await target.transport.start()
    target.begin()
    before_bytes, true_sent = rss_bytes(), 0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.connect(("127.0.0.1", port))
        for n, (_, packet) in enumerate(attacker.bad_packets(datagrams)):
            sender.send(packet)
            if n % TRUE_EVERY == 0:
                sender.send(attacker.member.seal(OWN, b"true"))
                true_sent += 1
            if n % 64 == 63:
                await target.until(counted=n + 1)
        await target.until(datagrams, true_sent)
    await target.transport.close()
    return {
        "packets": datagrams,
        "dropped_and_counted": target.counted(),
        "by_reason": target.reasons(),
        "true_packets_between": true_sent,
        "true_packets_taken": target.heard,
        "growth_bytes": rss_bytes() - before_bytes,
    }


async def fuzz_flood(datagrams: int, seed: int) -> dict[str, Any]:
    """Flood with the usual limits, while a member goes on sending."""
    target = Target(Limits())
    attacker = Attacker(target.seal, Random(seed))
    port = await target.transport.start()
    bad = [packet for _, packet in attacker.bad_packets(2000)]
    target.begin()
    before_bytes, true_sent = rss_bytes(), 0
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as flooder,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as member,
    ):
        for sender in (flooder, member):
            sender.connect(("127.0.0.1", port))
        member.send(attacker.member.seal(OWN, b"known from now on"))
        await target.until(counted=0, heard=1)
        started_s = time.perf_counter()
        for n in range(datagrams):
            flooder.send(bad[n % len(bad)])
            if n % TRUE_EVERY == 0:
                member.send(attacker.member.seal(OWN, b"true"))
                true_sent += 1
            if n % 32 == 31:
                await asyncio.sleep(0)
        seconds = time.perf_counter() - started_s
        await asyncio.sleep(0.5)
    dropped = target.transport.dropped[Drop.RATE]
    looked_at = target.counted() - dropped
    await target.transport.close()
    return {
        "packets": datagrams,
        "packets_per_s": round(datagrams / seconds),
        "dropped_by_rate": dropped,
        "looked_at": looked_at,
        "looked_at_most": round(Rates().unknown_per_s * (Rates().burst_s + seconds + 1)),
        "lost_in_the_kernel": datagrams - dropped - looked_at,
        "true_packets_between": true_sent,
        "true_packets_taken": target.heard - 1,
        "growth_bytes": rss_bytes() - before_bytes,
    }


async def fuzz_streams(streams: int, seed: int) -> dict[str, Any]:
    """Connections with bad packets, bad lengths, and ends at any place."""
    target = Target(Limits(rates=UNLIMITED, stream_s=0.3))
    random = Random(seed)
    attacker = Attacker(target.seal, random)
    port = await target.transport.start()
    target.begin()
    before_bytes = rss_bytes()
    kinds: Counter[str] = Counter()
    packets = enumerate(packet for _, packet in attacker.bad_packets(streams))

    async def one(packet: bytes, kind: str) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(packet)
            if kind == "cut":
                writer.write_eof()
            async with asyncio.timeout(30):
                await reader.read()
        except (ConnectionError, TimeoutError) as error:
            kinds["not closed" if isinstance(error, TimeoutError) else "reset"] += 1
        finally:
            writer.transport.abort()

    async def work() -> None:
        nonlocal before_bytes
        for n, packet in packets:
            if n == streams // 10:
                before_bytes = rss_bytes()
            kind = random.choices(("whole", "too long", "cut", "slow"), (70, 15, 14, 1))[0]
            kinds[kind] += 1
            await one(framed(packet, kind, random), kind)

    await asyncio.gather(*(work() for _ in range(6)))
    await asyncio.sleep(0.5)  # The last ones are still being closed.
    await target.transport.close()
    return {
        "connections": streams,
        "taken": target.heard,
        # After an unproven packet the connection waits for another one, and is counted a second
        # time when none comes.
        "dropped_and_counted": target.counted() - target.reasons().get(Rejection.UNPROVEN, 0),
        "by_reason": target.reasons(),
        "by_kind": dict(sorted(kinds.items())),
        "growth_bytes": rss_bytes() - before_bytes,
    }


def framed(packet: bytes, kind: str, random: Random) -> bytes:
    match kind:
        case "too long":
            return (
                LENGTH.pack(
                    random.randint(MAX_PAYLOAD_BYTES + MAX_OVERHEAD_BYTES + 1, (1 << 32) - 1)
                )
                + packet
            )
        case "cut":
            whole = LENGTH.pack(len(packet)) + packet
            return whole[: random.randint(1, max(len(whole) - 1, 3))]
        case "slow":
            return LENGTH.pack(len(packet) + 1) + packet
        case _:
            return LENGTH.pack(len(packet)) + packet


def by_name(counts: Counter[Rejection] | Counter[Drop]) -> dict[str, int]:
    return {str(reason): count for reason, count in sorted(counts.items())}


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def faults_of(result: dict[str, Any]) -> Iterator[str]:
    opener, datagrams, flood, streams = (
        result[part] for part in ("opener", "datagrams", "flood", "streams")
    )
    for name, part, wanted in (
        ("opener", opener, opener["packets"]),
        ("datagrams", datagrams, datagrams["packets"]),
        ("streams", streams, streams["connections"]),
    ):
        if part["dropped_and_counted"] != wanted:
            yield f"{name}: {part['dropped_and_counted']} of {wanted} dropped and counted"
    for name, part in (("opener", opener), ("datagrams", datagrams), ("flood", flood)):
        if part["true_packets_taken"] != part["true_packets_between"]:
            yield (
                f"{name}: {part['true_packets_taken']} of {part['true_packets_between']} "
                f"true packets taken"
            )
    if opener["taken"] or streams["taken"]:
        yield "a bad packet was taken"
    if opener["senders_remembered"] > opener["senders_expected"]:
        yield "opener: a sender is remembered that never was"
    if flood["looked_at"] > flood["looked_at_most"]:
        yield (
            f"flood: {flood['looked_at']} packets looked at, at most "
            f"{flood['looked_at_most']} are allowed"
        )
    for name, part in result.items():
        if isinstance(part, dict) and part["growth_bytes"] > MOST_GROWTH_BYTES:
            yield f"{name}: memory grew by {part['growth_bytes']} bytes"


def as_text(result: dict[str, Any]) -> str:
    lines = []
    for name, part in result.items():
        if not isinstance(part, dict):
            continue
        lines.append(f"{name}:")
        for key, value in part.items():
            shown = (
                ", ".join(f"{what} {count:,}" for what, count in value.items())
                if isinstance(value, dict)
                else f"{value:,}"
            )
            lines.append(f"  {key:24} {shown}")
    lines.append("faults: " + ("; ".join(result["faults"]) or "none"))
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--packets", type=int, default=1_000_000)
    parser.add_argument("--datagrams", type=int, default=100_000)
    parser.add_argument("--streams", type=int, default=5_000)
    parser.add_argument("--seed", type=int, default=6)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    record, seed = Record(arguments.seed, timed=False), arguments.seed
    result: dict[str, Any] = {
        "opener": fuzz_opener(arguments.packets, seed),
        "datagrams": uvloop.run(fuzz_datagrams(arguments.datagrams, seed + 1)),
        "flood": uvloop.run(fuzz_flood(arguments.datagrams * 3, seed + 2)),
        "streams": uvloop.run(fuzz_streams(arguments.streams, seed + 3)),
    }
    result["faults"] = list(faults_of(result))
    text = as_text(result)
    print(text, end="")
    record.keep(arguments.out, "gossip_fuzz", result, text)
    sys.exit(bool(result["faults"]))


if __name__ == "__main__":
    main()
