"""`POST /kvrs/v1/faults`: faults that an experiment injects into the pages that a process sends.
Off unless the configuration allows it.
"""

import asyncio
import logging
from collections.abc import Callable, Collection
from typing import assert_never

import msgspec

from kvrs.errors import RequestError
from kvrs.ids import NodeId
from kvrs.net.routes import JSON, Request, Response, Routes
from kvrs.protocol.instance import DeviceFault, FaultRequest, LinkFault, NoFault, PageFault
from kvrs.transfer.limiter import SendingFaults

log = logging.getLogger(__name__)


def add_fault_route(
    routes: Routes,
    faults: SendingFaults,
    nodes: Collection[NodeId],
    lose_device: Callable[[int | None], None] | None = None,
) -> None:
    """Add the route; `nodes` are all nodes of the cluster, links to which may be slowed.
    `lose_device` kills the process of the rank with a number, or, for None, of an instance without
    ranks, and may raise RequestError. Without `lose_device` such a fault is refused.
    """

    async def handle(request: Request) -> Response:
        try:
            fault = msgspec.json.decode(await request.read(), type=FaultRequest)
        except msgspec.DecodeError as error:
            raise RequestError(str(error)) from None
        match fault:
            case LinkFault():
                if fault.node_id not in nodes:
                    raise RequestError(
                        f"node: got {fault.node!r}; allowed: {', '.join(sorted(nodes))}",
                        param="node",
                    )
                faults.hold(
                    fault.node_id,
                    fault.bytes_per_s,
                    asyncio.get_running_loop().time() + fault.for_s,
                )
            case PageFault():
                faults.corrupt(fault.pages)
            case DeviceFault():
                if lose_device is None:
                    raise RequestError(
                        "no device here; allowed: an instance of the embedded engine"
                    )
                lose_device(fault.rank)
            case NoFault():
                faults.clear()
            case _:
                assert_never(fault)
        log.warning("fault injected: %s", fault)
        return Response(200, b"{}", {"Content-Type": JSON})

    routes.add("POST", "/kvrs/v1/faults", handle)
