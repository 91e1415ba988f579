"""The exchange between the ranks of a stage, and its stand-in for a process without other ranks."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from kvrs_engine.elastic.units import UnitKind


class SumExchange(Protocol):
    """Adds up the results of units over the ranks of a stage, and collects the results of experts
    in slots of rows; each row of a slot is written by one rank.
    """

    def total(self, sums: list[Tensor], kind: UnitKind, layer: int) -> Tensor:
        """Return the sum over all units, given this rank's sums; the caller may change the
        result.
        """
        ...

    def slots_of_expert(self, layer: int, parts: int) -> int:
        """Return 1 if the parts of each expert are on the same ranks, which add them; else
        `parts`.
        """
        ...

    def own_runs(self, layer: int, parts: int, rows: Sequence[int]) -> Mapping[int, Sequence[int]]:
        """Return this rank's tiles of rows for each expert that other ranks have as well; a rank
        computes all tiles of its other experts.

        Parts of experts with their own slots are numbered through and count as experts. `rows` is
        the number of rows of each expert in this batch.
        """
        ...

    def slots(self, count: int, rows: Tensor) -> Tensor:
        """Return memory for `count` slots of the size of `rows`; write before `slots_filled`."""
        ...

    def slots_filled(self) -> None:
        """Wait until all ranks have written their rows, as the caller has."""
        ...


class Alone:
    def total(self, sums: list[Tensor], kind: UnitKind, layer: int) -> Tensor:
        (total,) = sums
        return total

    def slots_of_expert(self, layer: int, parts: int) -> int:
        return 1

    def own_runs(self, layer: int, parts: int, rows: Sequence[int]) -> Mapping[int, Sequence[int]]:
        return {}

    def slots(self, count: int, rows: Tensor) -> Tensor:
        return rows.new_empty(count, *rows.shape)

    def slots_filled(self) -> None:
        """Do nothing: this process has filled all rows."""


ALONE = Alone()
