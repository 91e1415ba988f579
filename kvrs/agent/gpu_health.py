"""Classifies GPUs by their NVML readings: healthy, degraded or failing, with reason and time. Pure:
`now_s` is an argument.

A GPU gets worse with the first symptom, and better only after a time without any, step by step:

    healthy --symptom: degraded--> degraded --symptom: failing--> failing
       ^--- 60 s without one ---------'  ^---- 600 s without one ----'

Counters count from the driver's start, so only increases between two readings are symptoms.
No answer, which healthy GPUs give for a moment, counts once it lasts. Clocks and links are not
read: they slow a GPU down, for which no stream is moved.

The meaning of XIDs is that of NVIDIA's catalog (docs.nvidia.com/deploy/xid-errors): failing are
those for which it demands a reset or a restart of the machine, and uncorrectable memory errors;
those that programs cause count as nothing.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from kvrs.protocol.instance import GpuHealth, GpuState

# XIDs that programs cause: engine exceptions, page faults, channels torn down or stopped. They are
# no symptoms.
PROGRAM_XIDS = frozenset({8, 11, 13, 31, 32, 37, 39, 41, 43, 45, 68, 69})
# XIDs of a failing GPU. 48, 94, 95: uncorrectable memory error, contained or not. 62:
# micro-controller halted. 64: a memory row could not be replaced. 79: the GPU fell off the bus.
# 109, 110, 119, 120, 136, 140, 143, 155, 156, 158: time-outs and faults that only a reset ends.
FAILING_XIDS = frozenset(
    {46, 48, 62, 64, 79, 94, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158}
)
# XID that reports a changed recovery action. It is no symptom, because each reading has the action
# itself.
RECOVERY_XID = 154

_ORDER = list(GpuState)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One reading of one GPU; values that the GPU does not support are None or empty."""

    uuid: str
    index: int
    name: str = ""  # Name of the GPU's kind; empty: not read.
    # Driver's reason why the GPU is gone, or unusable before a reset; None: it is neither.
    lost: str | None = None
    silent: str | None = None  # Other reason why the GPU did not answer; None: it answered.
    xids: tuple[int, ...] = ()  # XIDs that came since the last reading.
    # Number of uncorrected memory errors since the driver's start.
    ecc_uncorrected: int | None = None
    remap_pending: bool = False  # A memory row waits for its replacement at the next reset.
    remap_failed: bool = False
    reset_due: str | None = None  # Recovery action that the driver demands at once; None: none.
    # Recovery action that the driver demands at the next occasion; None: none.
    drain_due: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """Times without a symptom after which a GPU counts as better by one step, and the time without
    an answer after which it is failing.
    """

    failing_hold_s: float = 600.0
    degraded_hold_s: float = 60.0
    silent_s: float = 3.0


@dataclass(slots=True)
class _Watched:
    health: GpuHealth
    # Counter in the last reading that had it; None: no reading had it.
    ecc_uncorrected: int | None = None
    # By severity, the time of the last symptom that was at least as severe.
    symptoms_s: dict[GpuState, float] = field(default_factory=dict)
    silent_since_s: float | None = None


class GpuClassifier:
    """Determines the health of the GPUs of one node from their readings."""

    def __init__(self, thresholds: Thresholds | None = None) -> None:
        self._thresholds = thresholds or Thresholds()
        self._gpus: dict[str, _Watched] = {}

    @property
    def health(self) -> list[GpuHealth]:
        return [gpu.health for gpu in self._gpus.values()]

    def update(self, readings: Iterable[Reading], now_s: float) -> list[GpuHealth]:
        """Apply readings; return the GPUs that are new or whose health has changed."""
        return [
            health for reading in readings if (health := self._classify(reading, now_s)) is not None
        ]

    def no_answer(self, cause: str, now_s: float) -> list[GpuHealth]:
        """Apply that no GPU was read, because of this cause; return as `update`."""
        return self.update(
            [Reading(uuid=gpu.uuid, index=gpu.index, silent=cause) for gpu in self.health], now_s
        )

    def _classify(self, reading: Reading, now_s: float) -> GpuHealth | None:
        gpu = self._gpus.get(reading.uuid)
        is_new = gpu is None
        if gpu is None:
            health = GpuHealth(
                reading.uuid, reading.index, GpuState.HEALTHY, "", now_s, reading.name
            )
            gpu = self._gpus[reading.uuid] = _Watched(health)
        gpu.silent_since_s = _since(gpu.silent_since_s, reading.silent is not None, now_s)
        before = gpu.health
        gpu.health = self._next(gpu, list(self._symptoms(gpu, reading, now_s)), now_s)
        return gpu.health if is_new or gpu.health != before else None

    def _next(
        self, gpu: _Watched, symptoms: Sequence[tuple[GpuState, str]], now_s: float
    ) -> GpuHealth:
        health = gpu.health
        worst, reason = max(
            symptoms, key=lambda symptom: _ORDER.index(symptom[0]), default=(GpuState.HEALTHY, "")
        )
        for state in _ORDER[1 : _ORDER.index(worst) + 1]:
            gpu.symptoms_s[state] = now_s
        if _ORDER.index(worst) > _ORDER.index(health.state):
            return replace(health, state=worst, reason=reason, since_s=now_s)
        thresholds = self._thresholds
        hold_s = {
            GpuState.FAILING: thresholds.failing_hold_s,
            GpuState.DEGRADED: thresholds.degraded_hold_s,
        }
        if (
            health.state is GpuState.HEALTHY
            or now_s - gpu.symptoms_s[health.state] < hold_s[health.state]
        ):
            return health
        if health.state is GpuState.FAILING:
            gpu.symptoms_s[GpuState.DEGRADED] = now_s
            reason = f"after {health.reason}"[:128]
            return replace(health, state=GpuState.DEGRADED, reason=reason, since_s=now_s)
        return replace(health, state=GpuState.HEALTHY, reason="", since_s=now_s)

    def _symptoms(
        self, gpu: _Watched, reading: Reading, now_s: float
    ) -> Iterator[tuple[GpuState, str]]:
        """Yield the severity and the reason of each symptom in a reading; of equally severe
        symptoms the first gives the health's reason.
        """
        thresholds = self._thresholds
        if reading.lost is not None:
            yield GpuState.FAILING, f"lost: {reading.lost}"[:128]
        if gpu.silent_since_s is not None and now_s - gpu.silent_since_s >= thresholds.silent_s:
            yield GpuState.FAILING, f"no answer: {reading.silent}"[:128]
        yield from _xid_symptoms(reading.xids)
        if _has_more_errors(gpu, reading.ecc_uncorrected):
            yield GpuState.FAILING, "ecc uncorrected"
        if reading.remap_failed:
            yield GpuState.FAILING, "row remapping failed"
        if reading.reset_due is not None:
            yield GpuState.FAILING, f"driver asks for {reading.reset_due}"
        if reading.drain_due is not None:
            yield GpuState.DEGRADED, f"driver asks for {reading.drain_due}"
        if reading.remap_pending:
            yield GpuState.DEGRADED, "row remapping pending"


def _xid_symptoms(xids: Sequence[int]) -> Iterator[tuple[GpuState, str]]:
    for xid in xids:
        if xid in FAILING_XIDS:
            yield GpuState.FAILING, f"xid {xid}"
        elif xid not in PROGRAM_XIDS and xid != RECOVERY_XID:
            yield GpuState.DEGRADED, f"xid {xid}"


def _has_more_errors(gpu: _Watched, count: int | None) -> bool:
    """Return whether the counter of errors has risen since the last reading that had it. False if
    it is unsupported, read for the first time, or was reset.
    """
    if count is None:
        return False
    before, gpu.ecc_uncorrected = gpu.ecc_uncorrected, count
    return before is not None and count > before


def _since(since_s: float | None, lasts: bool, now_s: float) -> float | None:
    return (now_s if since_s is None else since_s) if lasts else None
