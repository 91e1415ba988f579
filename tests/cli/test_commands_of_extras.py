"""Commands of other packages on the command line of kvrs."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvrs.cli import app, extras
from kvrs.errors import MissingExtraError
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


def test_the_list_of_names_is_that_of_the_laboratory() -> None:
    """A command that is not listed would not be found."""
    commands = [each.callback for each in lab_app.registered_commands]

    assert tuple(each.__name__ for each in commands if each is not None) == extras.OF_LAB


@pytest.mark.parametrize("name", extras.OF_LAB)
def test_a_command_of_a_package_that_is_missing_names_its_extra(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Its options are not checked, which only the package could."""

    def fail(module: str) -> None:
        package = module.partition(".")[0]
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)

    monkeypatch.setattr(extras, "import_module", fail)

    error = CliRunner().invoke(app, [name, "--seed", "3"]).exception
    listed = CliRunner().invoke(app, ["--help"], terminal_width=200)

    assert isinstance(error, MissingExtraError)
    assert str(error) == "not installed: kvrs_lab; to install: pip install 'kvrs[lab]'"
    assert (listed.exit_code, f" {name} " in listed.stdout) == (0, True)


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
    """Names of the laboratory are among them."""
    ran = CliRunner().invoke(app, ["replays"])

    assert ran.exit_code == 2
    assert "Did you mean 'replay'?" in ran.output
