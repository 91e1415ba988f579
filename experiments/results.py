"""Kept results: dated measurements that never expire.

A result says at which commit, when, on which machine, under which load and with which seeds it was
measured. A change of the product makes it older, nothing else; what has moved since then is for the
sentinels to tell (experiments/sentinels). A change of the method makes it void: of a Python file of
the experiment's own folder, or of a module of experiments and tests that it imports. Docstrings,
comments, imports, other names for what is imported from the product, and definitions that were
added to a module are no change of it.
"""

import ast
import json
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from experiments.record import NOT_CODE, ROOT, shown

KEPT = "kept"
NO_RESULT = "no result"
METHOD_CHANGED = "void: method changed"
_PRODUCT = ("kvrs", "distserve_patches")
_HARNESS = ("experiments", "tests")
# How a result is kept, or gone on with in another run, does not change its figures.
_KEEPING = {
    "experiments/record.py",
    "experiments/results.py",
    "experiments/cells.py",
    "experiments/readme.py",
}


def run_of(result: Path) -> dict[str, Any]:
    """The circumstances of a kept result; empty for one without."""
    run: dict[str, Any] = json.loads(result.read_text()).get("run", {})
    return run


def state(result: Path, folder: str, root: Path = ROOT) -> str:
    """`kept`, or why its figures do not show what they are to show, or are not known to."""
    if not result.exists():
        return NO_RESULT
    run = run_of(result)
    if "void" in run:
        return f"void: {run['void']}"
    commit = run.get("commit", "unknown")
    if unknown := _unknown(commit, root):
        return unknown
    changed = any(_is_other_code(commit, name, root) for name in _changed(commit, folder, root))
    return METHOD_CHANGED if changed else KEPT


def is_of_this_code(result: Path, folder: str, root: Path = ROOT) -> bool:
    """True if a run may go on from it, as one measurement: product and method are the same."""
    if state(result, folder, root) != KEPT:
        return False
    return not _differs(run_of(result)["commit"], _PRODUCT, root)


def age(run: dict[str, Any], now: datetime | None = None) -> str:
    """Time since the run began, in days."""
    try:
        at = datetime.fromisoformat(run["at"])
    except (KeyError, ValueError):
        return "unknown"
    days = ((now or datetime.now(UTC)) - at).days
    return f"{days} day" if days == 1 else f"{days} days"


@cache
def method_of(folder: str) -> tuple[str, ...]:
    """The experiment's folder, and the files of experiments and tests that its scripts import, and
    these in their turn.
    """
    found = {f"experiments/{folder}"}
    waiting = [*(ROOT / "experiments" / folder).rglob("*.py")]
    while waiting:
        for module in _modules_in(waiting.pop()):
            path = _file_of(module)
            if path is not None and path not in found | _KEEPING:
                found.add(path)
                waiting.append(ROOT / path)
    return tuple(sorted(found))


def _unknown(commit: str, root: Path) -> str:
    """Why it cannot be told what has changed since; empty: it can."""
    if commit == "unknown":
        return "unknown: it names no commit"
    if commit.endswith("-dirty"):
        return f"unknown: {shown(commit)} had changes that no commit has"
    if _git(root, "cat-file", "-e", f"{commit}^{{commit}}"):
        return f"unknown: there is no commit {shown(commit)} here"
    return ""


def _changed(commit: str, folder: str, root: Path) -> list[str]:
    """Names of the files of the method that are no longer the same text."""
    words = ["git", "diff", "--name-only", commit, "--", *method_of(folder), *NOT_CODE]
    done = subprocess.run(words, cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@cache
def _is_other_code(commit: str, name: str, root: Path) -> bool:
    """True unless all statements of the file at that commit are still there, and only definitions
    came in addition.
    """
    words = ["git", "show", f"{commit}:{name}"]
    before = subprocess.run(words, cwd=root, capture_output=True, text=True, check=False)
    path = root / name
    if before.returncode or not path.exists() or path.suffix != ".py":
        return True
    old, new = _statements(before.stdout), _statements(path.read_text())
    added = [kind for statement, kind in new.items() if statement not in old]
    return not old.keys() <= new.keys() or not all(added)


def _statements(source: str) -> dict[str, bool]:
    """The statements of a module without its imports and docstrings; true: it is a definition."""
    tree = ast.parse(source)
    of_product = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in _PRODUCT
        for alias in node.names
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in of_product:
            node.id = "of the product"
        if isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            has_docstring = ast.get_docstring(node, clean=False) is not None
            node.body = node.body[has_docstring:]
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {
        ast.dump(node): isinstance(node, kinds)
        for node in tree.body
        if not isinstance(node, ast.Import | ast.ImportFrom)
    }


def _differs(commit: str, paths: Sequence[str], root: Path) -> bool:
    return bool(_git(root, "diff", "--quiet", commit, "--", *paths, *NOT_CODE))


def _git(root: Path, *arguments: str) -> int:
    """The exit status; the same as of a command that is not found where git is not installed."""
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, check=False)
    except FileNotFoundError:
        return 127
    return done.returncode


def _file_of(module: str) -> str | None:
    """The file of a module, or of the one that has this name in it."""
    parts = module.split(".")
    for count in range(len(parts), 1, -1):
        path = "/".join(parts[:count])
        if (ROOT / f"{path}.py").is_file():
            return f"{path}.py"
    return None


@cache
def _modules_in(path: Path) -> tuple[str, ...]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import(names=aliases):
                names.update(alias.name for alias in aliases)
            case ast.ImportFrom(module=str(module), names=aliases):
                names.update(f"{module}.{alias.name}" for alias in aliases)
            case _:
                pass
    return tuple(sorted(name for name in names if name.split(".")[0] in _HARNESS))
