"""Rules that hold for the command line as a whole."""

import io
import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import kvrs
import kvrs_lab.cli.options as opt
from kvrs.cli import app, config_app
from kvrs.errors import ConfigError
from kvrs.process.logs import LEVEL_ENV_NAME, log_to
from kvrs_lab.cli import app as lab_app
from kvrs_lab.load.command import ReplayOptions
from kvrs_testkit import certificates


def test_version_is_the_package_s_own() -> None:
    """Scripts and bug reports can name the version."""
    shown = CliRunner().invoke(app, ["--version"])

    assert (shown.exit_code, shown.stdout) == (0, f"kvrs {kvrs.__version__}\n")


@pytest.mark.parametrize("arguments", [["-h"], ["lab", "demo", "-h"], ["config", "check", "-h"]])
def test_help_has_a_short_option_everywhere(arguments: list[str]) -> None:
    """`-h` and `--help` are the same, also below a group of commands."""
    short = CliRunner().invoke(app, arguments)
    long = CliRunner().invoke(app, [*arguments[:-1], "--help"])

    assert short.exit_code == 0
    assert short.stdout == long.stdout


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ("lab up --proxies 0", "--proxies: got 0; allowed: a whole number from 1 to 8"),
        ("lab up --nodes 65", "--nodes: got 65; allowed: a whole number from 1 to 64"),
        ("lab demo --requests=x", "--requests: got 'x'; allowed: a whole number from 1 to 2000"),
        (
            "lab simulate --requests 1000001",
            "--requests: got 1000001; allowed: a whole number from 1 to 1000000",
        ),
        ("lab simulate --seeds 0", "--seeds: got 0; allowed: a whole number, 1 or more"),
        ("lab simulate --rate x", "--rate: got 'x'; allowed: a number"),
        ("lab simulate --rate 0", "--rate: got 0.0; allowed: above 0, below 1e+09"),
        ("proxy --port -1", "--port: got -1; allowed: a whole number from 0 to 65535"),
        (
            "proxy --backend vlm",
            "--backend: got 'vlm'; allowed: vllm, sglang; the nearest one is vllm",
        ),
        (
            "lab up --backend vllm",
            "--backend: got 'vllm'; allowed: embedded, distserve; for vllm: kvrs proxy",
        ),
    ],
)
def test_an_option_that_is_not_allowed_is_refused_with_what_is(arguments: str, fault: str) -> None:
    """Before anything starts; the words are those of other errors, not those of a library."""
    ran = CliRunner().invoke(app, arguments.split())

    assert isinstance(ran.exception, ConfigError)
    assert str(ran.exception) == fault


def test_completion_can_be_installed() -> None:
    """Shells complete commands and options."""
    shown = CliRunner().invoke(app, ["--help"])

    assert "--install-completion" in shown.stdout


def test_help_of_every_command_is_one_sentence_on_one_line() -> None:
    """A docstring of several lines would be broken in the middle of the list of commands."""
    for command in (*app.registered_commands, *lab_app.registered_commands):
        lines = (command.callback.__doc__ or "").splitlines()

        assert len(lines) == 1, command.name
        assert lines[0].endswith("."), command.name


def test_help_of_every_command_has_an_example_that_parses() -> None:
    """Copied from there, a command runs: its options exist."""
    for prefix, group in (("", app), ("lab ", lab_app), ("config ", config_app)):
        for command in group.registered_commands:
            assert command.callback is not None
            name = prefix + (command.name or command.callback.__name__)
            shown = CliRunner().invoke(app, [*name.split(), "--help"], terminal_width=200).stdout
            lines = [line for line in (command.epilog or "").split("\n\n") if "kvrs " in line]

            assert lines, name
            for line in lines:
                words = line.partition("kvrs ")[2].split()
                assert " ".join(words).startswith(name), line
                assert all(word in shown for word in words if word.startswith("--")), line


def test_options_of_a_replay_are_grouped() -> None:
    """31 options in one list are not read."""
    shown = CliRunner().invoke(app, ["lab", "replay", "--help"], terminal_width=120).stdout

    assert all(title in shown for title in (opt.TRACE, opt.REQUESTS, opt.FAULTS, opt.REPORT))
    assert "mooncake-conversation" in shown


def test_options_are_called_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ports of `up` are those of `proxy`; a trace's preset has a name of its own."""
    file = tmp_path / "kvrs.yaml"
    file.write_text("proxy: {host: 0.0.0.0, admin_port: 9001}")
    monkeypatch.setenv("KVRS_PROXY__PORT", "x")

    def refusal(*command: str) -> str:
        return str(CliRunner().invoke(app, [*command]).exception)

    config = ("--config", str(file))
    assert "KVRS_PROXY__PORT" in refusal("lab", "up", *config)
    assert "port 9001 is used" in refusal("proxy", *config, "--no-env", "--port", "9001")
    replay = ("lab", "replay", "--url", "http://127.0.0.1:1", "--out", str(tmp_path))
    assert "mooncake-conversation" in refusal(*replay, "--trace-preset", "none")


@pytest.mark.parametrize(
    ("given", "before", "level"),
    [(["--log-level", "debug"], "nonsense", "DEBUG"), ([], "", "INFO"), ([], "warning", "WARNING")],
)
def test_the_log_level_reaches_the_processes_that_are_started(
    monkeypatch: pytest.MonkeyPatch, given: list[str], before: str, level: str
) -> None:
    """By the environment, which may have it already."""
    monkeypatch.setenv(LEVEL_ENV_NAME, before)
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.root, "level", logging.NOTSET)

    assert CliRunner().invoke(app, [*given, "config", "schema"]).exit_code == 0
    log_to(io.StringIO())

    assert logging.getLevelName(logging.root.level) == level


@pytest.mark.process
def test_the_command_line_loads_only_what_every_command_needs() -> None:
    """`kvrs --version` takes a fraction of a second."""
    heavy = "{'aiohttp', 'asyncio', 'kvrs_engine', 'kvrs_lab', 'numpy', 'ray', 'torch'}"
    script = f"import sys, kvrs.cli; print(sorted(sys.modules.keys() & {heavy}))"

    assert subprocess.check_output([sys.executable, "-c", script]) == b"[]\n"


@pytest.mark.process
@pytest.mark.skipif(certificates.MISSING is not None, reason=str(certificates.MISSING))
def test_replay_takes_secret_and_certificates_from_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For faults at instances with `security.tls`."""
    ca = certificates.Authority(tmp_path)
    secret = tmp_path / "secret"
    secret.write_text("the secret of the file")
    secret.chmod(0o600)
    config = tmp_path / "kvrs.yaml"
    security = {"secret_file": str(secret), "tls": ca.issue("n0").section(ca.cert)}
    config.write_text(json.dumps({"security": security}))
    given: list[ReplayOptions] = []

    def run(options: ReplayOptions, *_: object) -> bool:
        given.append(options)
        return True

    monkeypatch.setattr("kvrs_lab.load.command.run_replay", run)
    base = ["lab", "replay", "--url", "http://127.0.0.1:9", "--trace-preset", "conversation"]
    ran = CliRunner().invoke(app, [*base, "--config", str(config)])

    assert ran.exit_code == 0, ran.output
    assert [each.secret for each in given] == [b"the secret of the file"]
    assert all(each.tls is not None for each in given)


def test_an_agent_of_no_node_names_the_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also without a secret, which it would need next."""
    monkeypatch.delenv("KVRS_SECRET", raising=False)
    config = tmp_path / "kvrs.yaml"
    config.write_text("")

    ran = CliRunner().invoke(app, ["agent", "--config", str(config), "--node", "n7"])

    assert isinstance(ran.exception, ConfigError)
    assert ran.exception.faults == ["node 'n7' is not in cluster.nodes; allowed: n0, n1"]
