"""Real vLLM with its own CPU tier, and kvrs's policy and tier in it: an agent serves what was
computed, and a stream that is cut goes on from it.
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvrs.ids import InstanceId
from kvrs.protocol.rows import params_key, seal
from kvrs_testkit.vllm_rows import KVRS, RowServers, prompt_of, regions, run_in_vllm
from kvrs_testkit.vllm_servers import PAGE_TOKENS
from tests.vllm.marks import REAL_VLLM

pytestmark = REAL_VLLM

TOKENS = 1200
OLDER = b"the secret before, long enough"


def printed(program: str, *arguments: str) -> dict[str, Any]:
    """Return what a program of the testkit prints as its last line."""
    done = run_in_vllm(program, *arguments)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("seed", range(3))
def test_the_ledger_trusts_what_was_copied_and_nothing_else(seed: int) -> None:
    """In vLLM's own manager, under stores, loads, failures and a reset drawn at random. A reader
    that believes the last key of each row is wrong thousands of times.
    """
    counts = printed("vllm_ledger_fuzz", str(seed), "3000", "24")
    assert (counts["wrong"], counts["evicted_too_soon"]) == (0, 0)
    assert min(counts["trusted"], counts["naive_wrong"]) > 1000


def test_prompts_are_decided_whatever_fails() -> None:
    """In vLLM's own tiering manager: keys of a prompt that were there, by what was wrong. A prompt
    that its memory has no room for is not loaded for ever.
    """
    found = printed("vllm_tier_run")
    fails = {name: count for name, count in found.items() if name.endswith(" fails")}
    assert len(fails) == 12
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
        # Of six keys four are the own agent's: found, loaded from it, loaded from another one.
        "another has the rest": [6, 4, 2],
        "another has them too": [4, 4, 0],
        "another hangs at a lookup": [4, 4, 0],
        "another hangs in a load": [4, 4, 0],
        "another hangs, and one has the rest": [6, 4, 2],
        "another is not named": [4, 4, 0],
        # And whether rows of the request are kept.
        "a client names another": [0, 0, 0, False],
        "a client names another to one that serves all": [4, 4, 0, True],
        "the key is that of another server": [0, 0, 0, False],
        "the key is the older one": [6, 4, 2, True],
        "agents are no names": [0, 0, 0, False],
        "surrogates": [0, 0, 0, False],
        "a million agents": [0, 0, 0, False],
        "its adapter is not known": 0,
        "a row is proved": [4, 7, None, 10],
        "a row is refuted": [4, 7, "a row of an agent is not what this engine computes", 8],
        "after a reset": 0,
    }


def test_a_changed_vllm_turns_kvrs_off_by_the_name_of_the_hook() -> None:
    """Each name that kvrs uses is changed, as a later version may have it."""
    found = printed("vllm_changed")
    assert found.pop("") == []
    assert len(found) == 16
    for name, faults in found.items():
        (fault,) = faults
        assert name in fault


def test_a_vllm_with_a_changed_hook_starts_and_says_which(tmp_path: Path) -> None:
    with RowServers(tmp_path, instances=1) as servers:
        servers.transfer["d0"] = {"kv_connector_module_path": "kvrs_testkit.vllm_changed"}
        servers.environment["KVRS_CHANGED"] = "lookup"
        servers.start_all()
        found = servers.complete("d0", prompt=prompt_of(1), max_tokens=4, **KVRS)
        assert len(found["choices"][0]["token_ids"]) == 4
        said = [line for line in servers.said().splitlines() if "kvrs is off" in line]
    assert said
    assert {line.split("kvrs is off in this vLLM: ")[1] for line in said} == {
        "vLLM's hook lookup takes (self, keys, req_context); allowed: (self, key, req_context)"
    }


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RowServers]:
    with RowServers(tmp_path_factory.mktemp("tier")) as servers:
        servers.environment["KVRS_SECRET"] = f"{servers.secret.decode()}\n{OLDER.decode()}"
        servers.start_all()
        yield servers


@pytest.mark.parametrize("cut", [70, 430, 1000])
def test_a_stream_goes_on_from_the_memory_of_a_killed_server(servers: RowServers, cut: int) -> None:
    """All its full blocks are loaded, at most the last one of a step that was not over is not."""
    prompt, there = prompt_of(cut), regions()

    got = cut_stream(servers, prompt, cut)
    rest, loaded = gone_on(servers, prompt, got)
    calm = servers.complete("d1", prompt=prompt, max_tokens=TOKENS, cache_salt=f"calm {cut}")
    servers.start("d0")
    servers.wait_ready("d0")

    assert got + rest == calm["choices"][0]["token_ids"]
    assert loaded >= (len(prompt + got) // PAGE_TOKENS - 1) * PAGE_TOKENS
    assert regions() <= there


def cut_stream(servers: RowServers, prompt: list[int], cut: int) -> list[int]:
    """Return what a client has of a stream whose server, d0, is killed behind so many tokens."""
    got: list[int] = []

    def read(ids: list[int]) -> None:
        got.extend(ids)
        if len(got) >= cut:
            servers.kill("d0")

    servers.stream("d0", prompt, TOKENS, read, **KVRS)
    return got


def gone_on(servers: RowServers, prompt: list[int], got: list[int]) -> tuple[list[int], float]:
    """Return the rest of a stream at d1, and how many tokens that has loaded for it."""
    before = servers.loaded_tokens("d1")
    rest: list[int] = []
    servers.stream("d1", prompt + got, TOKENS - len(got), rest.extend, **KVRS)
    return rest, servers.loaded_tokens("d1") - before


def test_negated_rows_of_a_killed_server_change_the_tail(servers: RowServers) -> None:
    """Loaded rows are used: attention reads what the dead server's memory has."""
    prompt = prompt_of(20)
    calm = servers.complete("d1", prompt=prompt, max_tokens=TOKENS, cache_salt="calm")
    with servers.memory_of("d0") as memory:
        got = cut_stream(servers, prompt, 200)
        numbers = np.frombuffer(memory, np.float32)
        np.negative(numbers, out=numbers)
        del numbers
    rest, loaded = gone_on(servers, prompt, got)
    servers.start("d0")
    servers.wait_ready("d0")

    ids = calm["choices"][0]["token_ids"]
    assert got == ids[: len(got)]
    assert loaded >= (len(prompt + got) // PAGE_TOKENS - 1) * PAGE_TOKENS
    assert rest != ids[len(got) :]


def test_nobody_who_does_not_ask_is_given_rows_and_another_salt_has_none(
    servers: RowServers,
) -> None:
    prompt = prompt_of(7)
    servers.complete("d0", prompt=prompt, max_tokens=40, **KVRS)
    for fields in ({}, KVRS | {"cache_salt": "another tenant"}):
        before = servers.loaded_tokens("d1")
        servers.complete("d1", prompt=prompt, max_tokens=4, **fields)
        assert servers.loaded_tokens("d1") == before
    before = servers.loaded_tokens("d1")
    servers.complete("d1", prompt=[*prompt, 7], max_tokens=4, cache_salt=None, **KVRS)
    assert servers.loaded_tokens("d1") == before  # Its own prefix cache has them.


def test_without_an_agent_prompts_are_computed_and_nothing_waits(servers: RowServers) -> None:
    prompt = prompt_of(8)
    calm = servers.complete("d0", prompt=prompt, max_tokens=40, **KVRS)
    servers.kill(servers.agent)
    try:
        found = servers.complete("d1", prompt=prompt, max_tokens=40, **KVRS)
        assert found["choices"][0]["token_ids"] == calm["choices"][0]["token_ids"]
    finally:
        servers.start(servers.agent)
        servers.wait_ready(servers.agent)


def test_the_next_agent_serves_an_engine_that_lives_on(servers: RowServers) -> None:
    """The engine hands its memory to the next agent by itself."""
    servers.kill(servers.agent)
    servers.start(servers.agent)
    servers.wait_ready(servers.agent)
    for attempt in range(10):
        prompt = prompt_of(10 + attempt)
        servers.complete("d0", prompt=prompt, max_tokens=4, **KVRS)
        before = servers.loaded_tokens("d1")
        servers.complete("d1", prompt=prompt, max_tokens=4, **KVRS)
        if servers.loaded_tokens("d1") > before:
            return
    raise AssertionError("no row of d0 came from the second agent")


def signed(secret: bytes, server: str) -> Any:
    made = seal([], params_key(secret, InstanceId(server)), time.time())
    return msgspec.to_builtins(made)


def test_a_server_heeds_what_proxies_of_its_cluster_have_signed(servers: RowServers) -> None:
    """Also by the older secret, while one is rotated. A client of its own port, and one that has
    captured what another server was told, is served as if it had not asked.
    """
    right = signed(servers.secret, "d1")
    cases: list[tuple[Any, bool]] = [
        (right, True),
        (signed(OLDER, "d1"), True),
        (signed(servers.secret, "d0"), False),
        (right | {"agents": ["agent-n0"]}, False),
        (right | {"mac": "0" * 64}, False),
        ({"agents": [], "mac": 7}, False),
        (["mac"], False),
    ]
    for number, (given, is_heeded) in enumerate(cases):
        prompt = prompt_of(70 + number)
        calm = servers.complete("d0", prompt=prompt, max_tokens=4, **KVRS)
        before = servers.loaded_tokens("d1")

        fields = {"kv_transfer_params": {"kvrs": given}}
        found = servers.complete("d1", prompt=prompt, max_tokens=4, **fields)

        assert (servers.loaded_tokens("d1") > before) == is_heeded, given
        assert found["choices"][0]["token_ids"] == calm["choices"][0]["token_ids"]
    told = [line for line in servers.said().splitlines() if "is ignored" in line]
    assert len(told) == 2
