"""Settings from the environment: KVRS_SECTION__KEY, and ${NAME} in files."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvrs.cli import app
from kvrs.config.file import Config, dump_config, load_config, load_source
from kvrs.errors import ConfigError


def with_variables(**environ: str) -> Config:
    return load_config(None, environ)


def faults_of(environ: dict[str, str], path: Path | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, environ)
    return caught.value.faults


def test_a_variable_overrides_the_file_and_the_file_the_default(tmp_path: Path) -> None:
    """Two underscores stand between the parts of a path."""
    path = tmp_path / "kvrs.yaml"
    path.write_text("proxy: {port: 1, admin_port: 2}")

    proxy = load_config(path, {"KVRS_PROXY__PORT": "3"}).proxy

    assert (proxy.port, proxy.admin_port, proxy.max_streams) == (3, 2, 4096)


@pytest.mark.parametrize(
    ("name", "text", "path", "value"),
    [
        ("KVRS_POLICY__RECOVERY__WAIT_S", "2e1", "policy.recovery.wait_s", 20.0),
        ("KVRS_SLO__ABORT", "true", "slo.abort", True),
        ("KVRS_BACKUP__MODE", "off", "backup.mode", "off"),
        ("KVRS_CLUSTER__MODEL", "", "cluster.model", None),
        ("KVRS_SECURITY__HOSTS", "[a, b]", "security.hosts", ["a", "b"]),
        ("KVRS_SECURITY__HOSTS", '["a", "b"]', "security.hosts", ["a", "b"]),
        ("KVRS_PROXY__ID", "'7'", "proxy.id", "7"),
    ],
)
def test_values_are_yaml(name: str, text: str, path: str, value: Any) -> None:
    """Numbers, truth values, null and whole lists, as in the file."""
    found: Any = with_variables(**{name: text}).model_dump(mode="json")
    for part in path.split("."):
        found = found[part]

    assert found == value


def test_a_section_as_a_whole_comes_before_its_keys() -> None:
    """In whatever order the environment has them."""
    recovery = with_variables(
        KVRS_POLICY__RECOVERY__WAIT_S="2", KVRS_POLICY__RECOVERY="{wait_s: 1, max_attempts: 9}"
    ).policy.recovery

    assert (recovery.wait_s, recovery.max_attempts) == (2, 9)


def test_unknown_names_are_errors_with_the_nearest_one() -> None:
    """All at once; a misspelt variable must not be ignored."""
    faults = faults_of(
        {
            "KVRS_PROXY__ADMIN_PROT": "1",
            "KVRS_PROYX__PORT": "1",
            "KVRS_PROXIES__PORT": "1",
            "KVRS_PROXY__PORT__A": "1",
            "KVRS_CLUSTER__NODES__0__ID": "n0",
            "KVRS_SLO__ABORT": "[",
        }
    )

    assert sorted(fault.partition(" variable ")[2][:75] for fault in faults) == [
        "KVRS_CLUSTER__NODES__0__ID: got '0' below KVRS_CLUSTER__NODES; allowed: not",
        "KVRS_PROXIES__PORT: no setting; the nearest one is KVRS_PROXY",
        "KVRS_PROXY__ADMIN_PROT: no setting; the nearest one is KVRS_PROXY__ADMIN_PO",
        "KVRS_PROXY__PORT__A: got 'A' below KVRS_PROXY__PORT; allowed: nothing below",
        "KVRS_PROYX__PORT: no setting; the nearest one is KVRS_PROXY",
        "KVRS_SLO__ABORT: not valid YAML: while parsing a flow node expected the nod",
    ]


def test_a_fault_of_yaml_names_only_the_variable() -> None:
    """The parser calls every text `<unicode string>`, as if it were a file."""
    assert faults_of({"KVRS_SLO__ABORT": "a: b: c"}) == [
        "environment variable KVRS_SLO__ABORT: not valid YAML: "
        "mapping values are not allowed here at line 1, column 5: a: b: c ^"
    ]


def test_variables_without_two_underscores_are_no_settings() -> None:
    """Secrets, and what Kubernetes sets for services called kvrs and kvrs-proxy."""
    config = with_variables(
        KVRS_SECRET="correct-horse-battery",
        KVRS_PORT="tcp://10.0.0.1:8000",
        KVRS_PROXY_PORT="tcp://10.0.0.1:8000",
        PROXY__PORT="1",
    )

    assert config == Config()


def test_a_check_notes_variables_that_lack_an_underscore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sections and keys; not secrets, what Kubernetes sets, or keys below a list."""
    path = tmp_path / "kvrs.yaml"
    path.write_text("slo: {}")
    for name, value in {
        "KVRS_POLICY": "rom",
        "KVRS_SLO_TTFT_S": "2",
        "KVRS_SECRET": "correct-horse-battery",
        "KVRS_PROXY_PORT": "tcp://10.0.0.1:8000",
        "KVRS_CLUSTER_NODES_ID": "n0",
    }.items():
        monkeypatch.setenv(name, value)

    shown = CliRunner().invoke(app, ["config", "check", str(path)]).output.splitlines()

    assert [line for line in shown if line.startswith("note: environment")] == [
        "note: environment variable KVRS_POLICY is no setting; allowed: KVRS_POLICY__KEY",
        "note: environment variable KVRS_SLO_TTFT_S is no setting; allowed: KVRS_SLO__TTFT_S",
    ]


def test_a_fault_names_the_variable_that_it_is_in(tmp_path: Path) -> None:
    """Or the file, where that is it."""
    path = tmp_path / "kvrs.yaml"
    path.write_text("slo: {abort: 3}")

    faults = faults_of({"KVRS_PROXY__PORT": "x"}, path)

    assert faults[0].startswith("environment variable KVRS_PROXY__PORT: proxy.port: got 'x'; ")
    assert faults[1].startswith(f"{path}:1: slo.abort: got 3; ")


def test_a_variable_without_a_value_is_called_empty() -> None:
    """Compose files and charts set them so; `got None` would name a value that is not set."""
    (fault,) = faults_of({"KVRS_PROXY__PORT": ""})

    assert fault == (
        "environment variable KVRS_PROXY__PORT: proxy.port: is empty; input should be a valid "
        "integer (allowed: at least 0, at most 65535)"
    )


def test_a_log_level_that_there_is_not_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable is checked like `--log-level`, which comes before it."""
    monkeypatch.setenv("KVRS_LOG_LEVEL", "loud")

    refused = CliRunner().invoke(app, ["config", "show"])
    given = CliRunner().invoke(app, ["--log-level", "info", "config", "show"])

    assert isinstance(refused.exception, ConfigError)
    assert refused.exception.faults == [
        "environment variable KVRS_LOG_LEVEL: got 'loud'; allowed: debug, info, warning, error"
    ]
    assert given.exit_code == 0


@pytest.mark.parametrize(
    ("text", "port", "name"),
    [
        ("proxy:\n  port: ${PORT}\n  event_log: a-${ID}-b", 9000, "a-7-b"),
        ("proxy:\n  port: ${NONE:-9000}\n  event_log: '${ID}'", 9000, "7"),
        ("proxy:\n  port: ${EMPTY:-9000}\n  event_log: a${EMPTY}", 9000, "a"),
        ("proxy:\n  port: 9000\n  event_log: $${ID}", 9000, "${ID}"),
        ("proxy: {port: 9000, event_log: '${ID} $ID'}", 9000, "7 $ID"),
        ("proxy:\n  port: &p 9000\n  event_log: ${NONE:-}x", 9000, "x"),
    ],
)
def test_variables_in_files_are_replaced(tmp_path: Path, text: str, port: int, name: str) -> None:
    """Without quotes the result is YAML again; in quotes it is text."""
    path = tmp_path / "kvrs.yaml"
    path.write_text(text)

    proxy = load_config(path, {"PORT": "9000", "ID": "7", "EMPTY": ""}).proxy

    assert (proxy.port, proxy.event_log) == (port, name)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("id: ${NONE}", r"environment variable NONE is not set; allowed: a value, or \$\{NONE:-d"),
        ("id: ${1X}", r"got '\$\{1X\}'; allowed: \$\{NAME\}"),
        ("id: ${KVRS_SECRET}", "which is a secret"),
    ],
)
def test_a_variable_that_cannot_be_replaced_is_a_fault(
    tmp_path: Path, text: str, fault: str
) -> None:
    """With the path of its value."""
    path = tmp_path / "kvrs.yaml"
    path.write_text(f"proxy:\n  {text}")

    with pytest.raises(ConfigError, match=rf"kvrs\.yaml: proxy\.id: .*{fault}"):
        load_config(path, {"KVRS_SECRET": "correct-horse-battery"})


def test_the_value_of_a_variable_cannot_add_keys(tmp_path: Path) -> None:
    """It is put in after the YAML is parsed."""
    path = tmp_path / "kvrs.yaml"
    path.write_text("proxy:\n  event_log: ${ID}")

    assert load_config(path, {"ID": "a\n  port: 1"}).proxy.event_log == "a\n  port: 1"


def test_braces_without_quotes_in_a_flow_mapping_are_explained(tmp_path: Path) -> None:
    """YAML itself cannot parse them."""
    path = tmp_path / "kvrs.yaml"
    path.write_text("proxy: {port: ${PORT}}")

    with pytest.raises(ConfigError, match=r"on a line of its own"):
        load_config(path, {"PORT": "1"})


def test_files_that_kvrs_wrote_are_read_literally(tmp_path: Path) -> None:
    """The launcher's files are resolved: what looks like a variable there is text."""
    path = tmp_path / "kvrs.yaml"
    config = with_variables(KVRS_PROXY__EVENT_LOG="'${ID} $${ID}'")
    path.write_text(dump_config(config))

    assert load_config(path) == config


def test_show_names_variables_as_origins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of items of a list that a variable sets."""
    path = tmp_path / "kvrs.yaml"
    path.write_text("proxy:\n  id: ${NAME}\n  peers: [{id: proxy-9, peer_port: 1}]\n")
    environ = {
        "NAME": "east",
        "KVRS_PROXY__PEERS": "[{id: proxy-1, peer_port: 9}]",
    }
    for name, value in environ.items():
        monkeypatch.setenv(name, value)

    found = CliRunner().invoke(app, ["config", "show", str(path), "--json"])

    origins = json.loads(found.stdout)["from"]
    assert origins["proxy.id"] == "kvrs.yaml:2, NAME"
    assert origins["proxy.peers.0.peer_port"] == "KVRS_PROXY__PEERS"
    assert origins["proxy.peers.0.host"] == "default"
    assert origins["cluster.nodes.0.id"] == "default"


def test_a_section_of_the_wrong_type_stays_a_fault_of_the_file(tmp_path: Path) -> None:
    """A variable below it does not hide it."""
    path = tmp_path / "kvrs.yaml"
    path.write_text("proxy: 3")

    (fault,) = faults_of({"KVRS_PROXY__PORT": "1"}, path)

    assert fault == f"{path}:1: proxy: got 3; allowed: a section"
    assert load_source(path, {}).document == {"proxy": 3}


@pytest.mark.parametrize(
    ("options", "fault"), [([], "KVRS_PROXY__PORT"), (["--no-env"], "instance p0: port is 0")]
)
def test_a_proxy_of_a_cluster_does_not_read_the_environment_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], fault: str
) -> None:
    """With `--no-env` its file is taken as it is: the launcher has resolved it."""
    path = tmp_path / "kvrs.yaml"
    path.write_text(dump_config(Config()))
    monkeypatch.setenv("KVRS_PROXY__PORT", "x")

    ended = CliRunner().invoke(app, ["proxy", "--config", str(path), *options])

    assert fault in str(ended.exception)
