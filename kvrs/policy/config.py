"""Section `policy` and `slo` of the configuration."""

from enum import StrEnum

from pydantic import Field

from kvrs.settings import Settings


class PolicyName(StrEnum):
    ALWAYS_MIGRATE = "always_migrate"
    ALWAYS_RECOMPUTE = "always_recompute"
    ROM = "rom"
    AUTO = "auto"


class RecoverySettings(Settings):
    wait_s: float = Field(default=30.0, ge=0, le=3600)  # How long a stream waits for an instance to come up.
    retry_pause_s: float = Field(default=0.05, ge=0, le=60)  # Before the only instance is tried again; doubles each time, to 2 s.
    max_attempts: int = Field(default=8, ge=1, le=100)  # Per stream; a poisoned request must not kill the whole cluster.


class PolicySettings(Settings):
    name: PolicyName = Field(default=PolicyName.AUTO, strict=False)
    slots_max: int = Field(default=32, ge=1, le=1024)  # Recovery transfers into one target at a time (seed KVRS).
    slot_lease_s: float = Field(default=30.0, gt=0, le=3600)  # A transfer that outlives its slot is given up.
    assumed_link_bytes_per_s: float = Field(default=1.25e9, gt=0)  # Until a link is measured: 10 Gbit/s.
    handshake_s: float = Field(default=0.002, ge=0, le=10)  # Connect, authenticate, ask: before the first page moves.
    recovery: RecoverySettings = RecoverySettings()


class SloSettings(Settings):
    abort: bool = False  # Give up at once on a stream that no option can bring back within its budget.
    recovery_gap_s: float = Field(default=10.0, gt=0, le=3600)  # Longest pause that a client should see.
