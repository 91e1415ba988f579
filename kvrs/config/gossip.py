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

    enabled: bool = False
    """Agents and proxies are members; each node has an agent, whatever `backup.mode` is."""
    profile: GossipProfile = Field(default=GossipProfile.LAN, strict=False)
    """Defaults of the keys below: lan (one machine room), wan (round trips up to 0.5 s), local (one
    machine).
    """
    probe_interval_s: float = Field(default=0.5, ge=0.05, le=60)
    """One member is probed per interval, by up to three pings a third of it apart, and suspected if
    it has not answered at its end.
    """
    relays: int = Field(default=3, ge=0, le=16)
    """Members asked for an indirect ping, with the second and the third ping."""
    suspicion_mult: float = Field(default=2.0, ge=0.5, le=20)
    """Length of a suspicion that `confirmations` others confirm, in intervals, times
    log10(members).
    """
    suspicion_max_mult: float = Field(default=6.0, ge=1, le=20)
    """An unconfirmed suspicion lasts this many times as long."""
    confirmations: int = Field(default=3, ge=0, le=7)
    """Other members that have to suspect it too."""
    health_max: int = Field(default=8, ge=0, le=32)
    """Upper bound of the local health score (Lifeguard): timeouts grow by up to 1 + this factor."""
    gossip_interval_s: float = Field(default=0.1, ge=0.01, le=60)
    """Interval of pushed updates."""
    fanout: int = Field(default=3, ge=1, le=16)
    """Members per push."""
    retransmit_mult: int = Field(default=4, ge=1, le=16)
    """An update is piggybacked on this many packets, times log10(members)."""
    sync_interval_s: float = Field(default=1.0, ge=0.05, le=600)
    """Interval of the exchange of records with a random member (anti-entropy)."""
    reconnect_interval_s: float = Field(default=5.0, ge=0.1, le=3600)
    """The same with a dead member."""
    packet_bytes: int = Field(default=1280, ge=1024, le=32768)
    """Largest packet; 1,280 and addresses and authentication are below 1,400."""
    tombstone_s: float = Field(default=60.0, ge=1, le=86400)
    """How long a deleted entry is remembered."""
    forget_s: float = Field(default=3600.0, ge=10, le=604800)
    """How long a dead member is remembered."""
    members_max: int = Field(default=4096, ge=2, le=65536)
    """Members beyond it are refused."""

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
