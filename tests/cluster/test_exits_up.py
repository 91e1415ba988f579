"""A cluster whose processes end in several ways: its proxies hear how."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvrs.config.file import parse_config
from kvrs.ids import InstanceId
from kvrs_lab.cluster.fault_injection import rows_of
from kvrs_lab.cluster.launcher import Cluster
from kvrs_testkit.forked import starts_forked
from tests.cluster.launches import until

pytestmark = [
    pytest.mark.process,
    pytest.mark.network,
    pytest.mark.xdist_group("clusters"),
    pytest.mark.nightly,
]

PAIR = "d1"  # Of two ranks.
Row = dict[str, Any]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, tiny_llama: str) -> Iterator[Cluster]:
    """Two proxies, and an instance of two ranks that does not re-form."""
    nodes = [
        {
            "id": "n0",
            "instances": [
                {"id": "p0", "role": "prefill"},
                {"id": "d0", "role": "decode"},
                {"id": PAIR, "role": "decode", "tp": 2},
            ],
        }
    ]
    document = {
        "cluster": {"model": tiny_llama, "nodes": nodes, "engine": {"pages": 256}},
        "elastic": {"enabled": False},
        "proxy": {
            "port": 0,
            "admin_port": 0,
            "event_log": str(tmp_path_factory.mktemp("exits") / "events.jsonl"),
        },
    }
    with starts_forked(), Cluster(parse_config(document), lambda line: None, proxies=2) as running:
        yield running


def row_of(cluster: Cluster, name: str) -> Row:
    return rows_of(cluster.state())[InstanceId(name)]


def logs_of(cluster: Cluster) -> list[Path]:
    return [Path(str(proxy.settings.event_log)) for proxy in cluster.proxies]


def exits(log: Path) -> list[Row]:
    """The events of this kind in the log of a proxy."""
    events = (json.loads(line).get("event", {}) for line in log.read_text().splitlines())
    return [event for event in events if event.get("kind") == "InstanceExited"]


def reported(cluster: Cluster, name: str, end: Callable[[Row], object]) -> tuple[Row, list[Row]]:
    """The row of an instance before its end, and the event at each proxy that tells of it."""
    cluster.wait_all_up()
    before = row_of(cluster, name)

    end(before)

    def told() -> list[Row]:
        found = [
            event
            for log in logs_of(cluster)
            for event in exits(log)
            if (event["instance"], event["epoch"]) == (name, before["epoch"])
        ]
        return found if len(found) == len(cluster.proxies) else []

    return before, until(told, within_s=60.0)


@pytest.mark.parametrize(
    ("number", "is_external"),
    [
        (signal.SIGKILL, True),
        (signal.SIGTERM, True),
        (signal.SIGSEGV, False),
        (signal.SIGABRT, False),
    ],
)
def test_every_proxy_hears_which_signal_ended_an_instance(
    cluster: Cluster, number: signal.Signals, is_external: bool
) -> None:
    """In the epoch in which it died, and whether a request may have caused it."""
    _, told = reported(cluster, "d0", lambda row: os.kill(row["pid"], number))

    assert {(each["cause"], each["is_external"]) for each in told} == {(number.name, is_external)}


@pytest.mark.parametrize(
    ("number", "is_external"), [(signal.SIGKILL, True), (signal.SIGSEGV, False)]
)
def test_the_end_of_a_rank_counts_where_it_ends_its_instance(
    cluster: Cluster, number: signal.Signals, is_external: bool
) -> None:
    """The process of the instance ends by an exception then, which says nothing."""
    rank = 1
    _, told = reported(
        cluster,
        PAIR,
        lambda row: os.kill(
            next(each["pid"] for each in row["ranks"] if each["rank"] == rank), number
        ),
    )

    assert {(each["cause"], each["is_external"]) for each in told} == {(number.name, is_external)}


def test_the_process_of_an_instance_of_ranks_may_end_itself(cluster: Cluster) -> None:
    _, told = reported(cluster, PAIR, lambda row: os.kill(row["pid"], signal.SIGKILL))

    assert {(each["cause"], each["is_external"]) for each in told} == {("SIGKILL", True)}
