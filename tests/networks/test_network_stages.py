"""Instances with a stage on another host, of which a link is cut.

n0: p0, d0      n1: the second stage of d0      n2: d1      n3: the second stage of d1
f0: the proxy
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import aiohttp
import pytest

from kvrs.config.file import ADMIN_ENV_NAME, Config, parse_config
from kvrs_testkit.networks import Network
from kvrs_testkit.processes import ForkedProcesses

pytestmark = [
    pytest.mark.network,
    pytest.mark.process,
    pytest.mark.usefixtures("possible"),
    pytest.mark.nightly,
]

HTTP, PAGES, STAGE, ADMIN = 8000, 9000, 9100, 8001
HOSTS = {
    "p0": "n0",
    "d0": "n0",
    "d0-stage-0": "n0",
    "d0-stage-1": "n1",
    "d1": "n2",
    "d1-stage-0": "n2",
    "d1-stage-1": "n3",
    "proxy": "f0",
}
PACE = "opt-13b-a100-vllm-tp1"  # About 20 ms per token: streams last long enough for the fault.
PROMPT = [(11 * at * at + 5) % 500 + 2 for at in range(50)]
TOKENS = 150
ADMIN_TOKEN = "a token for these tests only"
SEEDS = range(6)


class StagesOnHosts(ForkedProcesses):
    """The caller makes and removes the network."""

    def __init__(self, network: Network, model: str) -> None:
        self.network, self._model = network, model
        super().__init__(self._config())

    def __enter__(self) -> Self:
        super().__enter__()
        self._environment[ADMIN_ENV_NAME] = ADMIN_TOKEN
        return self

    def _config(self) -> Config:
        at = self.network.addresses

        def instance(name: str, role: str, **more: Any) -> dict[str, Any]:
            number = int(name == "d0")  # Of those on one host.
            ports = {"port": HTTP + 10 * number, "page_port": PAGES + number}
            return {"id": name, "role": role, "host": at[HOSTS[name]], **ports, **more}

        def divided(name: str, *nodes: str) -> dict[str, Any]:
            hosts = [{"node": node, "host": at[node], "port": STAGE} for node in nodes]
            return instance(name, "decode", pp=2, group="g", stage_hosts=hosts)

        nodes = [
            {"id": "n0", "instances": [instance("p0", "prefill"), divided("d0", "n0", "n1")]},
            {"id": "n1"},
            {"id": "n2", "instances": [divided("d1", "n2", "n3")]},
            {"id": "n3"},
        ]
        proxy = {"host": at["f0"], "admin_host": at["f0"], "port": HTTP, "admin_port": ADMIN}
        return parse_config(
            {
                "proxy": {**proxy, "allow_anonymous": True},
                "cluster": {
                    "model": self._model,
                    "nodes": nodes,
                    "engine": {"pace": PACE, "pages": 512},
                },
            }
        )

    def _resolved(self, config: Config) -> Config:
        return config  # On hosts of their own all ports are free.

    def _network(self, name: str) -> Path:
        return self.network.path(HOSTS[name])

    @property
    def url(self) -> str:
        return f"http://{self.network.addresses['f0']}"


@pytest.fixture
def cluster(tiny_llama: str) -> Iterator[StagesOnHosts]:
    hosts = Network("n0", "n1", "n2", "n3", "f0")
    with hosts as network, StagesOnHosts(network, tiny_llama) as cluster:
        names = [name for name in HOSTS if name != "proxy"]
        cluster.start(*names)
        cluster.wait_ready(*names)
        cluster.start_proxy()
        yield cluster
        for name in names:  # What drains would wait for transfers.
            cluster.kill(name)


async def complete(client: aiohttp.ClientSession, cluster: StagesOnHosts, seed: int) -> list[int]:
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True, "seed": seed}
    body |= {"return_token_ids": True, "temperature": 0.9 if seed else 0.0}
    async with client.post(f"{cluster.url}:{HTTP}/v1/completions", json=body) as answer:
        content = await answer.json()
        assert answer.status == 200, content
        token_ids: list[int] = content["choices"][0]["token_ids"]
        return token_ids


async def row_of(client: aiohttp.ClientSession, cluster: StagesOnHosts, name: str) -> Any:
    headers = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
    url = f"{cluster.url}:{ADMIN}/kvrs/v1/state"
    async with client.get(url, headers=headers) as answer:
        (row,) = (row for row in (await answer.json())["instances"] if row["id"] == name)
        return row


async def notices_while_idle(client: aiohttp.ClientSession, cluster: StagesOnHosts) -> None:
    """No connection closes and no batch is computed: probes of the kernel tell the cut. The stage
    is borrowed before a stream comes, and goes home when the link is whole.
    """
    while (await row_of(client, cluster, "d0"))["load"]["running"]:
        await asyncio.sleep(0.02)
    cluster.network.sever(["n0"], ["n1"])
    async with asyncio.timeout(60):
        while not borrows(await row_of(client, cluster, "d0")):
            await asyncio.sleep(0.05)
    cluster.network.heal()
    while not is_home(await row_of(client, cluster, "d0")):
        await asyncio.sleep(0.1)


async def test_streams_of_an_instance_that_a_cut_link_divides_go_on(
    cluster: StagesOnHosts,
) -> None:
    """No connection closes; the limit of a batch tells the loss. Greedy and seeded streams have all
    their tokens, once and the right ones. The instance waits where it reaches no donor, and
    borrows where it does; when the link is whole again the host, which has kept its ranks, serves
    it as before.
    """
    async with asyncio.timeout(300), aiohttp.ClientSession() as client:
        expected = await asyncio.gather(*(complete(client, cluster, seed) for seed in SEEDS))
        await notices_while_idle(client, cluster)
        before = await row_of(client, cluster, "d0")
        assert [rank["node"] for rank in before["ranks"]] == ["n0", "n1"]
        for is_lonely in (True, False):
            # A report that was made before the streams does not show that d0 computes any.
            while (await row_of(client, cluster, "d0"))["load"]["running"]:
                await asyncio.sleep(0.02)
            streams = [asyncio.create_task(complete(client, cluster, seed)) for seed in SEEDS]
            while not (await row_of(client, cluster, "d0"))["load"]["running"]:
                await asyncio.sleep(0.02)

            cluster.network.sever(["n0"], ["n1", "n3"] if is_lonely else ["n1"])

            assert await asyncio.gather(*streams) == expected
            while not (waits if is_lonely else borrows)(await row_of(client, cluster, "d0")):
                await asyncio.sleep(0.05)

            cluster.network.heal()
            while not is_home(after := await row_of(client, cluster, "d0")):
                await asyncio.sleep(0.1)
            assert after["pid"] == before["pid"]
            ranks = [[rank["pid"] for rank in row["ranks"]] for row in (before, after)]
            assert ranks[0] == ranks[1]
            assert after["stages"][1]["session"] > before["stages"][1]["session"]
            streams = [asyncio.create_task(complete(client, cluster, seed)) for seed in SEEDS]
            assert await asyncio.gather(*streams) == expected


def waits(row: Any) -> bool:
    return bool(row["state"] == "reforming" and row["load"]["reforming"]["way"] == "wait")


def borrows(row: Any) -> bool:
    return row["state"] != "reforming" and [each["donor"] for each in row["stages"]] == [None, "d1"]


def is_home(row: Any) -> bool:
    """The ranks are read again after the load report that says so."""
    parts = [each["donor"] for each in row["stages"]]
    parts += [each["borrowed_from"] for each in row["ranks"]]
    return bool(row["state"] == "full" and not any(parts))
