"""Section `gossip` of the configuration: how fast and how carefully nodes watch each other."""

from enum import StrEnum
from typing import Any

from pydantic import Field, model_validator

from kvrs.config.settings import Settings


class GossipProfile(StrEnum):
    """A set of defaults; keys set in the file override it."""

    LAN = "lan"  # The defaults below: one machine room.
    WAN = "wan"  # Round trips of up to half a second.
    # One machine: all paths are the loopback, so relays add little, and packets may be large.
    LOCAL = "local"


_DIFFERENCES: dict[str, dict[str, Any]] = {
    GossipProfile.LAN: {},
    GossipProfile.WAN: {
        "probe_interval_s": 2.5,
        "suspicion_mult": 3.0,
        "gossip_interval_s": 0.5,
        "fanout": 4,
        "sync_interval_s": 5.0,
        "reconnect_interval_s": 20.0,
    },
    GossipProfile.LOCAL: {
        "relays": 1,
        "retransmit_mult": 2,
        "gossip_interval_s": 0.05,
        "packet_bytes": 8192,
    },
}


class GossipSettings(Settings):
    """Settings of SWIM with Lifeguard; seconds are of the node's own time, without the time it was
    stopped.
    """

    # Agents and proxies are members; each node has an agent, whatever `backup.mode` is.
    enabled: bool = False
    profile: GossipProfile = Field(default=GossipProfile.LAN, strict=False)
    # One member is probed per interval, by up to three pings a third of it apart; a member that has
    # not answered at its end is suspected.
    probe_interval_s: float = Field(default=0.5, ge=0.05, le=60)
    # Members asked for an indirect ping (ping-req), with the second and the third ping.
    relays: int = Field(default=3, ge=0, le=16)
    # A suspicion that `confirmations` others confirm lasts suspicion_mult * log10(members)
    # intervals, and an unconfirmed one suspicion_max_mult times as long (Lifeguard section IV.B).
    suspicion_mult: float = Field(default=2.0, ge=0.5, le=20)
    suspicion_max_mult: float = Field(default=6.0, ge=1, le=20)
    confirmations: int = Field(default=3, ge=0, le=7)
    # Upper bound of the local health score (Lifeguard): timeouts grow by up to 1 + this factor.
    health_max: int = Field(default=8, ge=0, le=32)
    # Interval of pushed updates.
    gossip_interval_s: float = Field(default=0.1, ge=0.01, le=60)
    fanout: int = Field(default=3, ge=1, le=16)  # Members per push.
    # An update is also piggybacked on this many packets, times log10(members).
    retransmit_mult: int = Field(default=4, ge=1, le=16)
    # Interval of the exchange of records with a random member (anti-entropy),
    sync_interval_s: float = Field(default=1.0, ge=0.05, le=600)
    # and with a dead one.
    reconnect_interval_s: float = Field(default=5.0, ge=0.1, le=3600)
    # With addresses and authentication still below 1,400.
    packet_bytes: int = Field(default=1280, ge=1024, le=32768)
    # How long a deleted entry is remembered,
    tombstone_s: float = Field(default=60.0, ge=1, le=86400)
    forget_s: float = Field(default=3600.0, ge=10, le=604800)  # and a dead member.
    members_max: int = Field(default=4096, ge=2, le=65536)

    @model_validator(mode="before")
    @classmethod
    def _profile_below_what_is_named(cls, document: Any) -> Any:
        if not isinstance(document, dict):
            return document
        profile = document.get("profile", GossipProfile.LAN)
        # A profile of another type is refused with the other mistakes.
        return (
            {**_DIFFERENCES.get(profile, {}), **document} if isinstance(profile, str) else document
        )
