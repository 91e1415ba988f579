"""The engines that the contract suite runs over, of which those that are not at hand are skipped
with the reason; and embedded ones behind a proxy.
"""

from collections.abc import AsyncIterator, Iterator
from contextlib import closing

import pytest

from kvrs.config.file import parse_config
from kvrs.proxy.backends.cluster import new_engine_links, open_backends
from kvrs_testkit.processes import ForkedProcesses, Processes
from tests.backends.clusters import (
    Cluster,
    StockCluster,
    distserve,
    embedded,
    scripted_sglang,
    scripted_vllm,
)
from tests.backends.conversations import BackendCluster


@pytest.fixture(
    scope="session",
    params=[
        "embedded",
        "scripted-vllm",
        "scripted-sglang",
        pytest.param("distserve", marks=pytest.mark.distserve),
        pytest.param("vllm", marks=pytest.mark.vllm),
        pytest.param("sglang", marks=pytest.mark.sglang),
    ],
)
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    match request.param:
        case "scripted-vllm":
            with closing(scripted_vllm(tmp_path_factory.mktemp("vllm"))) as servers:
                yield servers
        case "scripted-sglang":
            with closing(scripted_sglang(tmp_path_factory.mktemp("sglang"))) as servers:
                yield servers
        case "embedded":
            with embedded(request.getfixturevalue("tiny_llama")) as ours:
                yield ours
        case "distserve":
            with distserve() as patched:
                yield patched
        case engine:
            yield StockCluster(request.getfixturevalue(f"{engine}_servers"))


@pytest.fixture
async def system(cluster: Cluster) -> AsyncIterator[BackendCluster]:
    """The cluster as a proxy sees it, every instance up and met."""
    async with new_engine_links(cluster.config, cluster.secret) as links:
        system = BackendCluster(cluster, open_backends(cluster.config, links, cluster.secret))
        await system.meet()
        yield system


class _Stallable(ForkedProcesses):
    def _placed(self, name: str, command: list[str]) -> list[str]:
        python, _, *rest = command
        is_proxy = name.startswith("proxy")
        return command if is_proxy else [python, "-m", "tests.backends.stallable", *rest]


@pytest.fixture(scope="package")
def processes(tiny_llama: str) -> Iterator[Processes]:
    """Real engines p0, d0 and d1 and their agent behind a proxy; a test that ends one brings it
    back.
    """
    instances = [
        {"id": "p0", "role": "prefill"},
        {"id": "d0", "role": "decode"},
        {"id": "d1", "role": "decode"},
    ]
    config = parse_config(
        {
            "proxy": {"port": 0, "admin_port": 0},
            "cluster": {"model": tiny_llama, "nodes": [{"id": "n0", "instances": instances}]},
            "backup": {"mode": "local", "capacity_bytes": 64 << 20},
        }
    )
    names = ("p0", "d0", "d1", "agent-n0")
    with _Stallable(config) as running:
        running.start(*names)
        running.wait_ready(*names)
        running.start_proxy()
        yield running
