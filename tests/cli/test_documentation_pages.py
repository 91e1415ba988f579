"""Pages of the documentation, where kvrs is installed without a checkout."""

import re
from importlib import import_module
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvrs.cli import app
from kvrs.cli.pages import pages
from kvrs.config.cluster import Backend
from kvrs.config.schema import first_file
from tests.test_tidy import RANK

ROOT = Path(__file__).parents[2]
_NAMED = re.compile(r"kvrs docs ([a-z-]+)")


def test_a_page_is_printed_by_its_name_or_the_path_that_it_has_in_the_checkout() -> None:
    for name in ("vllm", "vllm.md", "docs/guide/vllm.md"):
        printed = CliRunner().invoke(app, ["docs", name])
        assert printed.stdout == (ROOT / "docs/guide/vllm.md").read_text(encoding="utf-8"), name


def test_a_page_is_printed_without_its_comments() -> None:
    """They name the results that figures are from, for a test."""
    source = (ROOT / "docs/research/papers.md").read_text(encoding="utf-8")
    printed = CliRunner().invoke(app, ["docs", "papers"]).stdout

    assert re.search(r"\| p50 of all pauses \| \d+<!-- kept: ", source)
    assert re.search(r"\| p50 of all pauses \| \d+ \| \d+ \|\n", printed)
    assert "<!--" not in printed


def test_a_section_is_printed_by_its_anchor() -> None:
    """With the sections below it, up to the next one of its level; alerts name such a section."""
    text = (ROOT / "docs/guide/vllm.md").read_text(encoding="utf-8")

    printed = CliRunner().invoke(app, ["docs", "docs/guide/vllm.md#start"]).stdout

    assert printed == "## Start" + text.partition("## Start")[2].partition("## What")[0]
    assert "### With a file" in printed
    error = CliRunner().invoke(app, ["docs", "vllm#stop"]).exception
    assert str(error).startswith("got section 'stop'; allowed: start, with-a-file, ")


def test_without_a_name_all_pages_are_listed_with_their_titles() -> None:
    lines = CliRunner().invoke(app, ["docs"]).stdout.splitlines()

    assert "vllm            kvrs in front of vLLM" in lines
    assert {line.split()[0] for line in lines} == pages().keys()


def test_an_unknown_page_names_those_that_there_are() -> None:
    error = CliRunner().invoke(app, ["docs", "vlm"]).exception

    assert str(error).startswith("got 'vlm'; allowed: backends, ")
    assert str(error).endswith("; the nearest one is vllm")


def test_a_section_as_a_second_word_is_refused_with_the_form_that_it_has() -> None:
    error = CliRunner().invoke(app, ["docs", "vllm", "start"]).exception

    assert str(error) == "got 'vllm' and 'start'; a section is vllm#start"


def test_pages_of_an_installation_are_found_by_its_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wheel puts them below the prefix of the environment; pip notes where."""
    page = tmp_path / "share/doc/kvrs/guide/vllm.md"
    page.parent.mkdir(parents=True)
    page.write_text("# From the wheel\n")

    class Recorded(type(Path("x"))):  # type: ignore[misc]  # The type of paths depends on the system.
        def locate(self) -> Path:
            return tmp_path / "lib" / str(self)

    module = import_module("kvrs.cli.pages")
    recorded = [Recorded("../share/doc/kvrs/guide/vllm.md"), Recorded("kvrs/api.py")]
    monkeypatch.setattr(module, "files", lambda _: recorded)
    monkeypatch.setattr(module, "_CHECKOUT", "no such folder")

    assert pages() == {"vllm": page}


@pytest.mark.parametrize("backend", Backend)
def test_first_files_and_the_schema_name_pages_that_are_installed(backend: Backend) -> None:
    """Not paths of a checkout, which an operator has not."""
    schema = CliRunner().invoke(app, ["config", "schema"]).stdout

    for text in (first_file(backend), schema):
        assert "docs/" not in text
        assert {*_NAMED.findall(text)} <= pages().keys()


def test_messages_and_help_texts_name_pages_that_are_installed() -> None:
    """The same of all strings of the commands; comments and docstrings are read in a checkout."""
    named: set[str] = set()
    files = [path for package in RANK for path in (ROOT / package).rglob("*.py")]
    for file in files:
        code = re.sub(r'"""(?s:.*?)"""|#.*', "", file.read_text(encoding="utf-8"))
        if file.name not in ("schema.py", "pages.py"):
            assert "docs/guide" not in code, file
            assert "docs/research" not in code, file
        named |= {*_NAMED.findall(code)}
    alerts = (ROOT / "deploy/helm/files/alerts.yaml").read_text(encoding="utf-8")
    assert "docs/guide" not in alerts

    assert named | {*_NAMED.findall(alerts)} <= pages().keys()
    assert {"vllm", "backends", "security", "presets", "distserve"} <= named
