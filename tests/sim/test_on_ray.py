"""Seeds simulated by the machines of a Ray cluster."""

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from kvrs_lab.cluster.loopback_ray import ENVIRONMENT, OBJECT_STORE_BYTES

pytestmark = [
    pytest.mark.process,
    pytest.mark.network,
    pytest.mark.xdist_group("clusters"),
    pytest.mark.nightly,
]

# Runs until its input ends.
CLUSTER = f"""
import logging, sys
import ray

ray.init(num_cpus=1, num_gpus=0, include_dashboard=False, log_to_driver=False,
    object_store_memory={OBJECT_STORE_BYTES}, logging_level=logging.CRITICAL, _temp_dir=sys.argv[1])
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
ray.shutdown()
"""
TRACE = '{"timestamp": %d, "input_length": 40, "output_length": 9, "hash_ids": [%d]}'


def simulated(env: dict[str, str], *arguments: str) -> tuple[int, Any]:
    """Its status, and its document or what it says is wrong."""
    command = [sys.executable, "-m", "kvrs", "lab", "simulate", "--json", *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    return done.returncode, json.loads(done.stdout) if done.stdout else done.stderr


def test_seeds_of_a_ray_cluster_have_the_outcomes_of_those_here(tmp_path: Path) -> None:
    """A task for each, with the trace, which no machine there has; without a cluster at the address
    nothing is simulated.
    """
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(TRACE % (100 * n, n) for n in range(20)))
    case = ("--trace", str(trace), "--deaths", "1", "--seeds", "2")
    env = {**os.environ, **ENVIRONMENT, "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    # Paths of Ray's sockets have a limit.
    with (
        TemporaryDirectory() as short,
        subprocess.Popen(
            [sys.executable, "-c", CLUSTER, short],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as cluster,
    ):
        assert cluster.stdout is not None
        address = cluster.stdout.readline().strip()

        there = simulated(env, *case, "--ray", address)
        cluster.communicate("")

    assert there == simulated(env, *case)
    assert there[0] == 0
    status, said = simulated(env, *case, "--ray", "nowhere")
    assert status == 2
    assert "--ray: got 'nowhere'" in said
