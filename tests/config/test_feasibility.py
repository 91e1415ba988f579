"""`kvrs config check` finds what cannot work although every value is in its range."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kvrs.cli import app
from kvrs.config.file import Config, parse_config
from kvrs.errors import ConfigError
from kvrs_testkit.certificates import MISSING, Authority


def check(folder: Path, document: dict[str, Any], *options: str) -> Result:
    file = folder / "kvrs.yaml"
    file.write_text(json.dumps(document))
    return CliRunner().invoke(app, ["config", "check", str(file), *options])


def faults_of(folder: Path, document: dict[str, Any], *options: str) -> list[str]:
    result = check(folder, document, *options)
    assert isinstance(result.exception, ConfigError), result.output
    place = f"{folder / 'kvrs.yaml'}:1: "
    assert all(fault.startswith(place) for fault in result.exception.faults)
    return [fault.removeprefix(place) for fault in result.exception.faults]


@pytest.mark.parametrize(
    "host",
    ["not a host!", "", "10.0.0.300", "10.0.1", "[::1]", "a..b", "-a", "x" * 64, "http://a", "a:1"],
)
def test_a_host_that_cannot_be_parsed_is_a_fault(host: str) -> None:
    """At every start, not only in the check."""
    with pytest.raises(ConfigError) as caught:
        parse_config({"proxy": {"admin_host": host}})

    (fault,) = caught.value.faults
    assert fault == f"proxy.admin_host: got {host!r}; allowed: an IP address or a host name"


@pytest.mark.parametrize(
    "host", ["10.0.0.1", "::1", "fe80::1%eth0", "localhost", "gpu_1.kvrs.svc.cluster.local.", "a-1"]
)
def test_addresses_and_names_are_hosts(host: str) -> None:
    """Underscores too: container names have them."""
    assert parse_config({"proxy": {"host": host}}).proxy.host == host


def test_ipv6_addresses_stand_in_brackets_in_urls() -> None:
    """Or the URL would have no port."""
    nodes = [{"id": "n0", "instances": [{"id": "b0", "role": "both", "host": "::1", "port": 9}]}]
    config = parse_config({"cluster": {"nodes": nodes}})
    ((_, instance),) = config.cluster.instances()

    assert config.url_of(instance) == instance.url == "http://[::1]:9"


@pytest.mark.parametrize(
    ("hosts", "is_taken"),
    [
        (("127.0.0.1", "localhost"), True),
        (("0.0.0.0", "127.0.0.1"), True),
        (("::", "localhost"), True),
        (("127.0.0.1", "127.0.0.2"), False),
        (("0.0.0.0", "10.0.0.1"), False),
    ],
)
def test_a_port_is_used_once_on_a_host(hosts: tuple[str, str], is_taken: bool) -> None:
    """By whatever name; what listens everywhere takes loopback too."""
    given = dict(zip(("host", "admin_host"), hosts, strict=True))
    document = {"proxy": given | {"port": 9000, "admin_port": 9000}}

    if not is_taken:
        parse_config(document)
        return
    with pytest.raises(ConfigError, match="allowed: once"):
        parse_config(document)


@pytest.mark.parametrize(
    "document", [{"policy": None}, {"cluster": {"engine": None}}, {"policy": {"recovery": None}}]
)
def test_a_section_whose_keys_are_all_comments_has_its_defaults(document: dict[str, Any]) -> None:
    """YAML reads it as null."""
    assert parse_config(document) == Config()


def test_pages_that_cannot_hold_the_longest_request_are_a_fault(tmp_path: Path) -> None:
    """Where both were chosen; a note where only the pages were."""
    engine = {"pages": 16, "max_model_len": 100_000}

    (fault,) = faults_of(tmp_path, {"cluster": {"engine": engine}}, "--elsewhere")
    noted = check(tmp_path, {"cluster": {"engine": {"pages": 16}}}, "--elsewhere")

    assert fault == (
        "cluster.engine.max_model_len: got 100000; allowed: at most 256, the tokens of 16 pages"
    )
    assert noted.exit_code == 0
    assert "one request of at most 256 tokens; max_model_len is 2048" in noted.output


def test_a_peer_of_a_proxy_with_workers_says_how_many_it_has(tmp_path: Path) -> None:
    """One file is often made for all proxies, and without the number none of the others can be
    reached: every resume there is refused.
    """
    peers: list[dict[str, Any]] = [
        {"id": "a", "peer_port": 9000},
        {"id": "b", "peer_port": 9010, "workers": 1},
    ]
    document = {"proxy": {"workers": 2, "peers": peers}}

    (fault,) = faults_of(tmp_path, document, "--elsewhere")
    peers[0]["workers"] = 2

    assert fault == (
        "proxy.peers.0 (a).workers: missing, with proxy.workers: 2 here; allowed: proxy.workers "
        "of 'a', also if it is 1"
    )
    assert check(tmp_path, document, "--elsewhere").exit_code == 0


WITHOUT_WORKERS = {"proxy": {"peers": [{"id": "a", "peer_port": 9000}]}}


@pytest.mark.parametrize(
    ("document", "fault"),
    [
        ({"proxy": {"workers": 2, **WITHOUT_WORKERS["proxy"]}}, "proxy.peers.0 (a).workers: mis"),
        ({"proxy": {"event_log": "/nowhere/log"}}, "proxy.event_log: got '/nowhere/log'"),
        ({"security": {"admin_token_file": "/nowhere"}}, "security.admin_token_file: /nowhere"),
        ({"proxy": {"tls": {"cert": "/nowhere", "key": "/nowhere"}}}, "proxy.tls.cert: /nowhere"),
        ({"proxy": {"host": "0.0.0.0"}}, "proxy.host: got '0.0.0.0', and clients need no key"),
    ],
)
def test_a_proxy_refuses_what_the_check_refuses(
    tmp_path: Path, document: dict[str, Any], fault: str
) -> None:
    """With the same lines, all at once. Without a secret the proxy of a test cannot start."""
    found = faults_of(tmp_path, document)
    started = CliRunner().invoke(app, ["proxy", "--config", str(tmp_path / "kvrs.yaml")])

    assert found[0].startswith(fault)
    assert isinstance(started.exception, ConfigError)
    place = f"{tmp_path / 'kvrs.yaml'}:1: "
    assert started.exception.faults == [place + each for each in found]


def test_a_proxy_that_is_to_have_workers_asks_how_many_its_peers_have(tmp_path: Path) -> None:
    """Also where the number is an option, and the file is valid without it."""
    assert check(tmp_path, WITHOUT_WORKERS, "--elsewhere").exit_code == 0
    command = ["proxy", "--config", str(tmp_path / "kvrs.yaml"), "--workers", "2"]

    started = CliRunner().invoke(app, command)

    assert isinstance(started.exception, ConfigError)
    assert "proxy.peers.0 (a).workers: missing, with proxy.workers: 2" in str(started.exception)


def test_a_proxy_needs_no_file_of_engines_or_agents(tmp_path: Path) -> None:
    """They may be on other machines."""
    backup = {"mode": "local", "directory": "/nowhere"}
    found = faults_of(tmp_path, {"cluster": {"model": "/nowhere"}, "backup": backup})
    started = CliRunner().invoke(app, ["proxy", "--config", str(tmp_path / "kvrs.yaml")])

    assert [fault.partition(":")[0] for fault in found] == ["cluster.model", "backup.directory"]
    assert not {"cluster.model", "backup.directory"} & set(str(started.exception).split(": "))


def test_files_that_do_not_exist_are_faults_on_this_machine(tmp_path: Path) -> None:
    """All at once, each with its key."""
    document = {
        "proxy": {"event_log": "/none/x.jsonl", "tls": {"cert": "/none/c", "key": "/none/k"}},
        "cluster": {"model": "/none"},
        "security": {
            "secret_file": "/none/s",
            "admin_token_file": "/none/a",
            "key_file": "/none/y",
        },
        "backup": {"mode": "local", "directory": "/none/shm"},
    }

    faults = faults_of(tmp_path, document)

    assert sorted(fault.partition(":")[0] for fault in faults) == [
        "backup.directory",
        "cluster.model",
        "proxy.event_log",
        "proxy.tls.cert",
        "security.admin_token_file",
        "security.key_file",
        "security.secret_file",
    ]
    assert check(tmp_path, document, "--elsewhere").exit_code == 0


def model(folder: Path, *files: str, **fields: int) -> dict[str, Any]:
    """A configuration whose model has a config.json and these files."""
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 64}
    (folder / "config.json").write_text(json.dumps(sizes | fields))
    for name in files:
        (folder / name).write_text("{}")
    return {"cluster": {"model": str(folder)}}


def test_a_model_without_its_files_is_a_fault(tmp_path: Path) -> None:
    """Tokenizer and weights, of an index every part."""
    document = model(tmp_path)
    bare = faults_of(tmp_path, document)
    model(tmp_path, "tokenizer.json")
    index = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "1.safetensors").touch()
    lacking = faults_of(tmp_path, document)
    (tmp_path / "2.safetensors").touch()
    exit_code = check(tmp_path, document).exit_code
    (tmp_path / "model.safetensors.index.json").write_text("[" * 100_000)
    nested = faults_of(tmp_path, document)

    assert [fault.partition(" has no ")[2].split(";")[0] for fault in bare] == [
        "tokenizer.json",
        "weights",
    ]
    assert "lacks 1 of 2 files of weights, as 2.safetensors" in lacking[0]
    assert exit_code == 0
    assert "is no index of weights" in nested[0]


def test_a_draft_that_cannot_propose_is_a_fault(tmp_path: Path) -> None:
    """It must be there, and have the tokenizer of the model."""
    draft = tmp_path / "draft"
    document = model(tmp_path, "tokenizer.json", "model.safetensors")
    document["speculation"] = {"source": "draft", "draft": str(draft)}
    missing = faults_of(tmp_path, document)
    draft.mkdir()
    (draft / "config.json").touch()
    bare = faults_of(tmp_path, document)
    (draft / "model.safetensors").touch()
    (draft / "tokenizer.json").write_text("another")
    differs = faults_of(tmp_path, document)
    shutil.copy(tmp_path / "tokenizer.json", draft)
    exit_code = check(tmp_path, document).exit_code

    assert "speculation.draft: " in missing[0]
    assert "has no config.json" in missing[0]
    assert [fault.partition(" has no ")[2].split(";")[0] for fault in bare] == [
        "tokenizer.json",
        "weights",
    ]
    assert "has another tokenizer.json than" in differs[0]
    assert exit_code == 0


def test_a_model_without_a_tokenizer_is_a_warning_before_other_engines(tmp_path: Path) -> None:
    """The proxy makes their text after a cut, so that exactness would be lost without a word."""
    node = [
        {"id": name, "role": role, "port": port}
        for name, role, port in (("p0", "prefill", 9001), ("d0", "decode", 9002))
    ]
    document = model(tmp_path)
    document["cluster"] |= {"backend": "vllm", "nodes": [{"id": "n0", "instances": node}]}
    document["profiles"] = {"prefill": "opt-13b-a100-distserve-tp1"}

    without = check(tmp_path, document)
    model(tmp_path, "tokenizer.json")
    whole = check(tmp_path, document)

    assert (without.exit_code, whole.exit_code) == (0, 0)
    assert f"warning: cluster.model: {tmp_path} has no tokenizer.json: streams" in without.output
    assert "tokenizer" not in whole.output


def test_pages_that_do_not_fit_into_memory_are_a_fault(tmp_path: Path) -> None:
    """The pages of all instances on one host count, by the shape of the model's KV."""
    document = model(tmp_path, "tokenizer.json", "model.safetensors", hidden_size=1 << 16)
    document["cluster"]["engine"] = {"pages": 1 << 20}

    (fault,) = faults_of(tmp_path, document)

    # 2 layers, keys and values, 2 heads of 32,768 numbers of 4 bytes, 16 tokens.
    assert fault.startswith(
        "cluster.engine.pages: got 1048576, of 16,777,216 bytes, for 4 instances on one machine;"
    )


def test_checkpoints_that_do_not_fit_are_a_fault(tmp_path: Path) -> None:
    """Neither less than a page, nor more than the directory's file system."""
    document = model(tmp_path, "tokenizer.json", "model.safetensors", hidden_size=4096)
    backup = {"mode": "local", "directory": str(tmp_path)}

    most = shutil.disk_usage(tmp_path).total * 3 // 4  # Of each of two agents.

    (small,) = faults_of(tmp_path, document | {"backup": backup | {"capacity_bytes": 1 << 16}})
    (large,) = faults_of(tmp_path, document | {"backup": backup | {"capacity_bytes": most}})

    assert small.endswith("allowed: at least a page (1048576)")
    assert "for 2 agents on one machine; allowed: at most" in large


@pytest.mark.process
@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_certificates_are_loaded_by_the_check(tmp_path: Path) -> None:
    """A key of another certificate is found before the proxy starts."""
    authority = Authority(tmp_path)
    one, two = authority.issue("one"), authority.issue("two")

    (fault,) = faults_of(tmp_path, {"proxy": {"tls": {"cert": str(one.cert), "key": str(two.key)}}})

    assert "is not the key of" in fault
