"""Types of the names of nodes, instances and streams. They are opaque: no id is ever parsed."""

from typing import NewType

NodeId = NewType("NodeId", str)
InstanceId = NewType("InstanceId", str)
StreamId = NewType("StreamId", str)
