"""Rows of every kind of model that vLLM's CPU backend runs: a server is killed in mid-stream, and
the stream goes on at another one, identically and from the rows of the first.
"""

import json
import random
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvrs_testkit.vllm_rows import KVRS, RowServers, prompt_of, run_in_vllm
from kvrs_testkit.vllm_servers import PAGE_TOKENS
from tests.vllm.marks import REAL_VLLM

pytestmark = REAL_VLLM

TOKENS = 300
ADAPTER = "one"


@dataclass(frozen=True)
class Kind:
    """A model and its servers. `flags_of` are by server."""

    model: str | None = None  # None: the tiny Llama.
    flags: tuple[str, ...] = ()
    flags_of: dict[str, tuple[str, ...]] = field(default_factory=dict)
    cpu_tier: dict[str, Any] = field(default_factory=dict)
    block_tokens: int = PAGE_TOKENS
    has_drafts: bool = False
    has_adapter: bool = False
    has_head: bool = False  # Of EAGLE, for the tiny Llama.
    streams: int = 1
    lag_blocks: int = 1  # Of each stream: full blocks that need not have a row.
    # vLLM's reference MLA for CPUs computes no prompt behind a context, and what it computes of a
    # whole history is not what it has computed of its parts.
    goes_on_at_a_block: bool = False


KINDS = {
    "experts": Kind("experts"),
    "window": Kind("window", ("--prefix-cache-retention-interval", "64")),
    "mla": Kind("mla", ("--block-size", "16"), block_tokens=16, goes_on_at_a_block=True),
    "adapter": Kind(flags=("--enable-lora", "--max-lora-rank", "8"), has_adapter=True),
    "ngram": Kind(
        flags=(
            "--speculative-config",
            '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}',
        ),
        has_drafts=True,
    ),
    "eagle": Kind(has_drafts=True, has_head=True),
    "mtp": Kind(
        "mtp",
        ("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 1}'),
        has_drafts=True,
    ),
    "ranks": Kind(flags=("--data-parallel-size", "2"), streams=4),
    "tp": Kind(
        flags_of={"d0": ("--tensor-parallel-size", "2")}, cpu_tier={"canonical_layout": True}
    ),
    "preemption": Kind(
        flags=("--kv-cache-memory-bytes", str(50 * 65536), "--max-model-len", "1024"), streams=4
    ),
    "fp8": Kind(flags=("--kv-cache-dtype", "fp8")),
}


@contextmanager
def running(kind: Kind, directory: Path) -> Iterator[RowServers]:
    model, flags = None, [*kind.flags]
    if kind.model is not None:
        written(kind.model, model := directory / kind.model)
    if kind.has_adapter:
        written("adapter", directory / "adapter")
        flags += ["--lora-modules", f"{ADAPTER}={directory / 'adapter'}"]
    if kind.has_head:
        written("eagle", directory / "eagle")
        drafts = {"method": "eagle", "model": str(directory / "eagle"), "num_speculative_tokens": 2}
        flags += ["--speculative-config", json.dumps(drafts)]
    with RowServers(directory, *flags, model=model) as servers:
        servers.cpu_tier = kind.cpu_tier
        servers.replays = not kind.has_drafts
        for name, more in kind.flags_of.items():
            servers.flags[name] = [*more]
        servers.start_all()
        yield servers


def written(kind: str, directory: Path, seed: int = 1) -> None:
    done = run_in_vllm("vllm_models", kind, str(directory), str(seed))
    assert done.returncode == 0, done.stderr


def fields_of(kind: Kind) -> dict[str, Any]:
    return KVRS | ({"model": ADAPTER} if kind.has_adapter else {})


@pytest.mark.parametrize("name", KINDS)
def test_streams_go_on_from_the_rows_of_a_killed_server(name: str, tmp_path: Path) -> None:
    """With the tokens of the same vLLM without a death."""
    kind = KINDS[name]
    if name == "fp8" and "avx512f" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("vLLM has no fp8 KV on this processor")
    fields = fields_of(kind)
    prompts = [prompt_of(3 + number) for number in range(kind.streams)]
    cut = random.Random(3).randrange(100, 200)
    with running(kind, tmp_path) as servers, ThreadPoolExecutor(kind.streams) as pool:
        got: list[list[int]] = [[] for _ in prompts]

        def begin(number: int) -> None:
            def read(ids: list[int]) -> None:
                got[number].extend(ids)
                if len(got[number]) >= cut:
                    servers.kill("d0")

            servers.stream("d0", prompts[number], TOKENS, read, **fields)

        [*pool.map(begin, range(kind.streams))]
        assert all(0 < len(ids) < TOKENS for ids in got)
        if kind.goes_on_at_a_block:
            got = [until_a_block(kind, *each) for each in zip(prompts, got, strict=True)]
        before = servers.loaded_tokens("d1")

        def go_on(number: int) -> list[int]:
            rest: list[int] = []
            history = prompts[number] + got[number]
            servers.stream("d1", history, TOKENS - len(got[number]), rest.extend, **fields)
            return rest

        rests = [*pool.map(go_on, range(kind.streams))]
        loaded = servers.loaded_tokens("d1") - before
        preemptions = servers.counters("d1")["preemptions"]
        fields |= {"max_tokens": TOKENS, "cache_salt": "calm"}
        calm = [servers.complete("d1", prompt=prompt, **fields) for prompt in prompts]
        said = servers.said()

    for of_calm, ids, rest in zip(calm, got, rests, strict=True):
        assert ids + rest == of_calm["choices"][0]["token_ids"]
    full = [
        len(prompt + ids) // kind.block_tokens for prompt, ids in zip(prompts, got, strict=True)
    ]
    assert loaded >= sum(blocks - kind.lag_blocks for blocks in full) * kind.block_tokens, said
    assert (preemptions > 0) == (name == "preemption")


def until_a_block(kind: Kind, prompt: list[int], ids: list[int]) -> list[int]:
    """The history ends one token behind a block that certainly has a row."""
    whole = len(prompt + ids) // kind.block_tokens - kind.lag_blocks
    return ids[: whole * kind.block_tokens + 1 - len(prompt)]


def test_an_adapter_with_other_files_at_the_same_path_shares_no_rows(tmp_path: Path) -> None:
    kind = KINDS["adapter"]
    prompt, fields = prompt_of(3), fields_of(kind) | {"max_tokens": 40}
    with running(kind, tmp_path) as servers:
        servers.complete("d0", prompt=prompt, **fields)
        before = servers.loaded_tokens("d1")
        servers.complete("d1", prompt=prompt, **fields)
        assert servers.loaded_tokens("d1") > before

        servers.kill("d0")
        shutil.rmtree(tmp_path / "adapter")
        written("adapter", tmp_path / "adapter", seed=2)
        servers.start("d0")
        servers.wait_ready("d0")
        found = servers.complete("d0", prompt=prompt, **fields)
        assert servers.loaded_tokens("d0") == 0
        calm = servers.complete("d0", prompt=prompt, **fields | {"cache_salt": "calm"})
        old = servers.complete("d1", prompt=prompt, **fields)

    assert found["choices"][0]["token_ids"] == calm["choices"][0]["token_ids"]
    assert found["choices"][0]["token_ids"] != old["choices"][0]["token_ids"]
