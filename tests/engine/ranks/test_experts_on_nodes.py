"""A mixture of experts with a stage in a host: as exact as in one process, without copies."""

import os
import signal
from pathlib import Path

import pytest

from kvrs.errors import RanksLostError
from kvrs_engine.engine.layers.proofs import same_bytes
from kvrs_engine.engine.random_experts import ExpertsModel, write_experts_model
from kvrs_engine.engine.worker import Worker
from tests.engine.ranks.on_nodes import chunks, closing, config_of, head_of, hosting

pytestmark = [
    pytest.mark.engine,
    pytest.mark.network,
    pytest.mark.process,
    pytest.mark.usefixtures("patient"),
]


def test_experts_of_a_stage_in_a_host_have_the_bytes_of_one_process(tmp_path: Path) -> None:
    """Also once the host has lost one of its ranks, whose experts go to the other one."""
    model = tmp_path / "model"
    write_experts_model(model, ExpertsModel.tiny("mixtral", skew=1.0), seed=5)
    config = config_of(model, tp=2)
    worker = Worker(model, config.cluster.engine)
    expected = [worker.execute([chunk]) for chunk in chunks()]

    with hosting(config, tmp_path), closing(head_of(config)) as head:
        assert head.fingerprint == worker.fingerprint
        for kills in range(2):
            if kills:
                os.kill(head.pids[3], signal.SIGKILL)
            for chunk, logits in zip(chunks(), expected, strict=True):
                while True:
                    try:
                        found = head.execute([chunk])
                    except RanksLostError:
                        head.on_lost()
                    else:
                        break
                assert same_bytes(found, logits)
        assert head.now.deaths == 1
        assert head.now.layout.copies == ()
