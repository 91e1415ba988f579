"""Markdown and code agree: folder map, indices of pages and decisions, links, width of lines."""

import ast
import os
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.test_tidy import RANK

ROOT = Path(__file__).parent.parent
WIDTH = 100
PAGES = sorted(
    path
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/**/README.md"))
    if not {"results", "node_modules"} & set(path.parts)
    and not any(part.startswith(".venv") for part in path.parts)
)
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text()
TESTED = (ROOT / "docs" / "research" / "tested-faults.md").read_text()
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("*.md"))
# Parts of kvrs that all may import; the map does not repeat them in every row.
FOUNDATION = {("kvrs", name) for name in ("ids", "errors", "config", "process")}


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Without tables."""
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if not line.startswith("|"):
            yield number, line


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_markdown_is_wrapped(path: Path) -> None:
    """Tables excepted, and lines that are one link or one word too long to break."""
    long = [
        number for number, line in prose(path) if len(line) > WIDTH and " " in line.strip("-*[ ")
    ]

    assert not long, f"{path.relative_to(ROOT)}: lines {long} are longer than {WIDTH} columns"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_paths_in_markdown_exist(path: Path) -> None:
    """A file that was moved is moved in the guide too."""
    text = path.read_text()
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text)]
    local = [link for link in links if link and not re.match(r"[a-z]+:", link)]
    named = re.findall(
        r"`((?:kvrs|kvrs_engine|kvrs_lab|tests|experiments|docs|distserve_patches)/[\w/.]+)`", text
    )
    named = [name for name in named if "NAME" not in name]
    if path.name == "CHANGELOG.md":
        named = []  # Names in history stay as they were.

    assert [link for link in local if not (path.parent / link).exists()] == []
    assert [name for name in named if not (ROOT / name).exists()] == []


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub names them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_headings_that_links_name_exist(path: Path) -> None:
    """A section that was renamed or moved is moved in links too."""
    links = re.findall(r"\]\((?![a-z]+:)([^)#\s]*\.md)?#([^)\s]+)\)", path.read_text())
    targets = [(path.parent / page if page else path, anchor) for page, anchor in links]

    assert [anchor for target, anchor in targets if anchor not in anchors(target)] == []


def readme_blocks() -> Iterator[str]:
    """The indented blocks of commands in the README."""
    text = (ROOT / "README.md").read_text()
    return (block[1] for block in re.finditer(r"(?<=\n\n)((?: {4}.*\n)+)", text))


@pytest.mark.process
def test_the_readme_stops_waiting_for_a_cluster_that_did_not_start(tmp_path: Path) -> None:
    """Its error is shown, and the next command has other ports than the proxy above."""
    (block,) = [block for block in readme_blocks() if "kvrs lab up" in block]
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").write_text("")
    (tmp_path / "out").mkdir()  # `make demo` has made it.
    kvrs = tmp_path / "kvrs"
    kvrs.write_text('#!/bin/sh\n[ "$2" != up ] || { echo "port: in use"; exit 2; }\necho "$@"\n')
    kvrs.chmod(0o755)
    environ = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}

    ran = subprocess.run(
        ["bash", "-c", block], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60
    )

    assert "port: in use" in ran.stdout
    assert "lab replay --url" in ran.stdout
    assert {"8000", "8001"}.isdisjoint(re.findall(r"\b80\d\d\b", block))


def test_the_readme_names_recoveries_as_outputs_do() -> None:
    """A reader looks for the same words in the page, the report and the policies."""
    opening = (ROOT / "README.md").read_text().partition("![")[0]
    options = re.findall(
        r"^\| `(\w+)`", (ROOT / "docs/guide/policies.md").read_text(), re.MULTILINE
    )

    named = re.findall(r"(?<!\*)\*(\w+)\*(?!\*)", opening)

    assert len(named) == 4
    assert {*named} <= {*options}


def test_the_kill_on_the_page_compares_its_streams_and_ends_its_cluster() -> None:
    """Without `--oracle` the report says that nothing was compared."""
    (block,) = [block for block in readme_blocks() if "kvrs lab up" in block]

    assert "--oracle" in block
    assert block.splitlines()[-1].split()[:2] == ["kill", "$!"]


def test_pages_that_code_names_exist() -> None:
    """Messages and docstrings that refer to the docs."""
    named = {
        (match[1], match[2] or "")
        for folder in (*RANK, "tests", "deploy")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".yaml", ".service", ".html") and "results" not in path.parts
        for match in re.finditer(r"\bdocs/([\w/-]+\.(?:md|yaml))(?:#([\w-]+))?", path.read_text())
    }

    assert [page for page, _ in named if not (ROOT / "docs" / page).exists()] == []
    stale = [anchor for page, anchor in named if anchor not in ("", *anchors(ROOT / "docs" / page))]
    assert stale == []


def test_the_installation_page_pins_what_make_install_pins() -> None:
    """A CPU build of another version would be replaced by `make demo`."""
    pins = re.findall(r"\b([a-z]+==[\d.]+)", (ROOT / "docs/guide/install.md").read_text())

    assert pins
    assert set(pins) <= set((ROOT / "constraints.txt").read_text().split())


def tables_of_the_map() -> list[list[tuple[list[str], str]]]:
    """Paths and "stands on" of every row: of each package, and of what stands beside them."""
    section = ARCHITECTURE.partition("## Folder map")[2].partition("\n## ")[0]
    tables = [
        [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| `")]
        for table in section.split("\n### ")[1:]
    ]
    return [
        [(re.findall(r"`([^`]+)`", row[0]), (row[2:] or [""])[0].strip("| ")) for row in rows]
        for rows in tables
    ]


def rows_of_the_map() -> list[tuple[list[str], str]]:
    return [row for table in tables_of_the_map() for row in table]


Part = tuple[str, str]  # A package, and a folder or module at its top.


def part_of(path: str) -> Part:
    package, _, name = path.strip("/").partition("/")
    return package, Path(name).stem


@cache
def imported_by(path: Path) -> set[Part]:
    """The other parts of the packages that a part imports."""
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    found: set[str] = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.Import():
                    found |= {alias.name for alias in node.names}
                case ast.ImportFrom(module=str(module)):
                    found |= {f"{module}.{alias.name}" for alias in node.names}
                case _:
                    pass
    parts = {(names[0], names[1]) for name in found if len(names := name.split(".")) > 1}
    parts = {(package, name) for package, name in parts if name in RANK.get(package, ())}
    return parts - FOUNDATION - {part_of(str(path.relative_to(ROOT)))}


def column_of(parts: set[Part], own: str) -> str:
    """Parts as the column shows them: those of the own package, then of the others by name."""
    packages = [own, *(each for each in ("kvrs_engine", "kvrs") if each != own)]
    shown = {
        package: ", ".join(sorted(name for of, name in parts if of == package))
        for package in packages
    }
    named = [
        names if package == own else f"{package}: {names}"
        for package, names in shown.items()
        if names
    ]
    return "; ".join(named) or "-"


def test_the_folder_map_names_every_package_and_no_other() -> None:
    """A new package gets a row, a removed one loses it."""
    packages = {
        f"{package}/{path.name}" + ("/" if path.is_dir() else "")
        for package in RANK
        for path in (ROOT / package).iterdir()
        if (path.suffix == ".py" or (path / "__init__.py").exists()) and path.name != "__init__.py"
    }
    others = {"distserve_patches/", "kvrs_testkit/", "experiments/", "tests/", "docs/", "deploy/"}

    named = [path for paths, _ in rows_of_the_map() for path in paths]

    assert sorted(named) == sorted(packages | others)


def test_the_folder_map_is_true_about_what_a_package_stands_on() -> None:
    """The column lists what is imported, by name."""
    rows = [(paths, column) for paths, column in rows_of_the_map() if column]

    shown = {paths[0]: column for paths, column in rows}

    true = {}
    for paths, _ in rows:
        parts: set[Part] = set().union(*(imported_by(ROOT / path) for path in paths))
        own, _ = part_of(paths[0])
        true[paths[0]] = column_of(parts - {part_of(path) for path in paths}, own)
    assert shown == true


def test_the_folder_map_is_in_the_order_of_the_layers() -> None:
    """A row stands below all that it imports; the ranks of tests/test_tidy.py are the order."""
    seen: set[Part] = set()
    for table in tables_of_the_map():
        parts = [part_of(path) for paths, _ in table for path in paths]
        ranks = [RANK[package][name] for package, name in parts if package in RANK]
        assert ranks == sorted(ranks)

        for paths, _ in table:
            seen |= {part_of(path) for path in paths}
            missing = {path: imported_by(ROOT / path) - seen for path in paths}
            assert not any(missing.values()), missing


def test_the_lines_of_the_followed_stream_are_in_the_code() -> None:
    """A reader looks for them there."""
    page = (ROOT / "docs" / "research" / "one-stream.md").read_text()
    quoted = re.findall(r"^\| .* \| `(kvrs/[\w/.]+)` \| `(.*)` \|$", page, re.MULTILINE)

    missing = [
        (path, line)
        for path, line in quoted
        if line not in map(str.strip, (ROOT / path).read_text().splitlines())
    ]

    assert len(quoted) > 15
    assert not missing


def test_every_decision_is_in_the_index_and_has_its_parts() -> None:
    """Context, decision, consequences; short; a number is kept, also when others are removed."""
    numbers = [path.name.partition("-")[0] for path in DECISIONS]
    assert re.findall(r"^\| \[(\d{4})\]", ARCHITECTURE, re.MULTILINE) == numbers
    assert len(set(numbers)) == len(numbers) > 0
    for number, path in zip(numbers, DECISIONS, strict=True):
        lines = path.read_text().splitlines()

        assert lines[0].startswith(f"# {number}: ")
        title = lines[0].partition(": ")[2]
        assert f"| [{number}](docs/decisions/{path.name}) | {title} |\n" in ARCHITECTURE
        parts = [line for line in lines if line.startswith("#")]
        assert parts[1:] == ["## Context", "## Decision", "## Consequences"], path.name
        assert len(lines) <= 40, path.name


def test_the_index_of_the_docs_names_every_page_once() -> None:
    """A new page gets a line, a removed one loses it."""
    docs = ROOT / "docs"
    pages = {path.relative_to(docs).as_posix() for path in docs.glob("**/*.md")}
    others = {path for path in pages if path.startswith("decisions/")} | {"README.md"}

    named = re.findall(r"^\| \[[^]]+\]\(([^)]+)\) \|", (docs / "README.md").read_text(), re.M)

    assert sorted(named) == sorted(pages - others)


def test_the_architecture_is_a_page() -> None:
    """Reasons are in the decisions."""
    beside_the_index = [line for line in ARCHITECTURE.splitlines() if not line.startswith("| [0")]
    assert len(beside_the_index) <= 136


def defined_tests() -> set[str]:
    return {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
    }


def test_every_test_that_the_threat_model_names_exists() -> None:
    text = TESTED.partition("\n## Security\n")[2]
    rows = re.findall(r"^\| ([0-9]+) \|", text, re.MULTILINE)

    assert rows == [str(number) for number in range(1, 14)]
    assert set(re.findall(r"`(test_\w+)`", text)) - defined_tests() == set()


def test_every_test_that_the_list_of_faults_names_exists() -> None:
    """And no fault of the list is left out."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in TESTED.partition("\n## Security\n")[0].splitlines()
        if re.match(r"\| [0-9]+ ", line)
    ]
    assert [row[0] for row in rows] == [str(number) for number in range(1, 73)]
    named = {name for row in rows for name in re.findall(r"`(test_\w+)`", row[3])}
    assert named - defined_tests() == set()
    assert sum("`test_" in row[3] for row in rows) >= 68
