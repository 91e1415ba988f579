"""Page or slot numbers in order of release, the first to evict first, and shared integer objects
for these numbers.
"""

from array import array
from collections.abc import Iterable, Iterator

_ABSENT = -1
# Elements by which the arrays grow at least, all unused.
_ABSENT_BLOCK = array("i", [_ABSENT]) * 256

_NUMBERS: list[int] = []


def shared(number: int) -> int:
    """Return the one object that all lists share for a number: an object for each list would take
    32 bytes.
    """
    while number >= len(_NUMBERS):
        _NUMBERS.extend(range(len(_NUMBERS), 2 * len(_NUMBERS) + 256))
    return _NUMBERS[number]


class ReleaseOrder:
    """A set of small numbers in order of insertion. Every operation costs O(1); each number up to
    the highest takes 8 bytes, in the set or not.
    """

    def __init__(self) -> None:
        # Doubly linked circle by place: number n is at place n + 1; place 0 is the start, before
        # the first number and after the last.
        self._next = array("i", [0])
        self._previous = array("i", [0])
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, number: int) -> bool:
        return number + 1 < len(self._next) and self._next[number + 1] != _ABSENT

    def __iter__(self) -> Iterator[int]:
        place = self._next[0]
        while place:
            yield place - 1
            place = self._next[place]

    def add(self, number: int) -> None:
        """Append a number, which must not be in the set yet."""
        following, previous, place = self._next, self._previous, number + 1
        if place >= len(following):
            missing = _ABSENT_BLOCK * (1 + (place - len(following)) // len(_ABSENT_BLOCK))
            following.extend(missing)
            previous.extend(missing)
        assert following[place] == _ABSENT, f"{number} is released twice"
        last = previous[0]
        following[last] = previous[0] = place
        previous[place], following[place] = last, 0
        self._count += 1

    def update(self, numbers: Iterable[int]) -> None:
        """Append these numbers in order; none of them may be in the set."""
        for number in numbers:
            self.add(number)

    def discard(self, number: int) -> None:
        """Remove the number, if it is in the set."""
        following, previous, place = self._next, self._previous, number + 1
        if place < len(following) and (after := following[place]) != _ABSENT:
            before = previous[place]
            following[before], previous[after], following[place] = after, before, _ABSENT
            self._count -= 1

    def pop_first(self) -> int:
        """Remove and return the first number of a non-empty set."""
        assert self._count, "no number is in"
        following, place = self._next, self._next[0]
        after = following[0] = following[place]
        self._previous[after], following[place] = 0, _ABSENT
        self._count -= 1
        return place - 1
