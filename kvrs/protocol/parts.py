"""Rectangles of (layers, KV heads): the cells of a page that a process holds, or that two processes
share.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby

import msgspec

Cell = tuple[int, int]  # A cell by its layer and its KV head.


class Part(msgspec.Struct, frozen=True):
    """A non-empty range of layers and of KV heads."""

    layers: range
    heads: range

    @property
    def cells(self) -> int:
        return len(self.layers) * len(self.heads)

    def shared(self, other: "Part") -> "Part | None":
        layers, heads = _overlap(self.layers, other.layers), _overlap(self.heads, other.heads)
        return Part(layers, heads) if layers and heads else None

    def local(self, part: "Part") -> tuple[slice, slice]:
        """Return the layers and heads of another part as slices of this part's memory `[layers,
        heads, ...]`.
        """
        return (
            slice(part.layers.start - self.layers.start, part.layers.stop - self.layers.start),
            slice(part.heads.start - self.heads.start, part.heads.stop - self.heads.start),
        )


class PagePart(msgspec.Struct, frozen=True):
    """A part of pages that have `layers` times `heads` equal cells, laid out as in `KvGeometry`."""

    layers: int
    heads: int
    part: Part

    @property
    def page_cells(self) -> int:
        return self.layers * self.heads

    def bytes_of(self, page_bytes: int) -> int:
        """Return the number of the part's bytes in one page of `page_bytes` bytes."""
        return page_bytes // self.page_cells * self.part.cells

    def runs(self, page: memoryview) -> Sequence[memoryview]:
        """Return the slices of a page that the part covers: one per layer, or a single one if the
        part has all heads.
        """
        layers, heads = self.part.layers, self.part.heads
        cell = page.nbytes // self.page_cells
        if len(heads) == self.heads:
            row = cell * self.heads
            return [page[layers.start * row : layers.stop * row]]
        starts = [(layer * self.heads + heads.start) * cell for layer in layers]
        return [page[start : start + len(heads) * cell] for start in starts]


def rectangles(cells: Iterable[Cell]) -> list[Part]:
    """Return disjoint parts that together cover exactly these cells: consecutive layers with the
    same run of heads form one part.
    """
    heads: dict[int, list[int]] = {}
    for layer, head in sorted(set(cells)):
        heads.setdefault(layer, []).append(head)
    found: list[Part] = []
    # Runs of heads in the layer before, each with the layer where the run began.
    open_: dict[range, int] = {}
    for layer in range(min(heads, default=0), max(heads, default=-1) + 2):
        runs = _runs(heads.get(layer, []))
        found += [Part(range(first, layer), run) for run, first in open_.items() if run not in runs]
        open_ = {run: open_.get(run, layer) for run in runs}
    return found


def _runs(numbers: Sequence[int]) -> list[range]:
    """Split rising numbers into ranges of consecutive numbers."""
    places = groupby(enumerate(numbers), key=lambda each: each[1] - each[0])
    groups = [[number for _, number in group] for _, group in places]
    return [range(group[0], group[-1] + 1) for group in groups]


def _overlap(left: range, right: range) -> range:
    return range(max(left.start, right.start), min(left.stop, right.stop))
