"""Attempts that may still be running at an instance; needed to build a fence request."""

from collections import defaultdict

from kvrs.ids import InstanceId, StreamId
from kvrs.policy.model.actions import Plan

Number = tuple[int, int]  # Owner epoch, attempt.


class FenceTable:
    def __init__(self) -> None:
        self._writers: defaultdict[InstanceId, dict[StreamId, Number]] = defaultdict(dict)

    def started(self, plan: Plan, stream: StreamId, number: Number) -> None:
        for instance in filter(None, (plan.prefill, plan.decode)):
            self._writers[instance][stream] = number

    def redirected(self, old: Plan, new: Plan, stream: StreamId, number: Number) -> None:
        self.left(old.decode, stream)
        self._writers[new.decode][stream] = number

    def left(self, instance: InstanceId, stream: StreamId) -> None:
        """The stream's attempts have certainly ended there."""
        self._writers[instance].pop(stream, None)

    def instances(self) -> list[InstanceId]:
        return list(self._writers)

    def numbers(self, instance: InstanceId) -> dict[StreamId, Number]:
        """Return what a fence must name: one above every attempt that may still run there."""
        return {
            stream: (owner_epoch, attempt + 1)
            for stream, (owner_epoch, attempt) in self._writers[instance].items()
        }

    def fenced(self, instance: InstanceId) -> None:
        """Nothing runs there any more."""
        self._writers.pop(instance, None)
