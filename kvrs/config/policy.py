"""Sections `policy` and `slo` of the configuration: how streams are routed and recovered."""

from enum import StrEnum

from pydantic import Field

from kvrs.config.settings import Settings

# Number of future tokens by which options are compared: at an instance that has lost ranks each
# token is slower, and the extra time of so many tokens is part of its cost. An instance that
# chooses how to go on looks as far ahead.
LOOKAHEAD_TOKENS = 32


class PolicyName(StrEnum):
    ALWAYS_MIGRATE = "always_migrate"
    ALWAYS_RECOMPUTE = "always_recompute"
    # Restore from a checkpoint; without a checkpoint, compute as always_recompute does.
    ALWAYS_RESTORE = "always_restore"
    ROM = "rom"
    AUTO = "auto"


class Handoff(StrEnum):
    """Choice of the decode instance that gets a hand-off once prefill is done."""

    OWN_PAIR = "own_pair"  # The decode instance that was chosen when the stream began.
    # Compare the wait in the own decode queue with a transfer and the wait in a remote queue (seed
    # KVRS).
    ROM = "rom"
    # Compare as rom does, also counting the hand-shake and bytes already on the link, for several
    # candidates.
    AUTO = "auto"


class Route(StrEnum):
    """Choice of the prefill instance of a new prompt."""

    PREFIX = "prefix"  # Choose by the length of the queue and the cached part of the prompt.
    LOAD = "load"  # Choose by the length of the queue alone.


class Dispatch(StrEnum):
    """Choice of the instances that get the streams which one event has cut (victims)."""

    REBALANCE = "rebalance"  # First the holders of the victims' KV, then as LUMEN rebalances.
    HOLDERS = "holders"  # The holders of the victims' KV, however many streams they get.
    LEAST_LOADED = "least_loaded"  # The instances that have the fewest streams.


class RestoredAt(StrEnum):
    """Choice of the instances that may restore a checkpoint."""

    ANYWHERE = "anywhere"  # All instances: one of another node fetches the pages.
    HOLDER = "holder"  # Instances of the agent's node; a victim elsewhere is recomputed (LUMEN).


class RecoverySettings(Settings):
    wait_s: float = Field(default=30.0, ge=0, le=3600)
    """Longest wait of a stream for an instance to come up or to have room; then 503 with
    Retry-After, or an error event.
    """
    role_wait_s: float = Field(default=5.0, ge=0, le=3600)
    """The same for a request that has not begun anywhere, after every prefill or every decode
    instance was lost: long enough for instances that are restarted at once.
    """
    gather_s: float = Field(default=0.01, ge=0, le=10)
    """Losses within this time are handled as one event."""
    max_attempts: int = Field(default=8, ge=1, le=100)
    """Most failures of one stream without a token in between. Moves and busy answers do not count.
    """
    poison_deaths: int = Field(default=3, ge=2, le=10)
    """Instances that may die in a row while one request waits there for its first token, before the
    request is refused (422). Deaths with a known external cause do not count. With 2 a poisoned
    request kills one instance less, but innocent requests are refused in outages.
    """


class AdmissionSettings(Settings):
    wait_s: float = Field(default=30.0, gt=0, le=3600)
    """Longest predicted wait of a new request in the queues; beyond it 503 with Retry-After."""


class PolicySettings(Settings):
    name: PolicyName = Field(default=PolicyName.AUTO, strict=False)
    """How victims are recovered: always_migrate, always_recompute, always_restore, rom (by prompt
    length and bandwidth), auto (by predicted cost).
    """
    handoff: Handoff = Field(default=Handoff.OWN_PAIR, strict=False)
    """Decode instance of a hand-off: own_pair (as planned), rom (by queues and bytes), auto."""
    route: Route = Field(default=Route.PREFIX, strict=False)
    """Prefill instance of a new prompt: prefix (by queue and uncached tokens), load (by queue)."""
    dispatch: Dispatch = Field(default=Dispatch.REBALANCE, strict=False)
    """Targets of the victims of one event: holders (of their KV), rebalance (holders, evened out),
    least_loaded.
    """
    restored_at: RestoredAt = Field(default=RestoredAt.ANYWHERE, strict=False)
    """Instances that may restore a checkpoint: anywhere, holder (only those on the agent's node;
    elsewhere a victim is recomputed, as in LUMEN).
    """
    slots_max: int = Field(default=32, ge=1, le=1024)
    """Most recovery transfers into one target at a time; over all proxies if the target's node has
    an agent.
    """
    slot_lease_s: float = Field(default=30.0, gt=0, le=3600)
    """A transfer that takes longer is given up, and its stream is decided again."""
    assumed_link_bytes_per_s: float = Field(default=1.25e9, gt=0)
    """Assumed bandwidth of a link until it is measured; the default is 10 Gbit/s. Measurements are
    averaged (EWMA) with a fixed time constant of 2 s.
    """
    admission: AdmissionSettings = AdmissionSettings()
    """Admission of new requests."""
    recovery: RecoverySettings = RecoverySettings()
    """Recovery of interrupted streams."""


class SloSettings(Settings):
    abort: bool = False
    """Give up at once on a stream that no option can continue in time, by the deadlines of this
    section or of its headers.
    """
    ttft_s: float | None = Field(default=None, gt=0, le=86400)
    """Longest time to the first token; for one request, header x-kvrs-ttft-s."""
    recovery_gap_s: float = Field(default=10.0, gt=0, le=3600)
    """Longest pause that a client should see; for one request, header x-kvrs-recovery-gap-s."""
    deadline_s: float | None = Field(default=None, gt=0, le=86400)
    """Longest time to the last token; for one request, header x-kvrs-deadline-s."""
