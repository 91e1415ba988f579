"""Section `models`: what each model has of the file, and what is refused by name."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from kvrs.cli import app
from kvrs.config.file import Config, configs_of, document_of, load_config, parse_config
from kvrs.config.models import joined
from kvrs.config.policy import PolicyName
from kvrs.errors import ConfigError


def nodes(name: str) -> list[dict[str, Any]]:
    roles = ("prefill", "decode")
    instances = [{"id": f"{role[0]}-{name}", "role": role} for role in roles]
    return [{"id": f"n-{name}", "instances": instances}]


def entry(name: str, **sections: Any) -> dict[str, Any]:
    cluster = {"nodes": nodes(re.sub("[:/]", "-", name))} | sections.pop("cluster", {})
    return {"name": name, "cluster": cluster, **sections}


def two(**sections: Any) -> dict[str, Any]:
    return {"models": [entry("a"), entry("org/b-1.5")], **sections}


def faults_of(document: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as error:
        parse_config(document)
    return error.value.faults


def test_sections_of_an_entry_lie_over_those_of_the_file() -> None:
    """Key by key; lists as a whole."""
    document = two(
        cluster={"engine": {"pages": 512, "seed": 3}}, policy={"name": "rom", "slots_max": 9}
    )
    document["models"][1] |= {"policy": {"name": "auto"}}
    document["models"][1]["cluster"]["engine"] = {"seed": 4}

    first, second = configs_of(parse_config(document)).values()

    assert (first.policy.name, first.policy.slots_max) == (PolicyName.ROM, 9)
    assert (second.policy.name, second.policy.slots_max) == (PolicyName.AUTO, 9)
    assert (first.cluster.engine.pages, first.cluster.engine.seed) == (512, 3)
    assert (second.cluster.engine.pages, second.cluster.engine.seed) == (512, 4)
    assert [node.id for node in second.cluster.nodes] == ["n-org-b-1.5"]
    assert [each.cluster.served_name for each in (first, second)] == ["a", "org/b-1.5"]


def test_a_model_with_services_alone_has_no_nodes() -> None:
    """Those that a file has by default are of no model."""
    services = [
        {"id": role, "host": role, "port": 8000, "role": role} for role in ("prefill", "decode")
    ]
    document = two()
    document["models"][1]["cluster"] = {"services": services, "backend": "vllm", "model": "m"}
    document["models"][1]["profiles"] = {"prefill": "llama-3.1-8b-h100-vllm-tp1"}

    first, second = configs_of(parse_config(document)).values()

    assert [node.id for node in first.cluster.nodes] == ["n-a"]
    assert second.cluster.nodes == []


def test_each_model_has_ports_ids_and_a_share_of_its_own() -> None:
    """A setting that an entry names stays as it is."""
    proxy = {
        "peer_port": 8100,
        "gossip_port": 8200,
        "event_log": "logs/events.jsonl",
        "peers": [{"id": "proxy-1", "host": "127.0.0.2", "peer_port": 8100}],
    }
    document = two(proxy=proxy)
    document["models"].append(entry("c", proxy={"admin_port": 9000, "max_streams": 7}))

    a, b, c = (each.proxy for each in configs_of(parse_config(document)).values())

    assert [each.id for each in (a, b, c)] == ["proxy-0-a", "proxy-0-org-b-1-5", "proxy-0-c"]
    assert [each.port for each in (a, b, c)] == [8000] * 3
    assert [each.admin_port for each in (a, b, c)] == [8001, 8011, 9000]
    assert [each.peer_port for each in (a, b, c)] == [8100, 8101, 8102]
    assert [each.gossip_port for each in (a, b, c)] == [8200, 8201, 8202]
    assert [(peer.id, peer.peer_port) for peer in b.peers] == [("proxy-1-org-b-1-5", 8101)]
    assert b.event_log == "logs/events.org-b-1-5.jsonl"
    assert [each.max_streams for each in (a, b, c)] == [1365, 1365, 7]
    assert a.mirror_bytes == (256 << 20) // 3
    assert a.body_budget_bytes == (512 << 20) // 3


def test_numbered_peers_are_those_with_the_same_model() -> None:
    numbered = {"id": "kvrs-*", "host": "kvrs-*.peers", "peer_port": 8100, "most": 3}
    proxy = {"id": "kvrs-1", "peer_host": "10.0.0.1", "peer_port": 8100, "numbered_peers": numbered}

    _, b = configs_of(parse_config(two(proxy=proxy))).values()

    assert b.proxy.numbered_peers is not None
    others = b.proxy.numbered_peers.others(b.proxy.id)
    assert [(each.id, each.host, each.peer_port) for each in others] == [
        ("kvrs-0-org-b-1-5", "kvrs-0.peers", 8101),
        ("kvrs-2-org-b-1-5", "kvrs-2.peers", 8101),
    ]
    assert faults_of(two(proxy=proxy | {"numbered_peers": numbered | {"workers": 2}})) == [
        "proxy.numbered_peers.workers: got 2 beside models; allowed: 1"
    ]


def test_a_share_is_never_below_what_a_proxy_needs() -> None:
    document = two(proxy={"mirror_bytes": 1 << 20, "body_budget_bytes": 16 << 20, "max_streams": 1})

    for each in configs_of(parse_config(document)).values():
        proxy = each.proxy
        assert (proxy.mirror_bytes, proxy.body_budget_bytes) == (1 << 20, 16 << 20)
        assert proxy.max_streams == 1


def broken(**changes: Any) -> dict[str, Any]:
    document = two()
    document["models"][1] |= changes
    return document


@pytest.mark.parametrize(
    ("document", "fault"),
    [
        (
            {"models": [{"name": "a"}]},
            "models.0.cluster.nodes: missing; allowed: the nodes of this",
        ),
        (broken(name="a"), "models.1.name: got 'a' beside 'a'; allowed: names that differ in"),
        (
            {"models": [entry("x/y"), entry("x:y")]},
            "models.1.name: got 'x:y' beside 'x/y'; allowed: names that differ in more than",
        ),
        (broken(name="b c"), "models.1.name: got 'b c'; string should match"),
        (broken(polcy={}), "models.1.polcy: unknown key; allowed: backup, cluster,"),
        (broken(policy={"name": "x"}), "models.1.policy.name: got 'x'; input should be"),
        (broken(proxy={"port": 1}), "models.1.proxy.port: is the same for all models; allowed:"),
        (broken(proxy={"workers": 2}), "models.1.proxy.workers: is the same for all models;"),
        (
            broken(cluster={"nodes": nodes("a")}),
            "models.1.cluster.nodes: node id 'n-a' is used by model 'a' too; allowed: ids that no",
        ),
        (
            broken(cluster={"nodes": nodes("b"), "served_name": "x"}),
            "models.1.cluster.served_name: given beside name; allowed: name",
        ),
        (
            broken(cluster={"nodes": [{"id": "n", "instances": [{"id": "p", "role": "prefill"}]}]}),
            "models.1.cluster.nodes: no instance of role 'decode'; allowed: at least one",
        ),
        (
            broken(proxy={"admin_port": 8001}),
            "models: port 127.0.0.1:8001 is used 2 times; allowed: once",
        ),
        (two(backup={"mode": "remote"}), "backup.mode: got 'remote' with 1 node; allowed"),
        (two(cluster={"nodes": nodes("c")}), "cluster.nodes: given beside models; allowed: the"),
        (two(cluster={"served_name": "x"}), "cluster.served_name: given beside models; allowed"),
        (two(proxy={"workers": 2}), "proxy.workers: got 2 beside models, which one process serves"),
        (
            two(proxy={"peers": [{"id": "p", "peer_port": 8100, "workers": 2}]}),
            "proxy.peers: 'p' has 2 workers; allowed beside models: 1",
        ),
    ],
)
def test_a_fault_has_the_path_in_the_file(document: dict[str, Any], fault: str) -> None:
    assert faults_of(document)[0].startswith(fault)


def test_a_fault_of_a_shared_section_names_the_model() -> None:
    """Also where the entry has another key of the section."""
    document = two(backup={"mode": "remote"})
    (of_both,) = faults_of(document)
    document["models"][1] |= {"backup": {"capacity_bytes": 1 << 30}}
    assert faults_of(document) == [of_both]
    for entry_of in document["models"]:
        entry_of["backup"] = {"mode": "remote"}
    assert faults_of(document) == [f"models.{index}.{of_both}" for index in (0, 1)]
    document["models"][1] |= {"backup": {"capacity_bytes": 1 << 30}}
    document["models"][0] |= {"backup": {"mode": "off"}}

    assert faults_of(document) == [f"{of_both} (model 'org/b-1.5')"]


def test_what_is_written_for_a_proxy_is_read_as_it_was() -> None:
    """Each model's whole configuration, with ports that were chosen, joined into one file."""
    config = parse_config(two(policy={"name": "rom"}, security={"hosts": ["gpu-1"]}))
    configs = configs_of(config)
    chosen = {
        name: each.model_copy(update={"proxy": each.proxy.model_copy(update={"admin_port": port})})
        for (name, each), port in zip(configs.items(), (9001, 9002), strict=True)
    }

    documents = {name: each.model_dump(mode="json") for name, each in chosen.items()}
    again = parse_config(joined(config, documents))

    assert configs_of(again) == chosen
    assert configs_of(parse_config(document_of(again))) == chosen


def test_a_file_of_one_model_has_no_other_models() -> None:
    assert configs_of(Config()) == {}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "kvrs.yaml"
    path.write_text(yaml.safe_dump(two()))
    return path


def test_a_process_finds_its_model_by_its_id(file: Path) -> None:
    """An agent by its node, an engine by its instance."""
    assert load_config(file, member="n-a").cluster.served_name == "a"
    assert load_config(file, member="d-org-b-1.5").cluster.served_name == "org/b-1.5"
    with pytest.raises(ConfigError, match=r"models: none has 'x'; allowed: d-a, d-org-b-1.5, n-a"):
        load_config(file, member="x")


def test_a_command_for_one_model_asks_which(file: Path, tmp_path: Path) -> None:
    """The file that `show` prints is one that every command takes."""
    run = CliRunner(env={"KVRS_SECRET": ""}).invoke
    refused = run(app, ["lab", "simulate", "--config", str(file)])
    shown = run(app, ["config", "show", str(file), "--model", "org/b-1.5"])
    one = tmp_path / "one.yaml"
    one.write_text(shown.stdout)

    assert isinstance(refused.exception, ConfigError)
    assert "models: got 2; allowed: one of a, org/b-1.5 (--model)" in str(refused.exception)
    assert load_config(one) == configs_of(load_config_of(file))["org/b-1.5"]
    assert run(app, ["config", "check", str(file), "--elsewhere"]).exit_code == 0
    with pytest.raises(ConfigError, match=r"models: got 'c'; allowed: one of a, org/b-1.5"):
        load_config(file, model="c")
    with pytest.raises(ConfigError, match=r"models: got 'c'; allowed: no model"):
        load_config(one, model="c")


def load_config_of(file: Path) -> Config:
    return parse_config(yaml.safe_load(file.read_text()))


def test_up_refuses_options_that_are_settings_of_each_model(file: Path) -> None:
    options = ["--tp", "2", "--proxies", "2", "--ray", "127.0.0.1:1"]
    found = CliRunner().invoke(app, ["lab", "up", "--config", str(file), *options])

    assert isinstance(found.exception, ConfigError)
    assert [fault.partition(";")[0] for fault in found.exception.faults] == [
        "--proxies: got 2 beside models",
        "--ray: got 127.0.0.1:1 beside models",
        "--tp: got 2 beside models",
    ]
