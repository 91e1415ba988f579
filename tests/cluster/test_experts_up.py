"""A mixture of experts on ranks behind a proxy, as clients and operators see it."""

import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvrs.config.cluster import EngineSettings
from kvrs.config.file import parse_config
from kvrs.ids import InstanceId
from kvrs_engine.engine.sampler import logprobs_of
from kvrs_engine.engine.worker import Worker
from kvrs_engine.scheduling.sequences import Chunk
from kvrs_lab.cluster.fault_injection import rows_of
from kvrs_lab.cluster.launcher import Cluster
from kvrs_testkit.forked import starts_forked
from kvrs_testkit.noted_prefill import note_prefill
from kvrs_testkit.turning_experts import BAD_ID, FIRST_IDS, LAST_IDS, write_turning_model

pytestmark = [
    pytest.mark.process,
    pytest.mark.network,
    pytest.mark.xdist_group("clusters"),
    pytest.mark.nightly,
]

# Of the model: of each layer 2 KV heads and 8 experts, and 4 tiles of the vocabulary.
UNITS = 4 * (2 + 8) + 4
TOKENS, STREAMS, FEW_SECONDS_S = 12, 4, 120.0
EXPERTS = {"room_share": 1.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "turning"
    write_turning_model(directory)
    note_prefill(directory)
    return directory


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory in which agents have theirs."""
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def cluster(model: Path, store: Path) -> Iterator[Cluster]:
    """One instance of three ranks."""
    instances = [{"id": "b0", "role": "both", "tp": 3}]
    document = {
        "cluster": {
            "model": str(model),
            "nodes": [{"id": "n0", "instances": instances}],
            "engine": {"pages": 512},
        },
        "elastic": {"experts": EXPERTS},
        "backup": {"mode": "local", "capacity_bytes": 8 << 20, "directory": str(store)},
        "proxy": {"port": 0, "admin_port": 0},
    }
    with starts_forked(), Cluster(parse_config(document), lambda line: None) as cluster:
        yield cluster


def prompt(number: int, ids: range) -> list[int]:
    """No two begin with the same page."""
    return [ids[(number * number * 7 + at * at + 3 * at) % len(ids)] for at in range(60)]


# Tokens with their log probabilities, to the last bit.
Output = list[tuple[int, float]]


def complete(cluster: Cluster, token_ids: Sequence[int]) -> Output:
    """Greedy."""
    body = {"model": "turning", "prompt": [*token_ids], "max_tokens": TOKENS, "ignore_eos": True}
    body |= {"return_token_ids": True, "temperature": 0.0, "logprobs": 0}
    request = urllib.request.Request(
        f"{cluster.url}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=100) as answer:
        (choice,) = json.load(answer)["choices"]
    return list(zip(choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True))


def alone(model: Path, token_ids: Sequence[int]) -> Output:
    """By one process, without a cluster."""
    worker, history, done = Worker(model, EngineSettings(pages=16)), [*token_ids], 0
    found: Output = []
    while len(history) < len(token_ids) + TOKENS:
        chunk = Chunk(history[done:], done, range(16), logits=1)
        done = len(history)
        (row,) = worker.execute([chunk])
        history.append(int(row.argmax()))
        found.append((history[-1], logprobs_of(row, history[-1], 0).logprob))
    return found


def row_of(cluster: Cluster) -> dict[str, Any]:
    return rows_of(cluster.state())[InstanceId("b0")]


def until_copied(cluster: Cluster, ids: range, more_than_bytes: int = 0) -> dict[str, Any]:
    """The instance's row once copies have brought so many bytes, below streams of these tokens."""
    until_s, number = time.monotonic() + FEW_SECONDS_S, 0
    with ThreadPoolExecutor(STREAMS) as clients:
        while True:
            numbers = range(number, number + 2 * STREAMS)
            list(clients.map(lambda at: complete(cluster, prompt(at, ids)), numbers))
            number = numbers.stop
            row = row_of(cluster)
            experts, units = row["experts"], sum(one["units"] for one in row["ranks"])
            has_copied = experts["copied_bytes"] > more_than_bytes and experts["copies"]
            # The ranks are read again after the report that says so.
            if has_copied and units == UNITS + experts["copies"]:
                return row
            assert time.monotonic() < until_s, experts


def test_other_experts_get_copies_once_other_ones_are_popular(cluster: Cluster) -> None:
    """The state shows them, and ranks have as many units more. They come in the same processes and
    the same attempts, and all ranks compute tiles.
    """
    before = until_copied(cluster, FIRST_IDS)
    after = until_copied(cluster, LAST_IDS, more_than_bytes=before["experts"]["copied_bytes"])
    state = cluster.state()

    experts = after["experts"]
    assert experts["count"] == 8
    assert experts["skew"] >= 1.0
    assert len(experts["tiles"]) == 3
    assert min(experts["tiles"]) > 0
    assert experts["rebalances"] > before["experts"]["rebalances"] > 0
    pids = [[one["pid"] for one in row["ranks"]] for row in (before, after)]
    assert pids[0] == pids[1]
    assert before["epoch"] == after["epoch"]
    assert state["recoveries"] == []


def test_only_the_stream_behind_a_token_that_overflows_ends_with_an_error(
    cluster: Cluster, model: Path
) -> None:
    """It is told why, after one retry; streams that are computed with it have their tokens."""
    bad = [*prompt(1, FIRST_IDS)[:30], BAD_ID, *prompt(2, FIRST_IDS)[:20]]
    others = [prompt(900 + at, FIRST_IDS) for at in range(STREAMS)]

    with ThreadPoolExecutor(STREAMS + 1) as clients:
        failing = clients.submit(complete, cluster, bad)
        got = list(clients.map(lambda own: complete(cluster, own), others))

    with pytest.raises(urllib.error.HTTPError) as failed:
        failing.result()
    said = json.load(failed.value)["error"]["message"]
    assert said == (
        "the stream's logits are no numbers, as b0 found: "
        "sent an error event (server_error, not_a_number)"
    )
    assert got == [alone(model, own) for own in others]


def test_streams_go_on_without_a_rank_that_has_experts(cluster: Cluster, model: Path) -> None:
    """SIGKILL from outside, with copies there: tokens and their log probabilities are those of one
    process, and counts of re-balances go on.
    """
    before = until_copied(cluster, FIRST_IDS)
    others = [prompt(700 + at, FIRST_IDS) for at in range(2 * STREAMS)]

    with ThreadPoolExecutor(2 * STREAMS) as clients:
        answers = clients.map(lambda own: complete(cluster, own), others)
        os.kill(before["ranks"][-1]["pid"], signal.SIGKILL)
        got = list(answers)

    assert got == [alone(model, own) for own in others]
    after = row_of(cluster)
    assert after["pid"] == before["pid"]
    assert after["experts"]["rebalances"] >= before["experts"]["rebalances"]
