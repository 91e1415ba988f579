"""For which instance one that is started again makes drafts."""

from kvrs.ids import InstanceId
from kvrs.protocol.instance import LoadReport, SpeculationReport
from kvrs_engine.elastic.pairing import by_congestion

OWN, A, B, C = map(InstanceId, ("own", "a", "b", "c"))


def load(
    delay_s: float,
    running: int,
    *,
    source: str = "draft",
    helper: str | None = None,
    draining: bool = False,
) -> LoadReport:
    by = None if helper is None else InstanceId(helper)
    drafts = SpeculationReport(source, helper=by)
    return LoadReport(1, 0, running, 10, delay_s, [], speculation=drafts, draining=draining)


def test_the_one_at_which_a_request_waits_longest_comes_first() -> None:
    """With equal waits the number of streams decides."""
    loads = {A: load(0.5, 1), B: load(2.0, 0), C: load(0.5, 3)}
    assert by_congestion(loads, OWN) == [B, C, A]


def test_a_helped_one_is_left_out_unless_its_helper_was_this_one_before() -> None:
    loads = {A: load(9.0, 9, helper="b"), B: load(1.0, 1, helper="own"), C: load(0.0, 0)}
    assert by_congestion(loads, OWN) == [B, C]


def test_those_that_end_or_take_no_drafts_are_left_out() -> None:
    plain = LoadReport(1, 0, 9, 10, 9.0, [])
    loads = {A: load(9.0, 9, draining=True), B: load(9.0, 9, source="other"), C: plain}
    assert by_congestion(loads, OWN) == []
