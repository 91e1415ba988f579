"""Section `gossip` of the configuration: how fast and how carefully nodes watch each other."""

from enum import StrEnum
from typing import Any

from pydantic import Field, model_validator

from kvrs.settings import Settings


class Profile(StrEnum):
    """A set of defaults; whatever the file names itself goes before it."""

    LAN = "lan"  # The defaults below: one machine room.
    WAN = "wan"  # Round trips of up to half a second.
    LOCAL = "local"  # One machine: no path but the loopback, so relays say little, and packets may be large.


_DIFFERENCES: dict[str, dict[str, Any]] = {
    Profile.LAN: {},
    Profile.WAN: {
        "probe_interval_s": 2.5,
        "suspicion_mult": 3.0,
        "gossip_interval_s": 0.5,
        "fanout": 4,
        "sync_interval_s": 5.0,
        "reconnect_interval_s": 20.0,
    },
    Profile.LOCAL: {"relays": 1, "retransmit_mult": 2, "gossip_interval_s": 0.05, "packet_bytes": 8192},
}


class GossipSettings(Settings):
    """Seconds are of the node's own time: what it slept through does not count."""

    enabled: bool = False  # Agents and proxies are members; each node has an agent, whatever `backup.mode` is.
    profile: Profile = Field(default=Profile.LAN, strict=False)
    # One member is probed per interval, by up to three pings a third of it apart; who is still silent at its end is suspected.
    probe_interval_s: float = Field(default=0.5, ge=0.05, le=60)
    relays: int = Field(default=3, ge=0, le=16)  # Asked to ping on our behalf, anew with the second and the third ping.
    # A suspicion that nobody confirms lasts suspicion_max_mult times as long as one that `confirmations` others confirm, and
    # that one suspicion_mult * log10(members) intervals.
    suspicion_mult: float = Field(default=2.0, ge=0.5, le=20)
    suspicion_max_mult: float = Field(default=6.0, ge=1, le=20)
    confirmations: int = Field(default=3, ge=0, le=7)
    health_max: int = Field(default=8, ge=0, le=32)  # A node in doubt of itself probes this many times slower, and once more.
    gossip_interval_s: float = Field(default=0.1, ge=0.01, le=60)  # News waits this long for more news, then it is pushed.
    fanout: int = Field(default=3, ge=1, le=16)  # To how many at a time.
    retransmit_mult: int = Field(default=4, ge=1, le=16)  # News also rides on this many packets, times log10(members).
    sync_interval_s: float = Field(default=1.0, ge=0.05, le=600)  # Records are compared with one other node this often,
    reconnect_interval_s: float = Field(default=5.0, ge=0.1, le=3600)  # and with one that is held dead this often.
    packet_bytes: int = Field(default=1280, ge=1024, le=32768)  # With addresses and authentication still below 1,400.
    tombstone_s: float = Field(default=60.0, ge=1, le=86400)  # How long a node remembers what it has taken out of its record,
    forget_s: float = Field(default=3600.0, ge=10, le=604800)  # and everybody who is dead.
    members_max: int = Field(default=4096, ge=2, le=65536)

    @model_validator(mode="before")
    @classmethod
    def _profile_below_what_is_named(cls, document: Any) -> Any:
        if not isinstance(document, dict):
            return document
        profile = document.get("profile", Profile.LAN)
        # What is no word at all is refused with the rest.
        return {**_DIFFERENCES.get(profile, {}), **document} if isinstance(profile, str) else document
