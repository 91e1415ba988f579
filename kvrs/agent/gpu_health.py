"""Judges GPUs by what NVML says of them: healthy, degraded or failing, why and since when. Pure: `now_s` is an argument.

Getting worse is believed at once, getting better only after a time without any sign of trouble, and then step by step:

    healthy --sign of degrading--> degraded --sign of failing--> failing
       ^--- 60 s without a sign ------'  ^---- 600 s without a sign ---'

Counters count from the driver's start, so only what is added while we watch is a sign. What also happens to sound GPUs for a
moment (slowed clocks, no answer) is a sign when it lasts, link errors when there are many.

What the XIDs mean is in NVIDIA's catalog (docs.nvidia.com/deploy/xid-errors): failing are those which it answers with a reset or
a restart of the machine, and uncorrectable memory errors; those that programs cause by themselves are none.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from kvrs.protocol.gpus import GpuHealth, GpuState

# Engine exceptions, page faults, a program's channel torn down or stopped: bugs of programs, or their ends.
PROGRAM_XIDS = frozenset({8, 11, 13, 31, 32, 37, 39, 41, 43, 45, 68, 69})
# 48 and 94, 95: uncorrectable memory error, contained or not. 62: micro-controller halted. 64: a row could not be replaced.
# 79: fell off the bus. 109, 110, 119, 120, 136, 140, 143, 155, 156, 158: time-outs and faults that only a reset ends.
FAILING_XIDS = frozenset({46, 48, 62, 64, 79, 94, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158})
# Says that the recovery action has changed, which is read by itself.
RECOVERY_XID = 154

_ORDER = list(GpuState)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One look at one GPU; what it cannot tell is None or empty."""

    uuid: str
    index: int
    lost: str | None = None  # The driver says that it is gone, or useless until it is reset.
    silent: str | None = None  # It does not answer, for another reason.
    xids: tuple[int, ...] = ()  # Since the reading before.
    ecc_uncorrected: int | None = None  # Counts up.
    remap_pending: bool = False  # A memory row is replaced at the next reset.
    remap_failed: bool = False
    reset_due: str | None = None  # What the driver asks for, if it cannot wait.
    drain_due: str | None = None  # What it asks for as soon as there is time.
    slowed_by: tuple[str, ...] = ()  # Reasons for lower clocks that are no choice of anybody's.
    nvlink_errors: int | None = None  # Corrected ones, of all links; counts up.
    nvlink_recoveries: int | None = None  # Links that had to be trained again; counts up.
    nvlinks_up: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    failing_hold_s: float = 600.0
    degraded_hold_s: float = 60.0
    slowed_s: float = 5.0  # Clocks that are lowered for a moment are a matter of course.
    silent_s: float = 3.0
    nvlink_errors_per_s: float = 100.0  # Fewer are corrected without being noticed.


@dataclass(slots=True)
class _Watched:
    health: GpuHealth
    counted: dict[str, int] = field(default_factory=dict)  # The counters, as they were last read.
    counted_s: float = 0.0
    most_nvlinks_up: int = 0
    signs_s: dict[GpuState, float] = field(default_factory=dict)  # When one of at least this gravity was last seen.
    slowed_since_s: float | None = None
    silent_since_s: float | None = None


class GpuJudge:
    def __init__(self, patience: Patience | None = None) -> None:
        self._patience = patience or Patience()
        self._gpus: dict[str, _Watched] = {}

    @property
    def health(self) -> list[GpuHealth]:
        return [gpu.health for gpu in self._gpus.values()]

    def take(self, readings: Iterable[Reading], now_s: float) -> list[GpuHealth]:
        """Judge anew; those whose state has changed, and those that are new."""
        return [health for reading in readings if (health := self._judge(reading, now_s)) is not None]

    def no_answer(self, cause: str, now_s: float) -> list[GpuHealth]:
        """Nothing was read at all: whoever asks is stuck."""
        return self.take([Reading(uuid=gpu.uuid, index=gpu.index, silent=cause) for gpu in self.health], now_s)

    def _judge(self, reading: Reading, now_s: float) -> GpuHealth | None:
        gpu = self._gpus.get(reading.uuid)
        is_new = gpu is None
        if gpu is None:
            health = GpuHealth(reading.uuid, reading.index, GpuState.HEALTHY, "", now_s)
            gpu = self._gpus[reading.uuid] = _Watched(health)
        gpu.slowed_since_s = _since(gpu.slowed_since_s, bool(reading.slowed_by), now_s)
        gpu.silent_since_s = _since(gpu.silent_since_s, reading.silent is not None, now_s)
        before = gpu.health
        gpu.most_nvlinks_up = max(gpu.most_nvlinks_up, reading.nvlinks_up or 0)
        gpu.health = self._next(gpu, list(self._signs(gpu, reading, now_s)), now_s)
        return gpu.health if is_new or gpu.health != before else None

    def _next(self, gpu: _Watched, signs: Sequence[tuple[GpuState, str]], now_s: float) -> GpuHealth:
        health = gpu.health
        worst, reason = max(signs, key=lambda sign: _ORDER.index(sign[0]), default=(GpuState.HEALTHY, ""))
        for state in _ORDER[1 : _ORDER.index(worst) + 1]:
            gpu.signs_s[state] = now_s
        if _ORDER.index(worst) > _ORDER.index(health.state):
            return GpuHealth(health.uuid, health.index, worst, reason, now_s)
        patience = self._patience
        hold_s = {GpuState.FAILING: patience.failing_hold_s, GpuState.DEGRADED: patience.degraded_hold_s}
        if health.state is GpuState.HEALTHY or now_s - gpu.signs_s[health.state] < hold_s[health.state]:
            return health
        if health.state is GpuState.FAILING:
            gpu.signs_s[GpuState.DEGRADED] = now_s
            return GpuHealth(health.uuid, health.index, GpuState.DEGRADED, f"after {health.reason}"[:128], now_s)
        return GpuHealth(health.uuid, health.index, GpuState.HEALTHY, "", now_s)

    def _signs(self, gpu: _Watched, reading: Reading, now_s: float) -> Iterator[tuple[GpuState, str]]:
        """What speaks against it; of equal gravity the first is the one that is told."""
        patience = self._patience
        if reading.lost is not None:
            yield GpuState.FAILING, f"lost: {reading.lost}"[:128]
        if gpu.silent_since_s is not None and now_s - gpu.silent_since_s >= patience.silent_s:
            yield GpuState.FAILING, f"no answer: {reading.silent}"[:128]
        yield from _xid_signs(reading.xids)
        if _added(gpu, "ecc_uncorrected", reading.ecc_uncorrected):
            yield GpuState.FAILING, "ecc uncorrected"
        if reading.remap_failed:
            yield GpuState.FAILING, "row remapping failed"
        if reading.reset_due is not None:
            yield GpuState.FAILING, f"driver asks for {reading.reset_due}"
        if reading.drain_due is not None:
            yield GpuState.DEGRADED, f"driver asks for {reading.drain_due}"
        if reading.remap_pending:
            yield GpuState.DEGRADED, "row remapping pending"
        if gpu.slowed_since_s is not None and now_s - gpu.slowed_since_s >= patience.slowed_s:
            yield GpuState.DEGRADED, f"throttled: {', '.join(reading.slowed_by)}"
        if _added(gpu, "nvlink_recoveries", reading.nvlink_recoveries):
            yield GpuState.DEGRADED, "nvlink recovery"
        if reading.nvlinks_up is not None and reading.nvlinks_up < gpu.most_nvlinks_up:
            yield GpuState.DEGRADED, f"nvlinks down: {gpu.most_nvlinks_up - reading.nvlinks_up}"
        elapsed_s = now_s - gpu.counted_s
        if (errors := _added(gpu, "nvlink_errors", reading.nvlink_errors)) and errors >= patience.nvlink_errors_per_s * elapsed_s:
            yield GpuState.DEGRADED, "nvlink errors"
        if reading.nvlink_errors is not None:
            gpu.counted_s = now_s


def _xid_signs(xids: Sequence[int]) -> Iterator[tuple[GpuState, str]]:
    for xid in xids:
        if xid in FAILING_XIDS:
            yield GpuState.FAILING, f"xid {xid}"
        elif xid not in PROGRAM_XIDS and xid != RECOVERY_XID:
            yield GpuState.DEGRADED, f"xid {xid}"


def _added(gpu: _Watched, name: str, count: int | None) -> int:
    """How much a counter went up; one that is unknown, is read for the first time, or began anew, did not."""
    if count is None:
        return 0
    before = gpu.counted.get(name, count)
    gpu.counted[name] = count
    return max(0, count - before)


def _since(since_s: float | None, lasts: bool, now_s: float) -> float | None:
    return (now_s if since_s is None else since_s) if lasts else None
