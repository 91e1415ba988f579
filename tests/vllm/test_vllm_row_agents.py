"""Real vLLM on two nodes: rows come from the other node's agent, and outlive the whole node at the
agent that keeps their second copy.
"""

import os
import random
import signal
import time
from collections.abc import Iterator
from functools import partial

import pytest

from kvrs.config.file import Config, dump_config, parse_config
from kvrs.transfer.rows.connections import dial_tcp
from kvrs_testkit.free_ports import free_ports
from kvrs_testkit.row_relay import Relay
from kvrs_testkit.vllm_rows import TierServers, asking, prompt_of, row_config
from kvrs_testkit.vllm_servers import PAGE_TOKENS
from tests.vllm.marks import REAL_VLLM

pytestmark = REAL_VLLM

TOKENS = 1200  # More than a server computes in the time in which its rows are copied.
FAR = "agent-n0"  # As seen from d1.
NEAR = "agent-n1"


class World:
    """d0 on n0 and d1 on n1, each with an agent. d1 reaches the agent of n0 by a relay, which the
    agent of n1 does not use for its copies.
    """

    def __init__(self, servers: TierServers, relay: Relay) -> None:
        self.servers, self.relay = servers, relay

    def loaded(self) -> float:
        """Tokens that d1 has loaded so far."""
        return self.servers.loaded_tokens("d1")

    def ask(self, prompt: list[int], *agents: str) -> tuple[list[int], float]:
        """A completion at d1: its ids, and the tokens that were loaded for it."""
        before = self.loaded()
        found = self.servers.complete("d1", prompt=prompt, max_tokens=24, **asking(*agents))
        return found["choices"][0]["token_ids"], self.loaded() - before

    def computed(self, prompt: list[int]) -> list[int]:
        """The same completion, computed: of a tenant whose rows nobody has."""
        salt = f"calm {time.monotonic_ns()}"
        found = self.servers.complete("d1", prompt=prompt, max_tokens=24, cache_salt=salt)
        ids: list[int] = found["choices"][0]["token_ids"]
        return ids


def ports_of(config: Config) -> list[int]:
    found = [node.agent.row_port for node in config.cluster.nodes]
    return [port for port in found if port is not None]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    directory = tmp_path_factory.mktemp("agents")
    config = row_config(directory, {"n0": ["d0"], "n1": ["d1"]})
    (port, _), (between,) = ports_of(config), free_ports(1)
    with TierServers(config) as servers:
        relay = Relay(partial(dial_tcp, "127.0.0.1", port))
        relay.listen(between)
        other = servers.config.model_dump(mode="json")
        other["cluster"]["nodes"][0]["agent"]["row_port"] = between
        by_relay = directory / "by_relay.yaml"
        by_relay.write_text(dump_config(parse_config(other)))
        servers.config_of["d1"] = by_relay
        servers.start(FAR, NEAR)
        servers.wait_ready(FAR, NEAR)
        for name in ("d0", "d1"):
            servers.start(name)
            servers.wait_ready(name)
        yield World(servers, relay)
        relay.close()


@pytest.fixture(autouse=True)
def well(world: World) -> Iterator[None]:
    yield
    world.relay.flip_in = world.relay.stop_in = None


def filled(world: World, seed: int, tokens: int = 4) -> list[int]:
    """A prompt that d0 has computed, without protection: nobody copies its rows."""
    prompt = prompt_of(seed)
    world.servers.complete("d0", prompt=prompt, max_tokens=tokens, **asking())
    return prompt


def blocks(prompt: list[int]) -> int:
    return (len(prompt) - 1) // PAGE_TOKENS * PAGE_TOKENS


def test_rows_of_another_node_are_loaded_by_who_names_its_agent(world: World) -> None:
    prompt = filled(world, 31)
    time.sleep(1.0)  # The request has ended: its second copy is gone.
    ids, without = world.ask(prompt, "agent-n7")
    assert without == 0
    prompt = filled(world, 32)
    time.sleep(1.0)
    ids, loaded = world.ask(prompt, FAR, "agent-n7")
    assert loaded == blocks(prompt)
    assert ids == world.computed(prompt)


@pytest.mark.parametrize(
    "agents", [7, "agent-n0", [None, 7, {}], ["agent-n0"] * 10_000, [["agent-n0"]]]
)
def test_malformed_agents_are_nobody(world: World, agents: object) -> None:
    prompt = filled(world, 40 + len(str(agents)) % 50)
    time.sleep(1.0)
    before = world.loaded()
    found = world.servers.complete(
        "d1", prompt=prompt, max_tokens=24, kv_transfer_params={"kvrs": {"agents": agents}}
    )
    assert world.loaded() == before
    assert found["choices"][0]["token_ids"] == world.computed(prompt)


def test_a_bit_that_flips_between_the_nodes_is_computed(world: World) -> None:
    prompt = filled(world, 33)
    time.sleep(1.0)
    world.relay.flip_in = 2000
    ids, loaded = world.ask(prompt, FAR)
    assert loaded == 0
    assert ids == world.computed(prompt)


def test_an_agent_that_stops_in_a_load_costs_its_rows_alone(world: World) -> None:
    prompt = filled(world, 34)
    time.sleep(1.0)
    world.relay.stop_in = 200_000  # In the middle of a row.
    ids, loaded = world.ask(prompt, FAR)
    assert loaded < blocks(prompt)
    assert ids == world.computed(prompt)


def test_an_agent_that_is_stopped_at_a_lookup_costs_its_rows_alone(world: World) -> None:
    time.sleep(1.5)  # It was silent since the last test.
    prompt, before = filled(world, 35), filled(world, 36)
    time.sleep(1.0)
    assert world.ask(before, FAR)[1] == blocks(before)
    os.kill(world.servers.pid(FAR), signal.SIGSTOP)
    try:
        ids, loaded = world.ask(prompt, FAR)
    finally:
        os.kill(world.servers.pid(FAR), signal.SIGCONT)
    assert loaded == 0
    assert ids == world.computed(prompt)


@pytest.mark.parametrize("seed", range(3))
def test_a_stream_goes_on_from_the_second_copy_of_a_lost_node(world: World, seed: int) -> None:
    """Server and agent are killed at once; the agent of the other node has what was computed up to
    a moment before.
    """
    servers = world.servers
    prompt, cut = prompt_of(seed), random.Random(seed).randrange(100, 500)
    got: list[int] = []
    copied: list[int] = []

    def read(ids: list[int]) -> None:
        got.extend(ids)
        if len(got) >= cut and not copied:
            copied.append(len(prompt + got))
            time.sleep(1.5)  # What is computed by now is copied; the stream goes on meanwhile.
            servers.kill(FAR)
            servers.kill("d0")

    servers.stream("d0", prompt, TOKENS, read, **asking())
    assert len(got) < TOKENS
    before = world.loaded()
    rest: list[int] = []
    servers.stream("d1", prompt + got, TOKENS - len(got), rest.extend, **asking(FAR))
    loaded = world.loaded() - before
    calm = servers.complete("d1", prompt=prompt, max_tokens=TOKENS, cache_salt=f"lost {seed}")
    servers.start(FAR, "d0")
    servers.wait_ready(FAR, "d0")

    assert got + rest == calm["choices"][0]["token_ids"]
    assert loaded >= (copied[0] // PAGE_TOKENS - 2) * PAGE_TOKENS
