"""Links carry pages between nodes: one queue per link and direction, by class and page."""

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter

from kvrs.ids import NodeId
from kvrs.protocol.pages import TrafficClass
from kvrs_lab.sim.process import Clock, SimProcess, require

_traffic = attrgetter("traffic")
CHUNK_PAGES = 4  # More would let a checkpoint delay a hand-off; fewer take more steps.


@dataclass(slots=True, eq=False)
class SimTransfer:
    """Pages on their way. A frozen end or a cut link delays them, and a dead process delivers
    nothing.
    """

    source: SimProcess
    target: SimProcess
    pages: int
    page_bytes: int
    traffic: TrafficClass
    arrived: Callable[[int], bool]  # Called with the number of new pages; False: damage, stop.
    ended: Callable[[str | None], None]  # Called once, with the reason of an early end.
    heard_s: float = 0.0
    over: bool = False


@dataclass(slots=True)
class _Route:
    waiting: list[SimTransfer] = field(default_factory=list)
    busy: bool = False
    cut_until_s: float = 0.0
    rate: float | None = None  # Bytes per second, set by a fault.


class SimLinks:
    def __init__(
        self, clock: Clock, bytes_per_s: float, local_bytes_per_s: float, stall_timeout_s: float
    ) -> None:
        self._clock = clock
        self.bytes_per_s = bytes_per_s
        self._local_bytes_per_s = local_bytes_per_s
        self._stall_timeout_s = stall_timeout_s
        self._routes: dict[tuple[NodeId, NodeId], _Route] = {}

    @property
    def under_way(self) -> int:
        return sum(len(route.waiting) for route in self._routes.values())

    def send(self, transfer: SimTransfer) -> None:
        assert transfer.pages > 0
        transfer.heard_s = self._clock.now_s
        route = self._route(transfer.source.node, transfer.target.node)
        route.waiting.append(transfer)
        self._clock.after(self._stall_timeout_s, self._look, transfer)
        self._serve(route)

    def stop(self, transfer: SimTransfer, error: str | None) -> None:
        """End the transfer, at most once."""
        if not transfer.over:
            transfer.over = True
            self._route(transfer.source.node, transfer.target.node).waiting.remove(transfer)
            transfer.ended(error)
            # The timer keeps the transfer for a while, but not its callbacks.
            del transfer.arrived, transfer.ended

    def drop(self, process: SimProcess) -> None:
        """Stop all transfers of a dead process."""
        for route in self._routes.values():
            for transfer in [
                each for each in route.waiting if process in (each.source, each.target)
            ]:
                self.stop(transfer, f"{process.id} is gone")

    def cut(self, one: NodeId, other: NodeId, for_s: float, *, one_way: bool = False) -> None:
        for ends in ((one, other), (other, one))[: 1 if one_way else 2]:
            route = self._route(*ends)
            route.cut_until_s = max(route.cut_until_s, self._clock.now_s + for_s)
        self._clock.after(for_s, self.look)

    def limit(self, one: NodeId, other: NodeId, bytes_per_s: float | None) -> None:
        """Limit the rate between two nodes; None: the link's own rate."""
        self._route(one, other).rate = self._route(other, one).rate = bytes_per_s

    def look(self) -> None:
        """Serve all routes again, since a delay may have ended."""
        for route in list(self._routes.values()):
            self._serve(route)

    def _route(self, source: NodeId, target: NodeId) -> _Route:
        if (route := self._routes.get((source, target))) is None:
            route = self._routes[source, target] = _Route()
        return route

    def _serve(self, route: _Route) -> None:
        if route.busy or not route.waiting or route.cut_until_s > self._clock.now_s:
            return
        moving = [
            each for each in route.waiting if each.source.is_running and each.target.is_running
        ]
        if not moving:
            return
        transfer = moving[0] if len(moving) == 1 else min(moving, key=_traffic)
        is_local = transfer.source.node == transfer.target.node
        rate = self._local_bytes_per_s if is_local else self.bytes_per_s
        if route.rate is not None:
            rate = min(rate, route.rate)
        pages = min(CHUNK_PAGES, transfer.pages)
        route.busy = True
        sent_in_s = pages * transfer.page_bytes / rate
        self._clock.after(sent_in_s, self._sent, route, transfer, pages)

    def _sent(self, route: _Route, transfer: SimTransfer, pages: int) -> None:
        route.busy = False
        held_up = (
            not (transfer.source.is_running and transfer.target.is_running)
            or route.cut_until_s > self._clock.now_s
        )
        if not transfer.over and not held_up:
            if not transfer.source.alive:
                require(False, f"{transfer.source.id} is dead and delivers pages")
            # Transfers of one class take turns.
            route.waiting.remove(transfer)
            route.waiting.append(transfer)
            transfer.pages -= pages
            transfer.heard_s = self._clock.now_s
            if not transfer.arrived(pages):
                self.stop(transfer, "a page was damaged")
            elif not transfer.pages:
                self.stop(transfer, None)
        self._serve(route)

    def _look(self, transfer: SimTransfer) -> None:
        if transfer.over:
            return
        left_s = transfer.heard_s + self._stall_timeout_s - self._clock.now_s
        if left_s <= 1e-9:
            self.stop(transfer, "stalled")
        else:
            self._clock.after(left_s, self._look, transfer)
