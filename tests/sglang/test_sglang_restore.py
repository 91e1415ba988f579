"""Streams of real SGLang go on from the KV in a dead server's own memory."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from experiments.sglang_restore.run import Rounds

PYTHON_ENV = "KVRS_SGLANG_PYTHON"
pytestmark = [
    *(pytest.mark.sglang, pytest.mark.process, pytest.mark.network, pytest.mark.nightly),
    pytest.mark.xdist_group("clusters"),
    pytest.mark.skipif(PYTHON_ENV not in os.environ, reason=f"{PYTHON_ENV} names no interpreter"),
]


@pytest.fixture(scope="module")
def rounds(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Rounds]":
    # Imported late: it loads torch, which skipped tests do not need.
    from experiments.sglang_restore.run import Rounds, restoring_config
    from kvrs_testkit.sglang_servers import SglangServers

    directory: Path = tmp_path_factory.mktemp("sglang")
    with SglangServers(restoring_config(directory), os.environ[PYTHON_ENV]) as servers:
        found = Rounds(servers, seed=2)
        found.start()
        yield found


def test_a_prefill_that_has_nothing_loads_what_a_dead_decode_server_had(rounds: "Rounds") -> None:
    """Identical, and at least 95 % loaded, of which nothing was sent before."""
    from experiments.sglang_restore.run import faults_of

    cell = rounds.measure("decode 0")

    assert not faults_of(cell), cell
