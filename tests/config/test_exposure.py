"""Ports beyond loopback need what authenticates those that reach them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvrs.cli import app
from kvrs.config.exposure import check_exposure, faults_of_proxy
from kvrs.config.file import ADMIN_ENV_NAME, ENV_NAME, parse_config
from kvrs.errors import ConfigError

SECRET = {ENV_NAME: "only for the tests"}
TOKEN = {ADMIN_ENV_NAME: "this one is only for the tests"}


def nodes(**keys: str) -> dict[str, Any]:
    """A cluster whose instances and agent have these hosts."""
    agent = {key: host for key, host in keys.items() if not key.startswith("instance")}
    hosts = {"host": keys.get("instance", "127.0.0.1"), "bind": keys.get("instance_bind")}
    instances = [
        {"id": "p0", "role": "prefill"},
        {"id": "d0", "role": "decode", **hosts},
    ]
    return {"cluster": {"nodes": [{"id": "n0", "instances": instances, "agent": agent}]}}


def faults_of(document: dict[str, Any], **environ: str) -> list[str]:
    try:
        check_exposure(parse_config(document), environ)
    except ConfigError as error:
        return error.faults
    return []


@pytest.mark.parametrize("host", ["0.0.0.0", "10.1.2.3", "::", "kvrs.example"])
@pytest.mark.parametrize(
    ("document", "key", "wanted"),
    [
        ({"proxy": {"host": "{}"}}, "proxy.host", "allow_anonymous"),
        ({"proxy": {"admin_host": "{}"}}, "proxy.admin_host", ADMIN_ENV_NAME),
        ({"proxy": {"peer_host": "{}"}}, "proxy.peer_host", ENV_NAME),
        ({"proxy": {"gossip_host": "{}"}}, "proxy.gossip_host", ENV_NAME),
        (nodes(instance="{}"), "instance 'd0': host", ENV_NAME),
        (nodes(instance_bind="{}"), "instance 'd0': bind", ENV_NAME),
        (nodes(bind="{}"), "agent of node 'n0': bind", ENV_NAME),
        (nodes(host="{}"), "agent of node 'n0': host", ENV_NAME),
    ],
)
def test_each_port_beyond_loopback_is_refused_without_its_credential(
    document: dict[str, Any], key: str, wanted: str, host: str
) -> None:
    """The message names the key, the host, and what is allowed."""
    given = json.loads(json.dumps(document).replace('"{}"', f'"{host}"'))

    (fault,) = faults_of(given)

    assert re.search(rf"{key}: got '{host}'.*; allowed: a loopback address, or .*{wanted}", fault)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "localhost"])
def test_loopback_needs_nothing(host: str) -> None:
    """One machine, one user: the defaults start without any set-up."""
    proxy = {"host": host, "admin_host": host, "peer_host": host, "gossip_host": host}

    assert faults_of({"proxy": proxy} | nodes(instance=host, host=host)) == []


def test_each_credential_opens_its_own_ports_and_no_other() -> None:
    """The secret of the cluster is no token of operators, and the other way round."""
    everywhere = {"admin_host": "10.0.0.1", "peer_host": "10.0.0.1"}
    document = {"proxy": everywhere | {"host": "10.0.0.1", "allow_anonymous": True}}

    with_secret, with_token = faults_of(document, **SECRET), faults_of(document, **TOKEN)

    assert [fault.partition(":")[0] for fault in with_secret] == ["proxy.admin_host"]
    assert [fault.partition(":")[0] for fault in with_token] == ["proxy.peer_host"]
    assert faults_of(document, **SECRET, **TOKEN) == []


@pytest.mark.parametrize("mode", [0o600, 0o640])
def test_a_file_that_others_may_read_is_no_credential(tmp_path: Path, mode: int) -> None:
    """A token that everyone on the machine knows proves nothing."""
    token = tmp_path / "token"
    token.write_text(TOKEN[ADMIN_ENV_NAME])
    token.chmod(mode)
    proxy = {"admin_host": "10.0.0.1"}

    faults = faults_of({"proxy": proxy, "security": {"admin_token_file": str(token)}})

    assert [fault.partition(":")[0] for fault in faults] == ["proxy.admin_host"] * (mode != 0o600)


def test_a_short_token_is_none() -> None:
    """It could be guessed."""
    document = {"proxy": {"admin_host": "10.0.0.1"}}

    (fault,) = faults_of(document, **{ADMIN_ENV_NAME: "short"})

    assert "KVRS_ADMIN_TOKEN: a token of 5 bytes; allowed: at least 16" in fault


def test_the_commands_refuse_what_is_exposed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`kvrs config check` finds it before `kvrs lab up` does."""
    monkeypatch.delenv(ENV_NAME, raising=False)
    monkeypatch.delenv(ADMIN_ENV_NAME, raising=False)
    file = tmp_path / "kvrs.yaml"
    file.write_text("proxy: {host: 0.0.0.0, admin_host: 0.0.0.0, peer_host: 0.0.0.0}")

    checked = CliRunner().invoke(app, ["config", "check", "--elsewhere", str(file)])
    started = CliRunner().invoke(app, ["lab", "up", "--config", str(file)])

    for result in (checked, started):
        assert isinstance(result.exception, ConfigError)
        assert [fault.split(": ")[:2] for fault in result.exception.faults] == [
            [f"{file}:1", f"proxy.{key}"] for key in ("host", "admin_host", "peer_host")
        ]


def test_ports_of_instances_that_others_start_are_theirs_to_protect() -> None:
    """vLLM listens where its own command line says."""
    model = {"model": "/models/m", "backend": "vllm"}
    instances = [
        {"id": f"{role}0", "role": role, "host": "10.0.0.1", "port": port}
        for port, role in enumerate(("prefill", "decode"), 8100)
    ]
    cluster = model | {"nodes": [{"id": "n0", "instances": instances}]}
    document = {"cluster": cluster, "profiles": {"prefill": "opt-13b-a100-vllm-tp1"}}

    assert faults_of(document) == []
    assert [*faults_of_proxy(parse_config(document), {})] == []


def test_keys_of_clients_open_their_port() -> None:
    document = {"proxy": {"host": "0.0.0.0"}}

    assert faults_of(document, KVRS_KEYS="a: {}") == []
    assert faults_of(document | {"security": {"key_file": "keys"}}) == []
    assert len(faults_of(document)) == 1


def test_a_peer_port_on_loopback_is_no_use_to_a_proxy_elsewhere() -> None:
    """It would stay down, and its streams without a mirror."""
    peers = [{"id": "proxy-1", "host": "10.0.0.2", "peer_port": 8002}]

    with pytest.raises(ConfigError, match=r"proxy\.peer_host: got '127\.0\.0\.1', with proxy"):
        parse_config({"proxy": {"peers": peers}})
    parse_config({"proxy": {"peers": peers, "peer_host": "10.0.0.1"}})


@pytest.mark.parametrize(("backend", "count"), [("vllm", 1), ("embedded", 0)])
def test_the_check_names_instances_that_prove_nothing(
    tmp_path: Path, backend: str, count: int
) -> None:
    """The file is valid all the same."""
    file = tmp_path / "kvrs.yaml"
    instances = [
        {"id": name, "role": role, "port": port}
        for name, role, port in (("p0", "prefill", 8100), ("d0", "decode", 8200))
    ]
    cluster = {"backend": backend, "model": str(tmp_path)}
    written = {
        "cluster": cluster | {"nodes": [{"id": "n0", "instances": instances}]},
        "profiles": {"prefill": "llama-3.1-8b-h100-vllm-tp1"},
    }
    file.write_text(json.dumps(written))

    checked = CliRunner().invoke(app, ["config", "check", "--elsewhere", str(file)])

    assert checked.exit_code == 0, checked.output
    assert checked.output.count("cannot prove their identity") == count
