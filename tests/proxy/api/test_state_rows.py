"""Series of what processes report: which there are, and when they end."""

import re
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvrs.ids import InstanceId, NodeId
from kvrs.protocol.instance import (
    ExpertReport,
    HandOffReport,
    LoadReport,
    SpeculationReport,
    StageInfo,
)
from kvrs.proxy.api.rows import AGENTS, INSTANCES, PROXY, StateSeries
from kvrs.proxy.streams.metrics import Metrics

N0 = NodeId("n0")
SERIES = {name for name, row in {**INSTANCES, **AGENTS, **PROXY}.items() if row.help}
STATE = {
    "instances": [],
    "agents": [
        {
            "id": "agent-n0",
            "health": "up",
            "reserved_bytes": 7,
            "regions": [],
            "refused_rows": 0,
        }
    ],
    "proxies": [
        {
            "tokens_relayed": 4,
            "load": {"queued": 3, "running": 2, "kv_usage": 0.5},
            "waiting": 0,
            "unprotected": 0,
            "lacks_tokenizer": False,
            "starved": {"now": False, "spells": 0, "late_s": 0.0, "ago_s": None},
            "last_reload_succeeded": True,
            "peers": {"proxy-1": "down"},
        }
    ],
    "links": [{"source": "n0", "target": "n1", "bytes_per_s": 1e9, "measured": True}],
    "policy": {"spread": {"interval_factor": 1.5}},
    "members": [{"status": "alive"}],
    "gossip": {"health": 0, "dropped": {"malformed": 2}, "unread": 1},
}


def stage(number: int, target: str | None) -> StageInfo:
    replica_to = None if target is None else InstanceId(target)
    return StageInfo(number, N0, 10, 1, 1, 0.5, 0, replica_to=replica_to)


def a_row(*stages: StageInfo, damaged_pages: int = 0) -> dict[str, Any]:
    """An instance of which everything is known."""
    load = msgspec.to_builtins(
        LoadReport(
            *(1, 2, 3, 4, 0.5, []),
            damaged_pages=damaged_pages,
            degree=3,
            full_degree=4,
            experts=ExpertReport(8, 2, 1.5, [], 3, 0),
            replica_pages=5,
            stages=[*stages],
            speculation=SpeculationReport("lookup", True, 4, 10, 6, 1),
            hand_offs=HandOffReport(),
        )
    )
    return {
        "id": "d0",
        "role": "decode",
        "group": "g",
        "health": "up",
        "models": ["opt"],
        "load": load,
        "ranks": [],
        "draining": False,
        "detached_pairs": 0,
        "unprotected": False,
        "differs": False,
        **{key: load[key] for key in ("stages", "lends", "speculation", "experts")},
        "failing": {"/metrics": "HTTP 500 for /metrics"},
        "prefix_hits": {"prompt_tokens": 5, "cached_tokens": 3, "share": 0.6},
        "streams": 1,
        "starts": 1,
    }


def down(row: dict[str, Any]) -> dict[str, Any]:
    nothing: dict[str, Any] = {
        "load": None,
        "stages": [],
        "lends": [],
        "speculation": None,
        "experts": None,
    }
    return {**row, **nothing, "health": "down"}


class Shown:
    """The series of a state that changes."""

    def __init__(self, *instances: dict[str, Any]) -> None:
        self.instances = [*instances]
        self._registry = CollectorRegistry()
        self._registry.register(StateSeries(lambda: {**STATE, "instances": self.instances}))

    def names(self) -> set[str]:
        return {each.name for family in self._registry.collect() for each in family.samples}

    def value(self, name: str, **labels: str) -> float | None:
        return self._registry.get_sample_value(name, {"worker": "d0", **labels})


def test_each_row_has_a_sample_of_a_state_with_everything() -> None:
    """A row that reads nothing would be a series without a sample, for ever."""
    shown = Shown(a_row(stage(0, "d1")))

    assert shown.names() == SERIES


def test_a_gauge_ends_with_what_it_shows() -> None:
    """A label that the next report does not have; a worker that is down; one that is removed.
    Counters stay, and there is a 0 of some before the first report.
    """
    shown = Shown(a_row(stage(0, "d1"), stage(1, "d1")))
    lag = "kvrs_replica_lag_pages"
    assert shown.value(lag, stage="1") == 0

    shown.instances = [a_row(stage(0, "d1"), stage(1, None))]
    assert (shown.value(lag, stage="0"), shown.value(lag, stage="1")) == (0, None)
    shown.instances = [down(shown.instances[0])]
    assert shown.value("kvrs_worker_free_pages", role="decode") is None
    assert shown.value("kvrs_worker_up") == 0
    shown.instances = []
    assert shown.names() & {*INSTANCES} == {name for name in INSTANCES if name.endswith("_total")}
    assert Shown(down(a_row())).value("kvrs_damaged_pages_total") == 0


def test_a_total_that_restarts_is_added_to_what_was_counted_before() -> None:
    """A worker counts from 0 after a restart, and where it was after a lost connection; the series
    only rises.
    """
    shown, total = Shown(), "kvrs_damaged_pages_total"

    for damaged_pages in (3, 5, None, 5, 2):
        row = a_row(damaged_pages=damaged_pages or 0)
        shown.instances = [down(row) if damaged_pages is None else row]
        shown.names()

    shown.instances = []
    assert shown.value(total) == 7


def test_what_a_proxy_does_not_have_is_not_shown() -> None:
    """Before vLLM without agents there are no series of ranks, agents and gossip."""
    load = msgspec.to_builtins(LoadReport(1, 2, 3, 4, 0.5, []))
    plain = {**a_row(), "load": load, "speculation": None, "experts": None, "group": None}
    state = {**STATE, "instances": [plain], "agents": [], "members": [], "gossip": None}

    names = {family.name for family in StateSeries(lambda: state).collect()}

    assert "kvrs_worker_queue_seconds" in names
    hidden = ("kvrs_agent_", "kvrs_gossip_", "kvrs_expert", "kvrs_replica", "kvrs_lent")
    assert not [name for name in names if name.startswith((*hidden, "kvrs_worker_degree"))]


def test_names_and_help_follow_the_conventions() -> None:
    """`instance` is the scraper's own label; what only rises is a counter; help is a sentence."""
    registry = Metrics([InstanceId("d0")], [InstanceId("agent-n0")]).registry
    registry.register(StateSeries(lambda: {**STATE, "instances": [a_row()]}))
    families = list(text_string_to_metric_families(generate_latest(registry).decode()))

    assert len(families) > 50
    for family in families:
        assert not any("instance" in sample.labels for sample in family.samples), family.name
        if family.name.startswith("kvrs_"):  # Others are the library's.
            assert re.fullmatch("[A-Z0-9].*[^ ] .*[.]", family.documentation), family.name
        assert not family.name.endswith("_created"), family.name
    rising = {family.name for family in families if family.type == "counter"}
    assert {
        "kvrs_damaged_pages",
        "kvrs_gossip_dropped_packets",
        "kvrs_gossip_unread_facts",
        "kvrs_worker_deaths",
    } <= rising
