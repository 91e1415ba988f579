"""The news in the load reports of instances: which can change a decision, and which say that an
instance re-forms, has re-formed, or will later than it said.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvrs.core.live import LiveStream
from kvrs.core.model import events as ev
from kvrs.ids import InstanceId
from kvrs.protocol.instance import LoadReport, ReformingReport

# Smaller changes of a queue change no decision.
_QUEUE_STEP = 0.1
_QUEUE_STEP_S = 0.005
# A prediction that moves by less is no news.
_READY_STEP_S = 0.02


class LoadSteps:
    """Reports come several times a second; most say what the policy knows."""

    def __init__(self, *, has_peers: bool) -> None:
        """With peers the policy has to know what an instance runs for them."""
        self._has_peers = has_peers
        # Epoch, delay and streams.
        self._told: dict[InstanceId, tuple[int, float, int]] = {}

    def forget(self, instance: InstanceId) -> None:
        """The policy knows the instance anew."""
        self._told.pop(instance, None)

    def streams_of(self, report: LoadReport) -> int:
        """Streams that the instance runs or queues, of all proxies; 0: this one is alone."""
        return report.queued + report.running if self._has_peers else 0

    def changes_decision(self, instance: InstanceId, report: LoadReport, *, waiting: bool) -> bool:
        """The report has to be passed to the policy. While streams wait for a place every report is
        a sign of life, after which they may find one.
        """
        delay_s, streams = report.queue_delay_s, self.streams_of(report)
        epoch, told_s, told_streams = self._told.get(instance, (-1, 0.0, 0))
        is_same = (epoch, told_streams) == (report.epoch, streams) and (
            delay_s == told_s
            or (delay_s > 0 and abs(delay_s - told_s) <= max(_QUEUE_STEP_S, _QUEUE_STEP * told_s))
        )
        if is_same and not waiting:
            return False
        self._told[instance] = report.epoch, delay_s, streams
        return True


@dataclass(frozen=True, slots=True)
class _LastReport:
    epoch: int
    layout: tuple[int, int]  # Its number and degree.
    report: ReformingReport | None
    ready_s: float = 0.0


class Reformings:
    """The ranks of each instance, as the policy knows them."""

    def __init__(self) -> None:
        self._last: dict[InstanceId, _LastReport] = {}

    def forget(self, instance: InstanceId) -> None:
        """The policy knows the instance anew."""
        self._last.pop(instance, None)

    def event(
        self,
        instance: InstanceId,
        load: LoadReport,
        running: Sequence[LiveStream],
        now_s: float,
    ) -> ev.InstanceReforming | ev.InstanceReformed | None:
        """The news in a report, if there is any; `running` are the streams there."""
        if not load.full_degree:
            return None
        last = self._last.get(instance)
        if last is not None and last.epoch != load.epoch:
            last = None
        report, layout = load.reforming, (load.layout_number, load.degree)
        if report is None:
            is_news = last is not None and (last.report is not None or last.layout != layout)
            # A proxy that comes later finds an instance that has lost ranks before.
            if not is_news and (last is not None or load.degree == load.full_degree):
                return None
            self._last[instance] = _LastReport(load.epoch, layout, None)
            decode_factor, prefill_factor = _factors(load, last)
            token_s = _token_s(running)
            return ev.InstanceReformed(instance, load.epoch, decode_factor, prefill_factor, token_s)
        ready_s = now_s + report.ready_in_s
        before = None if last is None else last.report
        is_known = (
            before is not None
            and last is not None
            and before.number == report.number
            and abs(ready_s - last.ready_s) <= _READY_STEP_S
            and before.missing_pages == report.missing_pages
        )
        if is_known:
            return None
        self._last[instance] = _LastReport(load.epoch, layout, report, ready_s)
        return ev.InstanceReforming(
            instance,
            load.epoch,
            report.number,
            cause_of(instance, report),
            report.ready_in_s,
            report.missing_pages,
            report.page_s,
            report.decode_factor,
            report.prefill_factor,
            _token_s(running),
            {live.id: live.produced_tokens for live in running},
            report.held_pages,
            report.held_page_s,
        )


def _token_s(running: Sequence[LiveStream]) -> float:
    """Mean time between two tokens of a stream; 0: not known."""
    intervals = [live.journal.token_interval_s for live in running]
    measured = [interval_s for interval_s in intervals if interval_s is not None]
    return sum(measured) / len(measured) if measured else 0.0


def _factors(load: LoadReport, last: _LastReport | None) -> tuple[float, float]:
    """Factors of decoding and prefill, as predicted by the instance, or by its ranks alone."""
    if last is not None and last.report is not None:
        return last.report.decode_factor, last.report.prefill_factor
    by_ranks = load.full_degree / load.degree if load.degree else 1.0
    return by_ranks, by_ranks


def cause_of(instance: InstanceId, report: ReformingReport) -> str:
    if not report.lost:
        return f"{instance} re-forms: {report.way}"
    ranks = ", ".join(map(str, report.lost))
    what = f"rank {ranks}" if len(report.lost) == 1 else f"ranks {ranks}"
    return f"{what} of {instance} lost: {report.way}"
