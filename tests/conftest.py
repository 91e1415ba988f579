"""Ray's environment; and real vLLM, for the tests that can have it.

Its servers take most of a minute to start, so there is one set for a whole run.
"""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from kvrs.cluster.launcher import ENVIRONMENT, ray_token

if TYPE_CHECKING:
    from experiments.vllm_servers import VllmServers

# Ray reads these when it is imported, which a test module may do when it is collected; and one token serves a whole process.
os.environ.update({name: value for name, value in ENVIRONMENT.items() if name.startswith("RAY_")}, RAY_AUTH_TOKEN=ray_token())


@pytest.fixture(scope="session")
def vllm_servers(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[VllmServers]":
    """One prefill (p0) and two decode servers (d0, d1), up and warm. Whoever ends one brings it back."""
    python = os.environ.get("KVRS_VLLM_PYTHON")
    if not python:
        pytest.skip("KVRS_VLLM_PYTHON does not name the interpreter of an environment with vLLM; `make test-vllm` makes one")
    # Not for those who skip: it loads torch.
    from experiments.vllm_servers import VllmServers, vllm_config

    with VllmServers(vllm_config(tmp_path_factory.mktemp("vllm")), python) as servers:
        servers.start(*servers.names)
        servers.wait_ready(*servers.names)
        yield servers
