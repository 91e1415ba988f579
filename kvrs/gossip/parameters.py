"""Parameters of SWIM with Lifeguard; only the probe interval is a setting.

Other intervals are multiples of the probe interval, so that a longer one suits longer round trips
as a whole. Seconds are of the node's own time, without the time it was stopped.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    # One member is probed per interval, by up to three pings a third of it apart, and suspected if
    # it has not answered at its end.
    probe_interval_s: float = 0.5
    # Members asked for an indirect ping, with the second and the third ping.
    relays: int = 3
    # Length of a suspicion that `confirmations` others confirm, in intervals, times log10(members).
    suspicion_mult: float = 2.0
    # An unconfirmed suspicion lasts this many times as long.
    suspicion_max_mult: float = 6.0
    # Other members that have to suspect it too.
    confirmations: int = 3
    # Upper bound of the local health score (Lifeguard): timeouts grow by up to 1 + this factor.
    health_max: int = 8
    # Members per push.
    fanout: int = 3
    # An update is piggybacked on this many packets, times log10(members).
    retransmit_mult: int = 4
    # Largest packet; 1,280 and addresses and authentication are below 1,400.
    packet_bytes: int = 1280
    # How long a deleted entry is remembered, and a dead member.
    tombstone_s: float = 60.0
    forget_s: float = 3600.0
    # Members beyond it are refused.
    members_max: int = 4096

    @property
    def gossip_interval_s(self) -> float:
        """Interval of pushed updates."""
        return self.probe_interval_s / 5

    @property
    def sync_interval_s(self) -> float:
        """Interval of the exchange of records with a random member (anti-entropy)."""
        return self.probe_interval_s * 2

    @property
    def reconnect_interval_s(self) -> float:
        """The same with a dead member."""
        return self.probe_interval_s * 10
