"""Types of the names of nodes, instances and streams, and the order of names along a ring. Names
are opaque: no id is ever parsed.
"""

from typing import NewType, TypeVar

NodeId = NewType("NodeId", str)
InstanceId = NewType("InstanceId", str)
StreamId = NewType("StreamId", str)

_Place = TypeVar("_Place", NodeId, InstanceId, tuple[NodeId, InstanceId])


def along_ring(own: _Place, other: _Place) -> tuple[bool, _Place]:
    """Return the sort key of `other` along the ring: names after `own` come first, in order, then
    those from the beginning.
    """
    return other < own, other
