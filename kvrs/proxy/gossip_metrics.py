"""What the proxy tells Prometheus of its gossip."""

from prometheus_client import CollectorRegistry, Gauge

from kvrs.gossip.membership import Membership
from kvrs.gossip.wire import Status


class GossipMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._members = Gauge("kvrs_gossip_members", "Members by status.", ["status"], registry=registry)
        self._health = Gauge(
            "kvrs_gossip_health", "0: this proxy trusts itself; higher: it gives others more time.", registry=registry
        )
        self._sent_packets = Gauge("kvrs_gossip_sent_packets", "Since the start.", registry=registry)
        self._sent_bytes = Gauge("kvrs_gossip_sent_bytes", "Since the start, without what authenticates them.", registry=registry)
        self._dropped = Gauge(
            "kvrs_gossip_dropped_packets", "Since the start, received or to be sent, by why.", ["why"], registry=registry
        )
        self._unread = Gauge("kvrs_gossip_unread_facts", "That could not be read, since the start.", registry=registry)

    def measure(self, membership: Membership) -> None:
        for status in Status:
            self._members.labels(status.name.lower()).set(membership.count(status))
        self._health.set(membership.health)
        self._sent_packets.set(membership.sent["packets"])
        self._sent_bytes.set(membership.sent["bytes"])
        for why, count in membership.drops().items():
            self._dropped.labels(why).set(count)
        self._unread.set(membership.facts.unread)
