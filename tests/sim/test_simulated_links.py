"""Transfers of pages over simulated links."""

import gc
from weakref import ref

from kvrs.ids import InstanceId, NodeId
from kvrs.protocol.pages import TrafficClass
from kvrs_lab.sim.links import SimLinks, SimTransfer
from kvrs_lab.sim.process import Clock, SimProcess

STALL_S = 2.0


class Parcel:
    """The purpose of a transfer."""

    def __init__(self) -> None:
        self.error: str | None = "under way"

    def arrived(self, pages: int) -> bool:
        return True

    def ended(self, error: str | None) -> None:
        self.error = error


def test_a_transfer_that_is_over_keeps_nothing_until_its_timer_ends() -> None:
    """Thousands end within one stall timeout, and their pages are those of whole histories."""
    clock = Clock()
    ends = [SimProcess(InstanceId(name), NodeId(name), clock) for name in ("a", "b")]
    for process in ends:
        process.start()
    links, parcel = SimLinks(clock, 1e6, 1e6, STALL_S), Parcel()
    source, target = ends
    links.send(
        SimTransfer(source, target, 9, 1000, TrafficClass.RECOVERY, parcel.arrived, parcel.ended)
    )
    clock.run(STALL_S / 2)
    error, kept = parcel.error, ref(parcel)

    del parcel
    gc.collect()

    assert error is None
    assert kept() is None
    clock.run(2 * STALL_S)  # The timer finds that it is over.
