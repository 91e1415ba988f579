"""The instance that the parts of a stage go to next."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvrs.config.backup import BackupSettings
from kvrs.config.transfer import TransferSettings
from kvrs.engine.ranks.remote import RemoteStage
from kvrs.engine.ring import RingStage, StageRing
from kvrs.ids import InstanceId
from kvrs.scheduling.pages import PageManager
from kvrs.scheduling.replicas import ReplicaBook
from kvrs.transfer.peers import Peer

D1, D2 = InstanceId("d1"), InstanceId("d2")
RING = [D1, D2]


def test_one_that_has_refused_is_passed_over_for_a_while() -> None:
    """Then it is asked again, as the first that it is."""
    lane = RingStage(cast(RemoteStage, None))
    assert lane.next_target(RING, now_s=0.0) == D1
    lane.refusals[D1] = 5.0, "d1 lends the stage"
    assert lane.next_target(RING, now_s=4.9) == D2
    assert lane.next_target(RING, now_s=5.0) == D1


def test_where_none_takes_parts_all_reasons_are_told() -> None:
    lane = RingStage(cast(RemoteStage, None))
    assert lane.unprotected == "nothing was sent yet"
    lane.refusals |= {D1: (5.0, "d1 lends the stage"), D2: (6.0, "d2: connection refused")}
    assert lane.next_target(RING, now_s=1.0) is None
    assert lane.unprotected == "d1 lends the stage; d2: connection refused"
    lane.target = D2
    assert lane.unprotected is None


def ring_of(bytes_per_s: float | None = None) -> StageRing:
    """The ring of d0, with two stages of one and of three layers, 1000 bytes of a page each."""
    pages = PageManager(400, 16)
    stages = [
        SimpleNamespace(at=Peer(InstanceId(f"d0-stage-{at}"), f"n{at}", "", 0), layers=layers)  # type: ignore[arg-type]
        for at, layers in enumerate((range(1), range(1, 4)))
    ]
    ranks: Any = SimpleNamespace(remote=stages, geometry=SimpleNamespace(page_bytes=4000, layers=4))
    return StageRing(
        ranks,
        RING,
        pages,
        ReplicaBook(pages, 0.5, lambda: 0.0),
        BackupSettings(staging_pages=64),
        TransferSettings(link_bytes_per_s=bytes_per_s, stall_timeout_s=2.0),
        clock=lambda: 0.0,
        released=lambda: None,
    )


@pytest.mark.parametrize(
    ("bytes_per_s", "pages"), [(None, 64), (1e6, 64), (15_000.0, 10), (10.0, 1)]
)
def test_no_more_parts_go_at_a_time_than_a_link_carries_in_time(
    bytes_per_s: float | None, pages: int
) -> None:
    """In the time of one stall, by the stage with most layers; its host gives up after three."""
    assert ring_of(bytes_per_s).sender._staging_pages == pages
