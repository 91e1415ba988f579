"""The instance that the parts of a stage go to next."""

from typing import cast

from kvrs.engine.ranks.remote import RemoteStage
from kvrs.engine.ring import RingStage
from kvrs.ids import InstanceId

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
