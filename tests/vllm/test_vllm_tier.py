"""Real vLLM with its own CPU tier, and kvrs's policy and tier in it: an agent serves what was
computed, and a stream that is cut goes on from it.
"""

import json
import os
import random
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvrs.config.file import parse_config
from kvrs_testkit.vllm_servers import (
    PAGE_TOKENS,
    PYTHON_ENV,
    REQUEST_TIMEOUT_S,
    VllmServers,
    connector_config,
)
from tests.vllm.marks import REAL_VLLM

pytestmark = REAL_VLLM

TOKENS = 600
REGIONS = "vllm_offload_"
KVRS: dict[str, Any] = {"kv_transfer_params": {"kvrs": {}}}


def printed(program: str, *arguments: str) -> dict[str, int]:
    """Run a program of the testkit in vLLM's interpreter; return what it prints."""
    done = subprocess.run(
        [os.environ[PYTHON_ENV], "-m", f"kvrs_testkit.{program}", *arguments],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("seed", range(3))
def test_the_ledger_trusts_what_was_copied_and_nothing_else(seed: int) -> None:
    """In vLLM's own manager, under stores, loads, failures and a reset drawn at random. A reader
    that believes the last key of each row is wrong thousands of times.
    """
    program = [
        os.environ[PYTHON_ENV],
        "-m",
        "kvrs_testkit.vllm_ledger_fuzz",
        str(seed),
        "3000",
        "24",
    ]
    done = subprocess.run(
        program, env=os.environ | {"PYTHONPATH": os.getcwd()}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout.splitlines()[-1])
    assert (counts["wrong"], counts["evicted_too_soon"]) == (0, 0)
    assert min(counts["trusted"], counts["naive_wrong"]) > 1000


def test_prompts_are_decided_whatever_fails() -> None:
    """In vLLM's own tiering manager: keys of a prompt that were there, by what was wrong. A prompt
    that its memory has no room for is not loaded for ever.
    """
    found = printed("vllm_tier_run")
    fails = {name: count for name, count in found.items() if name.endswith(" fails")}
    assert len(fails) == 11
    assert set(fails.values()) <= {0, 4}
    told = {name: count for name, count in found.items() if name not in fails}
    assert told == {
        "room": 6,
        "no room": 8,
        "some are gone": 4,
        "none is there": 0,
        "nobody asked": 0,
        "all are served": 4,
        "params are no object": 0,
        "kvrs is no object": 0,
        "another connector brings it": 0,
        "its adapter is not known": 0,
        "after a reset": 0,
    }


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServers]:
    """Two decode instances on one node with its agent."""
    document = connector_config(tmp_path_factory.mktemp("tier"), 3).model_dump(mode="json")
    first, second, _ = nodes = document["cluster"]["nodes"]
    first["instances"] += second["instances"]
    nodes.remove(second)
    with VllmServers(parse_config(document), os.environ[PYTHON_ENV]) as servers:
        for name in ("d0", "d1"):
            servers.transfer[name] = with_tier(servers, name)
        servers.start(str(servers.config.cluster.nodes[0].agent_id))
        for name in ("d0", "d1"):
            servers.start(name)
            servers.wait_ready(name)
        yield servers


def with_tier(servers: VllmServers, name: str) -> dict[str, Any]:
    return {
        "kv_connector": "KvrsOffloading",
        "kv_connector_module_path": "kvrs.vllm.offloading",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "kvrs_testkit.vllm_cpu_tier",
            "cpu_bytes_to_use": 64 << 20,
            "kvrs": {"config": str(servers._config_path), "instance": name},
        },
    }


def prompt_of(seed: int) -> list[int]:
    draw = random.Random(seed)
    return draw.choices(range(5, 200), k=draw.randrange(100, 400))


def stream(
    servers: VllmServers,
    name: str,
    prompt: list[int],
    tokens: int,
    got: Callable[[list[int]], None],
) -> None:
    """Hand on each event's ids, until the stream or its server ends."""
    body = {
        "model": servers.model,
        "prompt": prompt,
        "max_tokens": tokens,
        "stream": True,
        "temperature": 0,
        "return_token_ids": True,
        "ignore_eos": True,
    } | KVRS
    request = urllib.request.Request(
        servers.url(name) + "/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    got(json.loads(line[6:])["choices"][0]["token_ids"])
    except OSError:
        return


@pytest.mark.parametrize("seed", range(3))
def test_a_stream_goes_on_from_the_memory_of_a_killed_server(
    servers: VllmServers, seed: int
) -> None:
    """All its full blocks are loaded, at most the last one of a step that was not over is not."""
    prompt, cut = prompt_of(seed), random.Random(seed).randrange(60, 500)
    got: list[int] = []

    def read(ids: list[int]) -> None:
        got.extend(ids)
        if len(got) >= cut:
            servers.kill("d0")

    stream(servers, "d0", prompt, TOKENS, read)
    before = servers.counters("d1")
    rest: list[int] = []
    stream(servers, "d1", prompt + got, TOKENS - len(got), rest.extend)
    loaded = servers.counters("d1")["pulled_tokens"] - before["pulled_tokens"]
    calm = servers.complete("d1", prompt=prompt, max_tokens=TOKENS, cache_salt=f"calm {seed}")
    servers.start("d0")
    servers.wait_ready("d0")

    assert got + rest == calm["choices"][0]["token_ids"]
    assert loaded >= (len(prompt + got) // PAGE_TOKENS - 1) * PAGE_TOKENS
    assert [name for name in os.listdir("/dev/shm") if name.startswith(REGIONS)] == []


def test_nobody_who_does_not_ask_is_given_rows_and_another_salt_has_none(
    servers: VllmServers,
) -> None:
    prompt = prompt_of(7)
    servers.complete("d0", prompt=prompt, max_tokens=40, **KVRS)
    for fields in ({}, KVRS | {"cache_salt": "another tenant"}):
        before = servers.counters("d1")["pulled_tokens"]
        servers.complete("d1", prompt=prompt, max_tokens=4, **fields)
        assert servers.counters("d1")["pulled_tokens"] == before
    before = servers.counters("d1")["pulled_tokens"]
    servers.complete("d1", prompt=[*prompt, 7], max_tokens=4, cache_salt=None, **KVRS)
    assert servers.counters("d1")["pulled_tokens"] == before  # Its own prefix cache has them.


def test_without_an_agent_prompts_are_computed_and_nothing_waits(servers: VllmServers) -> None:
    prompt = prompt_of(8)
    calm = servers.complete("d0", prompt=prompt, max_tokens=40, **KVRS)
    agent = str(servers.config.cluster.nodes[0].agent_id)
    servers.kill(agent)
    try:
        found = servers.complete("d1", prompt=prompt, max_tokens=40, **KVRS)
        assert found["choices"][0]["token_ids"] == calm["choices"][0]["token_ids"]
    finally:
        servers.start(agent)
        servers.wait_ready(agent)


def test_the_next_agent_serves_an_engine_that_lives_on(servers: VllmServers) -> None:
    """The engine hands its memory to the next agent by itself."""
    agent = str(servers.config.cluster.nodes[0].agent_id)
    servers.kill(agent)
    servers.start(agent)
    servers.wait_ready(agent)
    for attempt in range(10):
        prompt = prompt_of(10 + attempt)
        servers.complete("d0", prompt=prompt, max_tokens=4, **KVRS)
        before = servers.counters("d1")["pulled_tokens"]
        servers.complete("d1", prompt=prompt, max_tokens=4, **KVRS)
        if servers.counters("d1")["pulled_tokens"] > before:
            return
    raise AssertionError("no row of d0 came from the second agent")
