"""Commands of other packages on the command line of kvrs."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from kvrs.cli import app, extras
from kvrs.errors import ConfigError, MissingExtraError
from kvrs_lab.cli import app as lab_app

ADDED = """import typer

app = typer.Typer()


@app.command()
def greet(name: str = "you") -> None:
    \"\"\"Greet someone.\"\"\"
    print(f"hello {name}")
"""


@pytest.fixture
def forgotten() -> Iterator[None]:
    """No test leaves what it registered."""
    extras._registered.cache_clear()
    yield
    extras._registered.cache_clear()


def test_commands_that_are_named_with_the_laboratory_are_all_of_its_commands() -> None:
    commands = [each.callback for each in lab_app.registered_commands]

    assert tuple(each.__name__ for each in commands if each is not None) == extras.MOVED


@pytest.mark.parametrize("name", extras.MOVED)
def test_a_command_of_the_laboratory_is_refused_at_the_top_with_its_name(name: str) -> None:
    error = CliRunner().invoke(app, [name, "--seed", "3"]).exception

    assert isinstance(error, ConfigError)
    assert str(error) == f"kvrs {name} is kvrs lab {name}"


def test_a_package_that_is_missing_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options are not checked, which only the package could; the list of commands has the line."""

    def load() -> typer.Typer:
        raise ModuleNotFoundError("No module named 'kvrs_lab'", name="kvrs_lab")

    found: dict[str, Callable[[], typer.Typer]] = {"lab": load}
    monkeypatch.setattr(extras, "_registered", lambda: found)

    error = CliRunner().invoke(app, ["lab", "up", "--seed", "3"]).exception
    listed = CliRunner().invoke(app, ["--help"], terminal_width=200)

    assert isinstance(error, MissingExtraError)
    assert str(error) == "not installed: kvrs_lab; to install: pip install 'kvrs[lab]'"
    assert listed.exit_code == 0
    assert "pip install 'kvrs[lab]'" in listed.stdout


@pytest.mark.usefixtures("forgotten")
def test_another_distribution_adds_a_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By its entry point, as `pip install` records it."""
    record = tmp_path / "greeting-1.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: greeting\nVersion: 1.0\n")
    (record / "entry_points.txt").write_text("[kvrs.commands]\ngreet = greeting_of_kvrs:app\n")
    (tmp_path / "greeting_of_kvrs.py").write_text(ADDED)
    monkeypatch.syspath_prepend(str(tmp_path))

    ran = CliRunner().invoke(app, ["greet", "--name", "Ada"])
    listed = CliRunner().invoke(app, ["--help"], terminal_width=200)

    assert ran.stdout == "hello Ada\n"
    assert "Greet someone." in listed.stdout


def test_a_name_of_no_command_is_refused_with_those_that_are_alike() -> None:
    ran = CliRunner().invoke(app, ["lab", "replays"])

    assert ran.exit_code == 2
    assert "Did you mean 'replay'?" in ran.output
