"""Names of instances in DNS: the machine's own resolver asks a name server of another host."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import aiohttp
import pytest

from kvrs.config.file import ADMIN_ENV_NAME, Config, parse_config
from kvrs_testkit.networks import DESK, Network
from kvrs_testkit.processes import Processes
from kvrs_testkit.scripted_model import expected_ids, save_tokenizer
from kvrs_testkit.scripted_vllm import ScriptedVllm, VllmScript
from kvrs_testkit.sse import events_of
from kvrs_testkit.vllm_cluster import CONFIG
from tests.networks.name_server import NameServer

pytestmark = [
    pytest.mark.process,
    pytest.mark.network,
    pytest.mark.xdist_group("networks"),
    pytest.mark.nightly,
]

HTTP, ADMIN = 8000, 8001
PREFILL, DECODE = "vllm-prefill.kvrs.test", "vllm-decode.kvrs.test"
ROLES = {"n0": "prefill", "n1": "decode", "n2": "decode"}
FRONT = "f0"
TOKEN = "a token for these tests only"
PROMPT, TOKENS = [5, 6, 7], 400
STEP_S = 0.2  # Between tokens while a test changes something.
PATIENCE_S = 60.0


def asking(
    network: Network, host: str, directory: Path, command: list[str], server: str
) -> list[str]:
    """The command at a host where getaddrinfo asks this name server and nothing else."""
    files = {
        Path("/etc/resolv.conf"): f"nameserver {server}\noptions timeout:1 attempts:2\n",
        Path("/etc/nsswitch.conf"): "hosts: files dns\n",
    }
    # In the mounts of this one command, which `ip netns exec` has made its own.
    lines = []
    for path, text in files.items():
        (own := directory / path.name).write_text(text)
        lines.append(f"[ ! -e {path} ] || mount --bind {own} {path}")
    script = "set -e\n" + "\n".join(lines) + '\nexec "$@"'
    return network.command_at(host, "sh", "-c", script, "sh", *command)


class ProxyOnHost(Processes):
    """A `kvrs proxy` at its host, and nothing else."""

    def __init__(self, network: Network, config: Config) -> None:
        self._network = network
        super().__init__(config)

    def __enter__(self) -> Self:
        super().__enter__()
        self._environment[ADMIN_ENV_NAME] = TOKEN
        return self

    def _resolved(self, config: Config) -> Config:
        return config  # On a host of its own all ports are free.

    def _placed(self, name: str, command: list[str]) -> list[str]:
        server = self._network.addresses[DESK]
        return asking(self._network, FRONT, self.directory, command, server)

    def log(self) -> str:
        return self._log("proxy").read_text(errors="replace")


@dataclass
class Fleet:
    """A proxy that knows names only, servers at the hosts n0, n1 and n2, clients at the desk."""

    network: Network
    names: NameServer
    script: VllmScript
    proxy: ProxyOnHost
    http: aiohttp.ClientSession

    def at(self, *hosts: str) -> list[str]:
        return [self.network.addresses[host] for host in hosts]

    def ids(self, *hosts: str) -> set[str]:
        """Ids of the instances there."""
        return {f"{ROLES[host]}-{self.network.addresses[host]}" for host in hosts}

    async def state(self) -> Any:
        (address,) = self.at(FRONT)
        headers = {"Authorization": f"Bearer {TOKEN}"}
        url = f"http://{address}:{ADMIN}/kvrs/v1/state"
        async with self.http.get(url, headers=headers) as answer:
            return await answer.json()

    async def stream(self) -> list[int]:
        """The token ids of a whole stream."""
        (address,) = self.at(FRONT)
        body = {
            "prompt": PROMPT,
            "max_tokens": TOKENS,
            "temperature": 0,
            "stream": True,
            "return_token_ids": True,
        }
        async with self.http.post(f"http://{address}:{HTTP}/v1/completions", json=body) as answer:
            *events, done, end = events_of(await answer.read())
        assert (done, end) == (b"data: [DONE]", b"")
        choices = [choice for event in events for choice in json.loads(event[6:])["choices"]]
        return [number for choice in choices for number in choice["token_ids"]]

    async def until(self, holds: Callable[[], Awaitable[bool]]) -> None:
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not await holds():
                    await asyncio.sleep(0.05)
        except TimeoutError as error:
            raise AssertionError(f"not within {PATIENCE_S:g} s\n{self.proxy.log()}") from error

    async def until_up(self, *hosts: str) -> None:
        """These are the instances, and all of them are up."""

        async def are_up() -> bool:
            rows = (await self.state())["instances"]
            return {row["id"] for row in rows if row["health"] == "up"} == self.ids(*hosts) and len(
                rows
            ) == len(hosts)

        await self.until(are_up)

    async def until_asked(self, times: int) -> None:
        """For each name so often from now on."""
        wanted = {name: self.names.asked[name] + times for name in (PREFILL, DECODE)}

        async def is_so() -> bool:
            return all(self.names.asked[name] >= count for name, count in wanted.items())

        await self.until(is_so)

    async def until_logged(self, cause: str) -> None:
        """Wait until a look-up of each name is logged with this cause."""

        async def is_so() -> bool:
            return all(f"{name}: {cause}" in self.proxy.log() for name in (PREFILL, DECODE))

        await self.until(is_so)

    async def pace(self) -> None:
        """One token of every stream at a time, so that none is silent; until cancelled."""
        while True:
            passed, self.script.gate = self.script.gate, asyncio.Event()
            if passed is not None:
                passed.set()
            await asyncio.sleep(STEP_S)


def document(network: Network, model: str) -> dict[str, Any]:
    front = network.addresses[FRONT]
    services = [
        {"id": role, "host": name, "port": HTTP, "role": role}
        for role, name in (("prefill", PREFILL), ("decode", DECODE))
    ]
    return {
        "proxy": {
            "host": front,
            "port": HTTP,
            "allow_anonymous": True,
            "admin_host": front,
            "admin_port": ADMIN,
            "load_interval_s": 0.05,
            "self_test": False,
        },
        "cluster": {
            "backend": "vllm",
            "model": model,
            "nodes": [],
            "services": services,
            "drain_s": 0.0,
        },
        "profiles": {"prefill": "opt-13b-a100-distserve-tp1"},
    }


@pytest.fixture
async def fleet(possible: None, tmp_path: Path) -> AsyncIterator[Fleet]:
    """In DNS are n0 and n1."""
    save_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    async with AsyncExitStack() as stack:
        network = stack.enter_context(Network(*ROLES, FRONT))
        names, script = NameServer(), VllmScript()
        await names.start(network.addresses[DESK])
        stack.callback(names.close)
        for host, role in ROLES.items():
            server = ScriptedVllm(
                host, host, role=role, script=script, host=network.addresses[host], port=HTTP
            )
            with network.at(host):
                await server.start()
            stack.push_async_callback(server.close)
        http = await stack.enter_async_context(aiohttp.ClientSession())
        config = parse_config(document(network, str(tmp_path)))
        proxy = stack.enter_context(ProxyOnHost(network, config))
        found = Fleet(network, names, script, proxy, http)
        names.names = {PREFILL: found.at("n0"), DECODE: found.at("n1")}
        await asyncio.to_thread(proxy.start_proxy)
        await found.until_up("n0", "n1")
        yield found


async def test_instances_follow_the_addresses_of_their_name(fleet: Fleet) -> None:
    """One that comes takes over from one that goes, and no token is lost."""
    pacing = asyncio.create_task(fleet.pace())
    asked = [asyncio.create_task(fleet.stream()) for _ in range(3)]

    fleet.names.names[DECODE] = fleet.at("n1", "n2")
    await fleet.until_up("n0", "n1", "n2")
    running = (await fleet.state())["streams"]
    fleet.names.names[DECODE] = fleet.at("n2")
    await fleet.until_up("n0", "n2")
    pacing.cancel()
    gate, fleet.script.gate = fleet.script.gate, None
    assert gate is not None
    gate.set()
    answers = await asyncio.gather(*asked)
    moves = {(row["from"], row["to"]) for row in (await fleet.state())["recoveries"]}

    assert len(running) == 3
    assert answers == [expected_ids(PROMPT, TOKENS)] * 3
    assert moves == {(*fleet.ids("n1"), *fleet.ids("n2"))}
    assert fleet.script.violations == []


async def test_a_name_server_that_fails_or_is_silent_takes_no_instance(fleet: Fleet) -> None:
    """Nor does a name that is gone; what it says when it is back is followed."""
    fleet.names.names[DECODE] = fleet.at("n1", "n2")
    await fleet.until_up("n0", "n1", "n2")
    fleet.names.is_failing = True
    await fleet.until_logged("Temporary failure in name resolution")
    fleet.names.is_failing, fleet.names.is_silent = False, True
    await fleet.until_asked(4)
    held, fleet.names.names = fleet.names.names, {}
    fleet.names.is_silent = False
    await fleet.until_logged("Name or service not known")

    await fleet.until_up("n0", "n1", "n2")
    assert await fleet.stream() == expected_ids(PROMPT, TOKENS)
    fleet.names.names = held | {DECODE: fleet.at("n2")}
    await fleet.until_up("n0", "n2")
