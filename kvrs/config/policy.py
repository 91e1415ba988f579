"""Section `policy` and `slo` of the configuration."""

from enum import StrEnum

from pydantic import Field

from kvrs.config.settings import Settings


class PolicyName(StrEnum):
    ALWAYS_MIGRATE = "always_migrate"
    ALWAYS_RECOMPUTE = "always_recompute"
    ALWAYS_RESTORE = "always_restore"  # From a checkpoint; without one as always_recompute.
    ROM = "rom"
    AUTO = "auto"


class Handoff(StrEnum):
    """The decode instance that gets a hand-off, once prefill is done."""

    OWN_PAIR = "own_pair"  # As planned at the start.
    ROM = "rom"  # Seed KVRS: its own decode queue against transfer plus a remote queue.
    # The same with hand-shake, bytes already on the link, and several candidates.
    AUTO = "auto"


class Dispatch(StrEnum):
    """The targets of the victims of one event."""

    REBALANCE = "rebalance"  # To their holders, then LUMEN's rebalancing.
    HOLDERS = "holders"  # To their holders, without a limit.
    LEAST_LOADED = "least_loaded"  # To the instances with the fewest streams.


class Degraded(StrEnum):
    """Treatment of an instance whose GPU is slower than it should be, or has a repair due."""

    IGNORE = "ignore"
    DRAIN = "drain"  # It gets no new streams, as long as there is another one.


class Failing(StrEnum):
    """Treatment of an instance whose GPU is likely to fail with all its streams."""

    DRAIN = "drain"
    MOVE = "move"  # Its streams are recovered elsewhere while it still runs.


class GpuSettings(Settings):
    degraded: Degraded = Field(default=Degraded.IGNORE, strict=False)
    failing: Failing = Field(default=Failing.MOVE, strict=False)


class RecoverySettings(Settings):
    # How long a stream waits for an instance to come up, or to have room.
    wait_s: float = Field(default=30.0, ge=0, le=3600)
    # Losses within this time are one event.
    gather_s: float = Field(default=0.01, ge=0, le=10)
    # Before the only instance is tried again; doubles each time, to 2 s.
    retry_pause_s: float = Field(default=0.05, ge=0, le=60)
    # Failures of one stream without a token in between.
    max_attempts: int = Field(default=8, ge=1, le=100)


class AdmissionSettings(Settings):
    # The longest predicted wait of a new request in the queues of the instances.
    wait_s: float = Field(default=30.0, gt=0, le=3600)


class PolicySettings(Settings):
    name: PolicyName = Field(default=PolicyName.AUTO, strict=False)
    handoff: Handoff = Field(default=Handoff.OWN_PAIR, strict=False)
    dispatch: Dispatch = Field(default=Dispatch.REBALANCE, strict=False)
    # Predictions are corrected by at most this factor, either way. 1: never.
    correction_max: float = Field(default=4.0, ge=1, le=100)
    # Recovery transfers into one target at a time (seed KVRS).
    slots_max: int = Field(default=32, ge=1, le=1024)
    # A transfer that outlives its slot is given up.
    slot_lease_s: float = Field(default=30.0, gt=0, le=3600)
    # Until a link is measured: 10 Gbit/s.
    assumed_link_bytes_per_s: float = Field(default=1.25e9, gt=0)
    # Connect, authenticate, ask: before the first page moves.
    handshake_s: float = Field(default=0.002, ge=0, le=10)
    admission: AdmissionSettings = AdmissionSettings()
    recovery: RecoverySettings = RecoverySettings()
    gpu: GpuSettings = GpuSettings()


class SloSettings(Settings):
    # Give up at once on a stream that no option can bring back within its budget.
    abort: bool = False
    # Clients override each with a header: x-kvrs-ttft-s, x-kvrs-recovery-gap-s, x-kvrs-deadline-s.
    ttft_s: float | None = Field(default=None, gt=0, le=86400)  # Until the first token.
    # Longest pause that a client should see.
    recovery_gap_s: float = Field(default=10.0, gt=0, le=3600)
    deadline_s: float | None = Field(default=None, gt=0, le=86400)  # Until the last token.
