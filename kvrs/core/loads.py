"""Filters load reports that cannot change a decision."""

from kvrs.ids import InstanceId
from kvrs.protocol.instance import LoadReport

# Smaller changes of a queue change no decision.
_STEP = 0.1
_STEP_S = 0.005


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
            or (delay_s > 0 and abs(delay_s - told_s) <= max(_STEP_S, _STEP * told_s))
        )
        if is_same and not waiting:
            return False
        self._told[instance] = report.epoch, delay_s, streams
        return True
