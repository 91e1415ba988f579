"""What holds of the command line as a whole."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

import kvrs
from kvrs.cli import app


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
