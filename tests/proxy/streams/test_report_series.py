"""Series of what workers report: which there are, and when they end."""

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from kvrs.core.model.member import Member
from kvrs.ids import InstanceId, NodeId
from kvrs.protocol.experts import ExpertReport
from kvrs.protocol.hand_offs import HandOffReport
from kvrs.protocol.instance import LoadReport, Role
from kvrs.protocol.speculation import SpeculationReport
from kvrs.protocol.stages import StageInfo
from kvrs.proxy.streams.report_series import GAUGES, TOTALS, ReportSeries

D0, N0 = InstanceId("d0"), NodeId("n0")


def stage(number: int, target: str | None) -> StageInfo:
    replica_to = None if target is None else InstanceId(target)
    return StageInfo(number, N0, 10, 1, 1, 0.5, 0, replica_to=replica_to)


def full_report(*stages: StageInfo) -> LoadReport:
    return LoadReport(
        *(1, 2, 3, 4, 0.5, []),
        degree=3,
        full_degree=4,
        experts=ExpertReport(8, 2, 1.5, [], 3, 0),
        replica_pages=5,
        stages=[*stages],
        speculation=SpeculationReport("lookup", True, 4, 10, 6, 1),
        hand_offs=HandOffReport(),
    )


def names(registry: CollectorRegistry) -> set[str]:
    """Names of the series that have a sample."""
    families: list[Metric] = [*registry.collect()]
    return {family.name for family in families if family.samples}


def test_each_row_has_a_sample_of_a_report_with_everything() -> None:
    """A row that reads nothing would be a series without a sample, for ever."""
    registry = CollectorRegistry()
    series = ReportSeries(registry, registry)
    known = Member(D0, N0, Role.DECODE, group="g", load=full_report(stage(0, "d1")))

    series.measure(known)

    assert names(registry) == {row.name for row in (*GAUGES, *TOTALS)}


def test_a_gauge_ends_with_what_it_shows() -> None:
    """A label that the next report does not have; a worker that is down; one that is removed.
    Counters stay.
    """
    registry = CollectorRegistry()
    series = ReportSeries(registry, registry)
    known = Member(D0, N0, Role.DECODE, group="g", load=full_report(stage(0, "d1"), stage(1, "d1")))
    series.measure(known)
    lag, second = "kvrs_replica_lag_pages", {"worker": "d0", "stage": "1"}
    assert registry.get_sample_value(lag, second) == 0

    known.load = full_report(stage(0, "d1"), stage(1, None))
    series.measure(known)

    assert registry.get_sample_value(lag, second) is None
    assert registry.get_sample_value(lag, second | {"stage": "0"}) == 0
    known.load = None
    series.measure(known)
    assert names(registry) == {row.name for row in TOTALS}
    known.load = full_report(stage(0, "d1"))
    series.measure(known)
    series.remove(D0)
    assert names(registry) == {row.name for row in TOTALS}
