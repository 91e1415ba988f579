"""What holds of the command line as a whole."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import kvrs
from kvrs.cli import app
from kvrs.load.command import ReplayOptions
from tests import certificates


def test_version_is_the_package_s_own() -> None:
    """Scripts and bug reports can name the version."""
    shown = CliRunner().invoke(app, ["--version"])

    assert (shown.exit_code, shown.stdout) == (0, f"kvrs {kvrs.__version__}\n")


@pytest.mark.parametrize("arguments", [["-h"], ["demo", "-h"], ["config", "check", "-h"]])
def test_help_has_a_short_option_everywhere(arguments: list[str]) -> None:
    """`-h` and `--help` are the same, also below a group of commands."""
    short = CliRunner().invoke(app, arguments)
    long = CliRunner().invoke(app, [*arguments[:-1], "--help"])

    assert short.exit_code == 0
    assert short.stdout == long.stdout


def test_completion_can_be_installed() -> None:
    """Shells complete commands and options."""
    shown = CliRunner().invoke(app, ["--help"])

    assert "--install-completion" in shown.stdout


def test_help_of_every_command_is_one_sentence_on_one_line() -> None:
    """A docstring of several lines would be broken in the middle of the list of commands."""
    for command in app.registered_commands:
        lines = (command.callback.__doc__ or "").splitlines()

        assert len(lines) == 1, command.name
        assert lines[0].endswith("."), command.name


@pytest.mark.process
def test_the_command_line_loads_only_what_every_command_needs() -> None:
    """`kvrs --version` takes a fraction of a second."""
    heavy = "{'aiohttp', 'asyncio', 'numpy', 'ray', 'torch'}"
    script = f"import sys, kvrs.cli; print(sorted(sys.modules.keys() & {heavy}))"

    assert subprocess.check_output([sys.executable, "-c", script]) == b"[]\n"


@pytest.mark.process
@pytest.mark.skipif(certificates.MISSING is not None, reason=str(certificates.MISSING))
def test_replay_takes_secret_and_certificates_from_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For faults at instances with `security.tls`; a secret file of its own comes first."""
    ca = certificates.Authority(tmp_path)
    secrets = {name: tmp_path / name for name in ("of the file", "of the option")}
    for name, file in secrets.items():
        file.write_text(f"the secret {name}")
        file.chmod(0o600)
    config = tmp_path / "kvrs.yaml"
    security = {"secret_file": str(secrets["of the file"]), "tls": ca.issue("n0").section(ca.cert)}
    config.write_text(json.dumps({"security": security}))
    given: list[ReplayOptions] = []

    def run(options: ReplayOptions, *_: object) -> bool:
        given.append(options)
        return True

    monkeypatch.setattr("kvrs.load.command.run_replay", run)
    base = ["replay", "--url", "http://127.0.0.1:9", "--preset", "conversation"]
    for more in ([], ["--secret-file", str(secrets["of the option"])]):
        ran = CliRunner().invoke(app, [*base, "--config", str(config), *more])
        assert ran.exit_code == 0, ran.output

    assert [each.secret for each in given] == [
        b"the secret of the file",
        b"the secret of the option",
    ]
    assert all(each.tls is not None for each in given)
