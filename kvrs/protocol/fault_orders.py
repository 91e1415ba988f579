"""Faults that only an instance itself can carry out: body of `POST /kvrs/v1/faults`.

The route exists only where the configuration has `cluster.allow_faults: true`.
"""

from typing import Annotated

import msgspec

from kvrs.ids import NodeId


class LinkFault(msgspec.Struct, frozen=True, tag="link"):
    """A limit on what this instance sends to a node, for a while; the rate 0 is a cut."""

    node: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    bytes_per_s: Annotated[float, msgspec.Meta(ge=0, le=1e15)]
    for_s: Annotated[float, msgspec.Meta(gt=0, le=3600)]

    @property
    def node_id(self) -> NodeId:
        return NodeId(self.node)


class PageFault(msgspec.Struct, frozen=True, tag="pages"):
    """One bit of each of the next pages that this instance sends is flipped, after their checksum
    was taken.
    """

    pages: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]


class DeviceFault(msgspec.Struct, frozen=True, tag="device"):
    """A rank of this instance is killed, and the memory of its KV is gone. None: the only process
    of the instance.
    """

    rank: Annotated[int, msgspec.Meta(ge=0)] | None = None


class NoFault(msgspec.Struct, frozen=True, tag="none"):
    """Every fault of this instance ends now."""


FaultRequest = LinkFault | PageFault | DeviceFault | NoFault
