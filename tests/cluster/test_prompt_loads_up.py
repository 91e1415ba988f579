"""A new prompt at a real instance, of which an agent stores the beginning."""

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvrs.config.file import parse_config
from kvrs.ids import InstanceId
from kvrs.profiles import catalog
from kvrs_lab.cluster.fault_injection import rows_of
from kvrs_lab.cluster.launcher import Cluster
from kvrs_testkit.forked import starts_forked
from tests.cluster.launches import END_S, until

pytestmark = [pytest.mark.process, pytest.mark.network, pytest.mark.xdist_group("clusters")]

PROMPTS = [[(7 * at * at + 3 + begin) % 500 + 2 for at in range(600)] for begin in range(5)]
PAGE, PAGE_BYTES = 16, 1 << 15
TABLE = "opt-13b-a100-kvrs-seed.json"
P0 = InstanceId("p0")


@pytest.fixture
def cluster(tiny_llama: str, tmp_path: Path) -> Iterator[Cluster]:
    """Computing is predicted to take far longer than loading."""
    table = json.loads((Path(catalog.__file__).parent / "data" / TABLE).read_text())
    table["prefill"] = {"type": "points", "seconds": {"128": 10.0, "1024": 80.0}}
    (tmp_path / "slow.json").write_text(json.dumps(table))
    roles = {"p0": "prefill", "p1": "prefill", "d0": "decode"}
    nodes = [
        {"id": f"n{at}", "instances": [{"id": name, "role": role}]}
        for at, (name, role) in enumerate(roles.items())
    ]
    document = {
        "cluster": {"model": tiny_llama, "nodes": nodes, "engine": {"max_model_len": 1024}},
        "profiles": {"prefill": str(tmp_path / "slow.json")},
        "proxy": {"port": 0, "admin_port": 0},
        "backup": {"mode": "local"},
    }
    with starts_forked(), Cluster(parse_config(document), lambda line: None) as running:
        yield running


def ask(cluster: Cluster, prompt: list[int], **fields: Any) -> tuple[list[int], int]:
    """The ids of the answer, and how many tokens of the prompt were found."""
    body = {"model": "tiny-llama", "prompt": prompt, "max_tokens": 40, "temperature": 0}
    body |= {"return_token_ids": True, "ignore_eos": True, **fields}
    request = urllib.request.Request(
        f"{cluster.url}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=END_S) as answer:
        found = json.load(answer)
    cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found["choices"][0]["token_ids"], cached


def test_prompts_are_loaded_from_an_agent_after_a_death(cluster: Cluster) -> None:
    """The instance that had computed them is gone. Another one computes the next turns alone, but
    for those that it has waited for too long, and answers as if it had computed all.
    """
    answers = [ask(cluster, prompt)[0] for prompt in PROMPTS]
    pages, before = len(PROMPTS[0]) // PAGE, rows_of(cluster.state())[P0]["pid"]
    stored_bytes = len(PROMPTS) * pages * PAGE_BYTES
    until(lambda: sum(each["held_bytes"] for each in cluster.state()["agents"]) >= stored_bytes)
    cluster.kill(P0)
    until(lambda: not _is_up(cluster, before))
    turns = [
        [*prompt, *answer, *PROMPTS[0][:100]]
        for prompt, answer in zip(PROMPTS, answers, strict=True)
    ]

    loaded = [ask(cluster, turn) for turn in turns]
    computed = [ask(cluster, turn, cache_salt="another") for turn in turns]

    assert [ids for ids, _ in loaded] == [ids for ids, _ in computed]
    assert max(found for _, found in loaded) >= pages * PAGE
    assert not any(found for _, found in computed)


def _is_up(cluster: Cluster, pid: int) -> bool:
    """P0 still is that process."""
    row = rows_of(cluster.state())[P0]
    return bool(row["health"] == "up" and row["pid"] == pid)
