"""A load report that is repeated is a sign of life, and nothing else."""

from kvrs.ids import NodeId
from kvrs.protocol.instance import LinkReport, LoadReport
from tests.core.test_core import D0, Driver


def test_a_report_that_comes_again_counts_once() -> None:
    """A link that it names was measured when it first came."""
    driver = Driver()
    control = driver.control
    known = control.instances.known[D0]
    report = LoadReport(1, 0, 0, 0, 0.0, [LinkReport(NodeId("n9"), 1e9, 0.0, 0.0)])
    measured: list[float] = []
    control.link_measured = lambda *told: measured.append(told[-1])  # type: ignore[method-assign]

    for now_s in (1.0, 2.0, 3.0):
        control.load_reported(known, report, now_s)

    assert measured == [1.0]
    assert control.instances.known[D0].reported_s == 3.0


def test_an_equal_report_counts_once_unless_its_meaning_depends_on_when_it_comes() -> None:
    """An engine without work writes the same line again and again."""
    driver = Driver()
    control = driver.control
    known = control.instances.known[D0]
    counted: list[float] = []
    control._replicated = lambda *told: counted.append(told[-1])  # type: ignore[method-assign]

    for now_s in (1.0, 2.0):
        control.load_reported(known, LoadReport(1, 0, 0, 0, 0.0, []), now_s)
    for now_s in (3.0, 4.0):
        control.load_reported(known, LoadReport(1, 0, 0, 0, 0.0, [], draining=True), now_s)

    assert counted == [1.0, 3.0, 4.0]
