"""The size of the tree before and after the fifth house: lines by package, modules, what wires them
(`wiring.py`), what a proxy for stock vLLM imports (`stock.py`), imports between packages, circles
of files, protocols with one implementation, and what a user meets: settings of the file, options of
the commands, metric families.

Lines are those of Python files; a module counts that has content. A class of the packages counts as
an implementation of a protocol if the class inherits from the protocol or has all its members by
name. Equal functions are those of five lines or more with the same statements. A circle is a set of
files that import each other, also for types alone. Settings are the keys that have a value, each
once, also where a list has several sections with this key. An option counts for each command that
has it; `--help`, those of completion and hidden ones do not. Metric families are those that
/metrics of a proxy in front of vLLM names, the library's own about the process included. The
settings, options and families of before are counted by the program of then, in a checkout of its
own.
"""

import ast
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path, PurePath
from statistics import median
from typing import Any

import aiohttp
import typer
from typer.main import get_command

from experiments.command_line import parser_of
from experiments.record import ROOT, Record
from experiments.request_path.stock import started
from experiments.request_path.wiring import (
    MOST_FIELDS,
    callable_parameters,
    callbacks_from_outside,
    parts,
    wide_records,
)
from kvrs.cli import app
from kvrs.config.cluster import Backend
from kvrs.config.document import parse_yaml
from kvrs.config.file import Config, parse_config
from kvrs.config.schema import first_file
from kvrs.config.settings import Settings
from kvrs.proxy.server import Proxy

BEFORE = "6a4429cb"  # What a path walks through was counted, and nothing was folded yet.
# What each package may import of the others.
ALLOWED = {
    "kvrs": set[str](),
    "kvrs_engine": {"kvrs"},
    "kvrs_lab": {"kvrs", "kvrs_engine"},
    "distserve_patches": {"kvrs", "kvrs_engine"},
}
TESTS = ("tests", "kvrs_testkit")
AT_MOST = {
    "modules of kvrs": 190,
    "parameters of kvrs that are callables": 100,
    "callbacks set from outside": 0,
    f"records of more than {MOST_FIELDS} fields": 0,
    "lines that a stock proxy imports": 33_000,
    "imports against the direction of packages": 0,
    "circles of files": 0,
    "circles, also by imports for types": 0,
    "modules at the top of kvrs": 8,
    "modules at the top of kvrs_engine": 8,
    "modules at the top of kvrs_lab": 8,
    "settings": 130,
    "options of the CLI": 110,
    "metric families before vLLM": 60,
}
STARTS = 5  # Of a stock proxy; the median's CPU and memory are shown.


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvrs-size-") as directory:
        tree = Path(directory) / "tree"
        _git("worktree", "add", "--quiet", "--detach", str(tree), commit)
        try:
            yield tree
        finally:
            _git("worktree", "remove", "--force", str(tree))


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout


def texts_of(tree: Path) -> dict[str, str]:
    """The text of each Python file of a checkout that git knows, by its path."""
    paths = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=tree, check=True, capture_output=True, text=True
    ).stdout.split()
    return {path: (tree / path).read_text() for path in paths}


def figures_of(texts: dict[str, str]) -> dict[str, int]:
    """The figures of a tree that its files alone tell."""
    trees = {path: ast.parse(text) for path, text in texts.items()}
    of_packages = {path: tree for path, tree in trees.items() if root(path) in ALLOWED}
    imports = dict(_imports(of_packages))
    return {
        **{f"lines of {each}": lines(texts, [each]) for each in ALLOWED},
        "lines of tests and testkit": lines(texts, TESTS),
        "lines of experiments": lines(texts, ["experiments"]),
        **_wiring({path: tree for path, tree in trees.items() if root(path) == "kvrs"}),
        "protocols with one implementation": len(single_protocols(of_packages)),
        "imports against the direction of packages": sum(
            name != own and name in ALLOWED and name not in ALLOWED[own]
            for path, found in imports.items()
            for own in [root(path)]
            for name in (each.partition(".")[0] for each, _ in found)
        ),
        "circles of files": circles(imports, with_types=False),
        "circles, also by imports for types": circles(imports, with_types=True),
        **{
            f"modules at the top of {each}": sum(
                PurePath(path).parent == PurePath(each) for path in texts
            )
            for each in [*ALLOWED][:3]
        },
        "lines that equal functions repeat": repeated(trees),
    }


def _wiring(trees: dict[str, ast.Module]) -> dict[str, int]:
    """The figures of `kvrs` alone."""
    full = {path: tree for path, tree in trees.items() if tree.body}
    return {
        "modules of kvrs": len(full),
        "of them of several parts": sum(len(parts(tree)) > 1 for tree in full.values()),
        "parameters of kvrs that are callables": len(callable_parameters(trees)),
        "callbacks set from outside": len(callbacks_from_outside(trees)),
        f"records of more than {MOST_FIELDS} fields": len(wide_records(trees)),
    }


def of_stock(tree: Path) -> dict[str, int]:
    """The imports of a stock proxy of a checkout, and the cost of its start."""
    runs = [started(tree) for _ in range(STARTS)]
    return {
        "modules that a stock proxy imports": len(runs[0].modules),
        "lines that a stock proxy imports": runs[0].lines,
        "CPU of its start, ms": round(1000 * median(run.cpu_s for run in runs)),
        "its memory, MB": round(median(run.rss_mb for run in runs)),
    }


def root(path: str) -> str:
    return path.partition("/")[0]


def lines(texts: dict[str, str], folders: Iterable[str]) -> int:
    return sum(text.count("\n") for path, text in texts.items() if root(path) in folders)


def module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _imports(trees: dict[str, ast.Module]) -> Iterator[tuple[str, list[tuple[str, bool]]]]:
    """The modules of the tree that each file imports, each with whether for types alone."""
    modules = {module_of(path) for path in trees}
    for path, tree in trees.items():
        for_types = {
            id(inner)
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
            for inner in ast.walk(node)
        }
        found = []
        for node in ast.walk(tree):
            match node:
                case ast.Import(names=names):
                    imported = [each.name for each in names]
                case ast.ImportFrom(module=str(module), names=names):
                    inner = [f"{module}.{each.name}" for each in names]
                    imported = [each if each in modules else module for each in inner]
                case _:
                    continue
            found += [(each, id(node) in for_types) for each in dict.fromkeys(imported)]
        yield path, found


def circles(imports: dict[str, list[tuple[str, bool]]], *, with_types: bool) -> int:
    """Sets of files each of which imports every other one of its set, at least by way of others."""
    paths = {module_of(path): path for path in imports}
    reached = {
        path: {
            paths[name]
            for name, is_type in found
            if name in paths and paths[name] != path and (with_types or not is_type)
        }
        for path, found in imports.items()
    }
    changed = True
    while changed:
        changed = False
        for names in reached.values():
            more = set[str]().union(*(reached[name] for name in names)) - names
            changed = changed or bool(more)
            names |= more
    return len(
        {
            frozenset(name for name in names if path in reached[name])
            for path, names in reached.items()
            if path in names
        }
    )


def single_protocols(trees: dict[str, ast.Module]) -> list[str]:
    """The protocols that at most one class implements."""
    classes, named_bases = dict[str, ast.ClassDef](), dict[str, list[str]]()
    for path, tree in trees.items():
        module, found = module_of(path), [*ast.walk(tree)]
        names = {
            each.asname or each.name: f"{node.module}.{each.name}"
            for node in found
            if isinstance(node, ast.ImportFrom)
            for each in node.names
        }
        for node in found:
            if isinstance(node, ast.ClassDef):
                words = [ast.unparse(each).partition("[")[0] for each in node.bases]
                classes[f"{module}.{node.name}"] = node
                named_bases[f"{module}.{node.name}"] = [
                    names.get(word, f"{module}.{word}") for word in words
                ]

    @cache
    def bases(name: str) -> frozenset[str]:
        named = named_bases.get(name, [])
        return frozenset(named).union(*map(bases, named))

    @cache
    def members(name: str) -> frozenset[str]:
        found = [_members(classes[each]) for each in (name, *bases(name)) if each in classes]
        return frozenset[str]().union(*found)

    protocols = {name for name, named in named_bases.items() if "typing.Protocol" in named}
    return [
        name
        for name in sorted(protocols)
        if sum(
            name in bases(each) or members(name) <= members(each)
            for each in classes.keys() - protocols
        )
        < 2
    ]


def _members(node: ast.ClassDef) -> set[str]:
    """Methods and attributes that a class itself names."""
    found = set[str]()
    for each in ast.walk(node):
        match each:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                found.add(name)
            case _:
                pass
    for statement in node.body:
        match statement:
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
                found.add(name)
            case _:
                pass
    return found


def repeated(trees: dict[str, ast.Module]) -> int:
    """Lines that equal functions would spare if each were there once."""
    lengths = defaultdict(list)
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _length(node) >= 5:
                lengths["".join(_code(node))].append(_length(node))
    return sum(sum(sorted(each)[:-1]) for each in lengths.values())


def _code(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    for statement in node.body[ast.get_docstring(node) is not None :]:
        yield ast.dump(statement)


def _length(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def settings(model: type[Settings] = Config, above: str = "") -> Iterator[str]:
    """The paths of all keys with a value."""
    for key, field in model.model_fields.items():
        path = f"{above}{key}"
        below = [*_sections(field.annotation)]
        if not below:
            yield path
        for section in below:
            yield from settings(section, f"{path}.")


def _sections(annotation: Any) -> Iterator[type[Settings]]:
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        yield annotation
    else:  # A list of sections, or a section or null.
        for each in getattr(annotation, "__args__", ()):
            yield from _sections(each)


def options_of_commands() -> Iterator[str]:
    """Each option with the command before it."""
    return _options(typer.Context(root := get_command(app), info_name="kvrs"), root)


def _options(context: Any, command: Any) -> Iterator[str]:
    for parameter in command.params:
        is_shown = parameter.param_type_name == "option" and not parameter.hidden
        if is_shown and "completion" not in parameter.name:
            yield f"{context.command_path} {parameter.opts[0]}"
    names = command.list_commands(context) if hasattr(command, "commands") else ()
    for name in names:
        below = command.get_command(context, name)
        yield from _options(typer.Context(below, parent=context, info_name=name), below)


def families_before_vllm() -> list[str]:
    """The metric families of a proxy with the first file for vLLM, before any server answers."""
    return [line.split()[2] for line in asyncio.run(_scraped()) if line.startswith("# TYPE ")]


async def _scraped() -> list[str]:
    written = parse_yaml(first_file(Backend.VLLM))
    proxy = Proxy(parse_config(written | {"proxy": {"port": 0, "admin_port": 0}}), bytes(32))
    await proxy.start()
    try:
        url = f"http://127.0.0.1:{proxy.admin_port}/metrics"
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            return (await response.text()).splitlines()
    finally:
        await proxy.close()


def of_users() -> dict[str, int]:
    return {
        "settings": len([*settings()]),
        "options of the CLI": len([*options_of_commands()]),
        "metric families before vLLM": len(families_before_vllm()),
    }


def of_users_then(tree: Path) -> dict[str, int]:
    """The same of a checkout, by its own program."""
    with tempfile.TemporaryDirectory(prefix="kvrs-size-") as out:
        subprocess.run(
            [sys.executable, "-m", "experiments.request_path.size", "--out", out],
            cwd=tree,
            env=os.environ | {"PYTHONPATH": str(tree)},
            check=True,
            stdout=subprocess.DEVNULL,
        )
        figures = json.loads((Path(out) / "size.json").read_text())["now"]
    return {name: figures[name] for name in of_users()}


def main() -> None:
    options = parser_of(__doc__, __file__).parse_args()
    record = Record(timed=False)
    with checkout(BEFORE) as tree:
        before = figures_of(texts_of(tree)) | of_stock(tree) | of_users_then(tree)
    now = figures_of(texts_of(ROOT)) | of_stock(ROOT) | of_users()
    figures = {"before": before, "now": now}
    text = as_text(before, now)
    print(text)
    record.keep(options.out, "size", figures, text)


def as_text(before: dict[str, int], now: dict[str, int]) -> str:
    """A row of each figure; one that the program of before did not count has a blank."""
    rows = [f"{'':<44}{'before':>9}{'now':>9}{'at most':>9}"]
    for name, count in now.items():
        most = AT_MOST.get(name)
        bar = "" if most is None else f"{most:>9,}" + ("   missed" if count > most else "")
        rows.append(f"{name:<44}{before[name]:>9,}{count:>9,}{bar}")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
