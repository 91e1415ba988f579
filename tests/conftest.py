"""Real vLLM, for the tests that can have it: servers take most of a minute to start, so there is one set for a whole run."""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from experiments.vllm_servers import VllmServers


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
