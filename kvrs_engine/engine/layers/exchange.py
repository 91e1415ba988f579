"""The exchange between the ranks of a stage, as the layers see it, and that of a process alone."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from kvrs_engine.elastic.units import UnitKind


class SumExchange(Protocol):
    """How the ranks of a stage add up what their units yield, and put together what their experts
    do: in slots of rows, where each row of each slot is one rank's.
    """

    def total(self, sums: list[Tensor], kind: UnitKind, layer: int) -> Tensor:
        """The sum of all units, from the sums of this rank's, in memory that the caller may
        change.
        """
        ...

    def slots_of_expert(self, layer: int, parts: int) -> int:
        """1 where each expert's parts are all on the same ranks, which add them; else all parts."""
        ...

    def own_runs(self, layer: int, parts: int, rows: Sequence[int]) -> Mapping[int, Sequence[int]]:
        """Which tiles of rows this rank computes of the experts (or their parts, numbered through,
        where these have slots of their own) that other ranks have as well; of others that it has
        it computes all. `rows`: of this batch, of each expert.
        """
        ...

    def slots(self, count: int, rows: Tensor) -> Tensor:
        """Memory for `count` times as much as these rows, to be written before `slots_filled`."""
        ...

    def slots_filled(self) -> None:
        """Wait until all ranks have put their rows, as the caller has."""
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
        """All rows are this process's own."""


ALONE = Alone()
