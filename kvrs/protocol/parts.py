"""Rectangles of (layers, KV heads): which cells of each page a process holds, or two share."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """A range of layers and of KV heads, each of at least one."""

    layers: range
    heads: range

    @property
    def cells(self) -> int:
        return len(self.layers) * len(self.heads)

    def shared(self, other: "Part") -> "Part | None":
        layers, heads = _overlap(self.layers, other.layers), _overlap(self.heads, other.heads)
        return Part(layers, heads) if layers and heads else None

    def local(self, part: "Part") -> tuple[slice, slice]:
        """Where a part of this one lies in a memory `[layers, heads, ...]` of this one."""
        return (
            slice(part.layers.start - self.layers.start, part.layers.stop - self.layers.start),
            slice(part.heads.start - self.heads.start, part.heads.stop - self.heads.start),
        )


def _overlap(left: range, right: range) -> range:
    return range(max(left.start, right.start), min(left.stop, right.stop))
