"""An instance that is added to a running cluster, and streams that leave it."""

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvrs.config.file import ENV_NAME, parse_config
from kvrs_lab.cluster.processes import with_added
from kvrs_testkit.forked import starts_forked
from kvrs_testkit.free_ports import free_ports
from tests.cluster import launches
from tests.cluster.launches import Launch, ask

pytestmark = [
    pytest.mark.process,
    pytest.mark.network,
    pytest.mark.xdist_group("clusters"),
    pytest.mark.nightly,
]

WAIT_S = 120.0
PROMPT = [(11 * at * at + 5) % 500 + 2 for at in range(100)]
PAGE_TOKENS = 16
PACE = "opt-13b-a100-vllm-tp1"  # About 20 ms per token: the stream lasts while it is moved.


@pytest.fixture
def up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_llama: str) -> Iterator[Launch]:
    monkeypatch.setenv(ENV_NAME, secrets.token_hex(32))
    config = tmp_path / "cluster.yaml"
    roles = {"p0": "prefill", "d0": "decode"}
    node = {"id": "n0", "instances": [{"id": name, "role": role} for name, role in roles.items()]}
    engine = {"pages": 512, "pace": PACE}
    cluster = {"model": tiny_llama, "nodes": [node], "engine": engine}
    # Whatever recomputing would cost on a busy machine: what is tested is where the KV comes from.
    policy = {"name": "always_migrate"}
    proxy = {"self_test": False}
    config.write_text(yaml.safe_dump({"cluster": cluster, "policy": policy, "proxy": proxy}))
    launch = Launch(tmp_path, "--config", str(config), forked=True)
    launch.wait_for_output("kvrs is up", WAIT_S)
    yield launch
    launch.process.terminate()
    launch.process.wait(WAIT_S)


until = partial(launches.until, within_s=WAIT_S)


def test_a_file_that_cannot_be_written_ends_no_cluster(up: Launch) -> None:
    """A full disk only delays the announcement of a new instance until there is room."""
    _, admin = up.urls
    port, page_port = free_ports(2)
    added = {"id": "d1", "role": "decode", "port": port, "page_port": page_port}
    for name in ("config", "proxy-0"):
        (up.run_directory / f"{name}.new").mkdir()

    ask("POST", f"{admin}/kvrs/v1/instances", {"node": "n0", **added})
    up.wait_for_output("instances are not told of others: [Errno", WAIT_S)
    before = (up.run_directory / "config.yaml").read_text()
    (up.run_directory / "config.new").rmdir()
    up.wait_for_output("proxy-0.new", WAIT_S)
    of_proxy = yaml.safe_load((up.run_directory / "proxy-0.yaml").read_text())
    (up.run_directory / "proxy-0.new").rmdir()
    until(lambda: "id: d1" in (up.run_directory / "proxy-0.yaml").read_text())

    assert "id: d1" not in before
    assert of_proxy["proxy"]["id"] == "proxy-0"
    assert up.output.count("not told") == 2
    assert "id: d1" in (up.run_directory / "config.yaml").read_text()
    assert up.process.poll() is None


def test_a_stream_leaves_an_added_instance_for_one_that_was_there(
    up: Launch, tmp_path: Path
) -> None:
    """`kvrs lab up` has told its processes of the new instance: the one that was there fetches the
    KV of prompt and output from it, and computes neither again.
    """
    client, admin = up.urls
    port, page_port = free_ports(2)
    added = {"id": "d1", "role": "decode", "port": port, "page_port": page_port}
    document = yaml.safe_load((up.run_directory / "config.yaml").read_text())
    document["cluster"]["nodes"][0]["instances"].append(added)
    own = tmp_path / "with-d1.yaml"
    own.write_text(yaml.safe_dump(document))
    arguments = ["--config", str(own), "--instance", "d1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}

    def row(name: str) -> Any:
        rows = ask("GET", f"{admin}/kvrs/v1/state")["instances"]
        return next((each for each in rows if each["id"] == name), None)

    request = {"prompt": PROMPT, "max_tokens": 400, "temperature": 0, "ignore_eos": True}
    with starts_forked():
        engine = subprocess.Popen(
            [sys.executable, "-m", "kvrs_engine.engine", *arguments], env=environment
        )
    with engine:
        try:
            ask("POST", f"{admin}/kvrs/v1/instances", {"node": "n0", **added})
            until(lambda: (row("d1") or {}).get("health") == "up")
            until(lambda: "id: d1" in (up.run_directory / "config.yaml").read_text())
            ask("POST", f"{admin}/kvrs/v1/drain/d0?drain_s=0")
            with ThreadPoolExecutor(1) as clients:
                asked = clients.submit(ask, "POST", f"{client}/v1/completions", request)
                until(
                    lambda: [
                        each
                        for each in ask("GET", f"{admin}/kvrs/v1/state")["streams"]
                        if each["output_tokens"] > 100
                    ]
                )
                fetched_pages = row("d0")["load"]["fetched_pages"]
                ask("DELETE", f"{admin}/kvrs/v1/drain/d0")
                ask("POST", f"{admin}/kvrs/v1/drain/d1?drain_s=0")
                got = asked.result()["choices"][0]["text"]
            moved = until(lambda: ask("GET", f"{admin}/kvrs/v1/state")["recoveries"])
            fetched_pages = row("d0")["load"]["fetched_pages"] - fetched_pages
            expected = ask("POST", f"{client}/v1/completions", request)["choices"][0]["text"]
        finally:
            engine.kill()

    assert [(each["from"], each["to"], each["outcome"]) for each in moved] == [
        ("d1", "d0", "resumed")
    ]
    assert moved[0]["option"] == "migrate"
    # Prefill has those of the prompt only.
    assert fetched_pages >= (len(PROMPT) + 100) // PAGE_TOKENS
    assert got == expected


def test_what_was_added_lies_beside_the_own_nodes_which_stay() -> None:
    """Also those that were removed: their processes run until the end, and are started again."""
    instances = [{"id": "p0", "role": "prefill"}, {"id": "d0", "role": "decode"}]
    config = parse_config({"cluster": {"nodes": [{"id": "n0", "instances": instances}]}})
    new = [{"id": "d1", "role": "decode", "port": 1}, {"id": "d2", "role": "decode", "port": 2}]
    fleet: list[dict[str, Any]] = [
        {"id": "n0", "instances": [instances[0], new[0]]},
        {"id": "n1", "instances": [new[1]]},
    ]

    nodes = with_added(config, fleet).cluster.nodes

    found = [(node.id, each.id, each.port) for node in nodes for each in node.instances]
    assert found == [("n0", "p0", 0), ("n0", "d0", 0), ("n0", "d1", 1), ("n1", "d2", 2)]
    assert with_added(config, []) is config
