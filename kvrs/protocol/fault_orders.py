"""Faults that an instance injects into itself: body of `POST /kvrs/v1/faults`.

The route exists only where the configuration has `cluster.allow_faults: true`.
"""

from typing import Annotated

import msgspec

from kvrs.ids import NodeId


class LinkFault(msgspec.Struct, frozen=True, tag="link"):
    """A limit on the bandwidth of sends to `node`, for `for_s` seconds; rate 0 cuts the link."""

    node: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    bytes_per_s: Annotated[float, msgspec.Meta(ge=0, le=1e15)]
    for_s: Annotated[float, msgspec.Meta(gt=0, le=3600)]

    @property
    def node_id(self) -> NodeId:
        return NodeId(self.node)


class PageFault(msgspec.Struct, frozen=True, tag="pages"):
    """A bit flip in each of the next `pages` pages that this instance sends, made after the page's
    checksum was computed.
    """

    pages: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]


class DeviceFault(msgspec.Struct, frozen=True, tag="device"):
    """The kill of the process of one rank, with its KV memory. `rank` None: the instance has only
    one process, which is killed.
    """

    rank: Annotated[int, msgspec.Meta(ge=0)] | None = None


class NoFault(msgspec.Struct, frozen=True, tag="none"):
    """The end of every fault of this instance."""


FaultRequest = LinkFault | PageFault | DeviceFault | NoFault
