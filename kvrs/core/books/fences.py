"""Attempts that may still be running at an instance; needed to build a fence request."""

from collections.abc import Collection

from kvrs.core.model import actions as act
from kvrs.ids import InstanceId, StreamId

Number = tuple[int, int]  # Owner epoch, attempt.


class FenceTable:
    def __init__(self) -> None:
        self._writers: dict[InstanceId, dict[StreamId, Number]] = {}
        # The same, the other way round; few each.
        self._instances: dict[StreamId, tuple[InstanceId, ...]] = {}

    def started(self, plan: act.Plan, stream: StreamId, number: Number) -> None:
        if plan.prefill is not None:
            self._note(plan.prefill, stream, number)
        self._note(plan.decode, stream, number)

    def redirected(self, plan: act.Plan, stream: StreamId, number: Number) -> None:
        """The attempt, which no call for decoding has been made for, decodes elsewhere."""
        for instance in self.instances(stream):
            if instance != plan.prefill and self._writers[instance][stream] == number:
                self.left(instance, stream)
        self._note(plan.decode, stream, number)

    def left(self, instance: InstanceId, stream: StreamId) -> None:
        """The stream's attempts have certainly ended there."""
        if self._writers.get(instance, {}).pop(stream, None) is not None:
            self._forget(instance, stream)

    def instances(self, stream: StreamId) -> Collection[InstanceId]:
        """Where attempts of the stream may still be running."""
        return self._instances.get(stream, ())

    def numbers(self, instance: InstanceId) -> dict[StreamId, Number]:
        """Return what a fence must name: one above every attempt that may still run there."""
        return {
            stream: (owner_epoch, attempt + 1)
            for stream, (owner_epoch, attempt) in self._writers.get(instance, {}).items()
        }

    def fenced(self, instance: InstanceId) -> None:
        """Nothing runs there any more."""
        for stream in self._writers.pop(instance, ()):
            self._forget(instance, stream)

    def _note(self, instance: InstanceId, stream: StreamId, number: Number) -> None:
        self._writers.setdefault(instance, {})[stream] = number
        known = self._instances.get(stream, ())
        if instance not in known:
            self._instances[stream] = (*known, instance)

    def _forget(self, instance: InstanceId, stream: StreamId) -> None:
        instances = self._instances[stream]
        if instances == (instance,):
            del self._instances[stream]
        else:
            self._instances[stream] = tuple(each for each in instances if each != instance)
