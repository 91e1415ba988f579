"""A member of the cluster on an event loop: `Gossip`, and around it a transport, a timer, and a log.

The epoch of a process run is the wall clock at its start, in nanoseconds: it rises without a file that would have to outlive the
process, and an agent's directory lies in memory, so a machine that was restarted finds nothing there. Nothing else depends on
that clock. Should it be set back between two runs of one name, the younger run is told by whoever it speaks to, and takes an
epoch above that of the older. Of two that run at once the older hears of the younger, and falls silent.
"""

import asyncio
import ipaddress
import logging
import random
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from kvrs.errors import GossipError
from kvrs.gossip.config import GossipSettings
from kvrs.gossip.events import Event, MemberChanged, Send, Superseded
from kvrs.gossip.facts import Fact, Facts, Kind
from kvrs.gossip.members import Member
from kvrs.gossip.node import Gossip
from kvrs.gossip.rates import Address
from kvrs.gossip.seal import RUN_BYTES, Keyring, Seal
from kvrs.gossip.transport import Limits, Transport
from kvrs.gossip.wire import Push, Statement, Status, decode, encode
from kvrs.ids import NodeId

log = logging.getLogger(__name__)

_CLUSTER = "kvrs"  # Clusters are told apart by their secrets.
_MAX_PORT = 65535


class Membership:
    """Hears and speaks from `start` to `close`; `heard` is called with all that becomes known, after the tables have it."""

    def __init__(
        self,
        me: NodeId,
        settings: GossipSettings,
        ring: Sequence[bytes],
        heard: Callable[[Event], None] = lambda _: None,
        *,
        clock: Callable[[], float] = time.monotonic,
        epoch: int | None = None,
    ) -> None:
        """`ring`: the cluster's secrets, the one in use first."""
        self.id = me
        self.malformed = 0  # Authentic packets that were none of ours.
        self.sent: Counter[str] = Counter()  # Packets and bytes, before they are sealed.
        self._settings = settings
        self._heard = heard
        self._clock = clock
        self._epoch = time.time_ns() if epoch is None else epoch
        self._seal = Seal(_CLUSTER, me, self._epoch, _run_number(), Keyring(ring))
        limits = Limits(datagram_payload_bytes=settings.packet_bytes)
        self._transport = Transport(self._seal, self._where, self._receive, clock, limits, self._news_for)
        self._timer: asyncio.TimerHandle | None = None
        self._gossip: Gossip | None = None

    async def start(self, host: str, port: int, seeds: Mapping[NodeId, str]) -> int:
        """Join by those whose addresses are known; the port that it listens on.

        Raises:
            OSError: the port is not to be had.
        """
        bound = await self._transport.start(host, port)
        address, draw = f"{host}:{bound}", random.SystemRandom().random
        self._gossip = Gossip(self.id, address, self._epoch, self._settings, draw, self._clock(), seeds)
        self._go_on(self._gossip.tick(self._clock()))
        return bound

    async def close(self) -> None:
        """Say goodbye: whoever leaves on purpose has not died."""
        if self._gossip is None:
            return
        if not self._gossip.over:
            self._go_on(self._gossip.leave(self._clock()))
        if self._timer is not None:
            self._timer.cancel()
        await self._transport.close()
        self._gossip = None

    # What this node says.

    def publish(self, name: str, fact: Fact) -> None:
        """Raises GossipError: the record is full, or the fact cannot be carried."""
        self._live.publish(name, fact, self._clock())

    def withdraw(self, kind: Kind, name: str) -> None:
        self._live.withdraw(kind, name, self._clock())

    def doubt(self, node: NodeId) -> None:
        """A broken connection says that the node may be gone: it is probed now."""
        self._go_on(self._live.doubt(node, self._clock()))

    # What is known; no call of these waits for anything.

    @property
    def members(self) -> Mapping[NodeId, Member]:
        return self._live.members

    @property
    def health(self) -> int:
        """0: this node trusts itself."""
        return self._live.health

    @property
    def facts(self) -> Facts:
        return self._live.facts

    def is_dead(self, node: NodeId) -> bool:
        """Whether the cluster holds it dead; of whom nothing was ever heard, nobody says so."""
        member = self._live.members.get(node)
        return member is not None and member.status is Status.DEAD

    def count(self, status: Status) -> int:
        return sum(member.status is status for member in self._live.members.values())

    def drops(self) -> dict[str, int]:
        """Packets that were not taken or not sent, by why."""
        refused = {str(why): count for why, count in self._seal.refused.items()}
        dropped = {str(why): count for why, count in self._transport.dropped.items()}
        return refused | dropped | {"malformed": self.malformed}

    def describe(self) -> dict[str, Any]:
        """Plain data for people and tests: who is a member, by whose word, and what each says of itself."""
        gossip, now_s = self._live, self._clock()
        records: dict[NodeId, dict[str, dict[str, Any]]] = {}
        for kind, node, name, report in gossip.facts.all():
            fields = {field: getattr(report.fact, field) for field in report.fact.__struct_fields__}
            shown = fields | {"written_s_ago": now_s - report.written_s}
            records.setdefault(node, {}).setdefault(kind.name.lower(), {})[name] = shown
        return {
            "id": self.id,
            "epoch": gossip.epoch,
            "health": gossip.health,
            "over": gossip.over,
            "sent": dict(self.sent),
            "dropped": self.drops(),
            "members": [_shown(member, records.get(member.id, {})) for member in gossip.members.values()],
        }

    @property
    def _live(self) -> Gossip:
        assert self._gossip is not None, "not started, or closed"
        return self._gossip

    def _where(self, node: NodeId) -> Address | None:
        address = None if self._gossip is None else self._gossip.address_of(node)
        return None if address is None else parse_address(address)

    def _receive(self, sender: NodeId, payload: bytes) -> None:
        if self._gossip is None:
            return
        try:
            packet = decode(payload)
        except GossipError:
            self.malformed += 1
            return
        self._go_on(self._gossip.handle(packet, sender, self._clock()))

    def _news_for(self, node: NodeId, epoch: int) -> bytes:
        """What an older process of that name hears; or a younger one, which began with too low an epoch."""
        me = self._live.members[self.id]
        return encode(Push(me.epoch, me.incarnation, (Statement(node, epoch, 0, Status.ALIVE, ""),)))

    def _tick(self) -> None:
        self._timer = None
        self._go_on(self._live.tick(self._clock()))

    def _go_on(self, sends: list[Send]) -> None:
        self._seal.rise(self._live.epoch)
        for send in sends:
            payload = encode(send.packet)
            self.sent["packets"] += 1
            self.sent["bytes"] += len(payload)
            self._transport.send(send.to, payload, stream=send.stream)
        for event in self._live.take_events():
            _note(event)
            self._heard(event)
        self._set_timer()

    def _set_timer(self) -> None:
        gossip = self._live
        if gossip.over:
            return
        loop = asyncio.get_running_loop()
        due_s = loop.time() + max(0.0, gossip.next_tick_s - self._clock())
        # One that comes too early does no harm, so only one that would come too late is set anew.
        if self._timer is not None:
            if self._timer.when() <= due_s:
                return
            self._timer.cancel()
        self._timer = loop.call_at(due_s, self._tick)


def _shown(member: Member, record: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": member.id,
        "status": member.status.name.lower(),
        "epoch": member.epoch,
        "incarnation": member.incarnation,
        "address": member.address,
        "by": list(member.by),
        "record": record,
    }


def _note(event: Event) -> None:
    match event:
        case MemberChanged(id, epoch, _, status, by):
            level = logging.WARNING if status in (Status.SUSPECT, Status.DEAD) else logging.INFO
            facts = {"member": id, "status": status.name.lower(), "epoch": epoch, "by": ",".join(by)}
            log.log(level, "member changed", extra=facts)
        case Superseded(epoch):
            log.error("another process runs under this name; this one is silent from now on", extra={"epoch": epoch})


def _run_number() -> bytes:
    while not any(run := secrets.token_bytes(RUN_BYTES)):  # Zeros mean none.
        pass
    return run


@lru_cache(4096)
def parse_address(text: str) -> Address | None:
    """`host:port` with a numeric host; None for anything else: a member's word must not make us look names up."""
    host, _, port = text.rpartition(":")
    try:
        ipaddress.ip_address(host)
        number = int(port)
    except ValueError:
        return None
    return (host, number) if 0 < number <= _MAX_PORT else None
