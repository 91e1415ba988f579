"""Section `policy` and `slo` of the configuration."""

from enum import StrEnum

from pydantic import Field

from kvrs.settings import Settings


class PolicyName(StrEnum):
    ALWAYS_MIGRATE = "always_migrate"
    ALWAYS_RECOMPUTE = "always_recompute"
    ALWAYS_RESTORE = "always_restore"  # From a checkpoint; without one as always_recompute.
    ROM = "rom"
    AUTO = "auto"


class Handoff(StrEnum):
    """Which decode instance gets a hand-off, once prefill is done."""

    OWN_PAIR = "own_pair"  # As planned at the start.
    ROM = "rom"  # Seed KVRS: the own decode queue against transfer plus a remote queue.
    AUTO = "auto"  # The same with hand-shake, what is on the link already, and every bounded candidate.


class Dispatch(StrEnum):
    """Where the victims of one event go."""

    REBALANCE = "rebalance"  # To their holders, then LUMEN's rebalancing.
    HOLDERS = "holders"  # To their holders, however many that are.
    LEAST_LOADED = "least_loaded"  # Wherever the fewest streams are.


class Degraded(StrEnum):
    """What becomes of an instance whose GPU is slower than it should be, or has a repair due."""

    IGNORE = "ignore"
    DRAIN = "drain"  # It gets no new streams, as long as there is another one.


class Failing(StrEnum):
    """What becomes of an instance whose GPU is likely to take along what runs on it."""

    DRAIN = "drain"
    MOVE = "move"  # Its streams are recovered elsewhere while it still runs.


class GpuSettings(Settings):
    degraded: Degraded = Field(default=Degraded.IGNORE, strict=False)
    failing: Failing = Field(default=Failing.MOVE, strict=False)


class RecoverySettings(Settings):
    wait_s: float = Field(default=30.0, ge=0, le=3600)  # How long a stream waits for an instance to come up.
    gather_s: float = Field(default=0.01, ge=0, le=10)  # Losses this near to each other are one event.
    retry_pause_s: float = Field(default=0.05, ge=0, le=60)  # Before the only instance is tried again; doubles each time, to 2 s.
    max_attempts: int = Field(default=8, ge=1, le=100)  # Per stream; a poisoned request must not kill the whole cluster.


class PolicySettings(Settings):
    name: PolicyName = Field(default=PolicyName.AUTO, strict=False)
    handoff: Handoff = Field(default=Handoff.OWN_PAIR, strict=False)
    dispatch: Dispatch = Field(default=Dispatch.REBALANCE, strict=False)
    correction_max: float = Field(
        default=4.0, ge=1, le=100
    )  # Predictions are corrected by at most this factor, either way. 1: never.
    slots_max: int = Field(default=32, ge=1, le=1024)  # Recovery transfers into one target at a time (seed KVRS).
    slot_lease_s: float = Field(default=30.0, gt=0, le=3600)  # A transfer that outlives its slot is given up.
    assumed_link_bytes_per_s: float = Field(default=1.25e9, gt=0)  # Until a link is measured: 10 Gbit/s.
    handshake_s: float = Field(default=0.002, ge=0, le=10)  # Connect, authenticate, ask: before the first page moves.
    recovery: RecoverySettings = RecoverySettings()
    gpu: GpuSettings = GpuSettings()


class SloSettings(Settings):
    abort: bool = False  # Give up at once on a stream that no option can bring back within its budget.
    # Clients override each with a header: x-kvrs-ttft-s, x-kvrs-recovery-gap-s, x-kvrs-deadline-s.
    ttft_s: float | None = Field(default=None, gt=0, le=86400)  # Until the first token.
    recovery_gap_s: float = Field(default=10.0, gt=0, le=3600)  # Longest pause that a client should see.
    deadline_s: float | None = Field(default=None, gt=0, le=86400)  # Until the last token.
