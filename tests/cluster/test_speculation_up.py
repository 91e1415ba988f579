"""`kvrs lab up` with drafts: an instance that is killed helps the other one while it loads
again.
"""

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from kvrs.config.file import parse_config
from kvrs.ids import InstanceId
from kvrs_lab.cluster.fault_injection import rows_of
from kvrs_lab.cluster.launcher import Cluster
from kvrs_testkit.forked import starts_forked
from tests.cluster.launches import END_S, token_ids, until

pytestmark = [
    pytest.mark.process,
    pytest.mark.network,
    pytest.mark.xdist_group("clusters"),
    pytest.mark.nightly,
]

LOAD_S = 8.0  # Of the generated model, whose draft is loaded before.


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Model and draft are generated; the disk is slow."""
    nodes = [{"id": f"n{n}", "instances": [{"id": f"d{n}", "role": "both"}]} for n in range(2)]
    document = {
        "cluster": {
            "nodes": nodes,
            "engine": {"pages": 256, "disk_bytes_per_s": 2.9e6 / LOAD_S},
            "drain_s": 1.0,
        },
        "proxy": {"port": 0, "admin_port": 0},
        "speculation": {"source": "draft"},
    }
    with starts_forked(), Cluster(parse_config(document), lambda line: None) as running:
        yield running


def row(cluster: Cluster, name: str) -> dict[str, Any]:
    return rows_of(cluster.state())[InstanceId(name)]


def ids(cluster: Cluster, tokens: int) -> list[int]:
    """The ids of a greedy stream."""
    prompt = [(7 * at * at + 3) % 500 + 2 for at in range(50)]
    return token_ids(cluster.url, prompt, tokens)


def test_self_tests_are_made_with_drafts(cluster: Cluster) -> None:
    """Before another instance makes any: of those that the proxy proposes one is wrong, in the
    greedy stream and in the seeded one. A step that also computes a prompt verifies no drafts, so
    one right draft is not proposed.
    """

    def tested() -> dict[str, Any] | None:
        found = row(cluster, "d0")["self_test"]
        return found if found is not None and found["done"] else None

    def drafted() -> bool:
        drafts = row(cluster, "d0")["speculation"]
        return [drafts[each] for each in ("steps", "proposed", "accepted")] == [4, 13, 7]

    found = until(tested, END_S)
    until(drafted, END_S)  # As its next report counts them.

    assert (found["continues"], found["differs_from"]) == ("exact seeded", [])


def test_a_killed_instance_helps_while_it_loads_and_then_serves(cluster: Cluster) -> None:
    calm = ids(cluster, 300)
    before, accepted = row(cluster, "d0"), row(cluster, "d1")["speculation"]["accepted"]
    assert before["state"] == "full"
    os.kill(before["pid"], signal.SIGKILL)

    def assisting() -> dict[str, Any] | None:
        found = row(cluster, "d0")
        return found if (found.get("state"), found.get("paired_with")) == ("assist", "d1") else None

    helper = until(assisting, END_S)
    assert 0 < helper["ready_in_s"] <= LOAD_S
    assert helper["skipped"] == ""

    def further() -> dict[str, Any] | None:
        found = assisting()
        return found if found and found["ready_in_s"] < helper["ready_in_s"] - 1.0 else None

    until(further, END_S)  # Its own model is read meanwhile.
    assert row(cluster, "d1")["paired_with"] == "d0"
    assert ids(cluster, 300) == calm
    until(lambda: row(cluster, "d1")["speculation"]["accepted"] > accepted, END_S)

    until(lambda: row(cluster, "d0").get("state") == "full", END_S)
    until(lambda: row(cluster, "d1")["paired_with"] is None, END_S)
    assert row(cluster, "d0")["speculation"]["skipped"] == ""
    assert ids(cluster, 300) == calm
