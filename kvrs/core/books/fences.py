"""Attempts that may still be running at an instance; needed to build a fence request."""

from collections.abc import Callable

from kvrs.core.model import actions as act
from kvrs.ids import InstanceId, StreamId

Number = tuple[int, int]  # Owner epoch, attempt.


class FenceTable:
    def __init__(self) -> None:
        self._numbers: dict[StreamId, dict[InstanceId, Number]] = {}  # At few instances each.

    def started(self, plan: act.Plan, stream: StreamId, number: Number) -> None:
        numbers = self._numbers.setdefault(stream, {})
        if plan.prefill is not None:
            numbers[plan.prefill] = number
        numbers[plan.decode] = number

    def redirected(self, plan: act.Plan, stream: StreamId, number: Number) -> None:
        """The attempt, which no call for decoding has been made for, decodes elsewhere."""
        for instance, other in [*self._numbers.get(stream, {}).items()]:
            if instance != plan.prefill and other == number:
                self.left(instance, stream)
        self._numbers.setdefault(stream, {})[plan.decode] = number

    def left(self, instance: InstanceId, stream: StreamId) -> None:
        """The stream's attempts have certainly ended there."""
        numbers = self._numbers.get(stream, {})
        if numbers.pop(instance, None) is not None and not numbers:
            del self._numbers[stream]

    def ended(self, stream: StreamId, is_up: Callable[[InstanceId], bool]) -> None:
        """The stream is over. An instance that is up drops the attempt because its connection is
        closed; one that is cut off cannot know.
        """
        numbers = self._numbers.pop(stream, {})
        if kept := {name: number for name, number in numbers.items() if not is_up(name)}:
            self._numbers[stream] = kept

    def numbers(self, instance: InstanceId) -> dict[StreamId, Number]:
        """Return what a fence must name: one above every attempt that may still run there."""
        return {
            stream: (numbers[instance][0], numbers[instance][1] + 1)
            for stream, numbers in self._numbers.items()
            if instance in numbers
        }

    def fenced(self, instance: InstanceId) -> None:
        """Nothing runs there any more."""
        for stream in self.numbers(instance):
            self.left(instance, stream)
