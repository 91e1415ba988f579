"""Names of the things that kvrs talks about. They are opaque: nothing is ever parsed out of an id."""

from typing import NewType

NodeId = NewType("NodeId", str)
InstanceId = NewType("InstanceId", str)
StreamId = NewType("StreamId", str)
