"""Whether a kept result is still that of the code: files on which an experiment depends, and what
has happened to them since the commit of the result.
"""

import ast
import json
import re
import subprocess
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from experiments.record import NOT_CODE, ROOT, shown

# A cluster consists of processes that import all of it.
_WHOLE = {"kvrs.cluster": "kvrs", "distserve_patches": "distserve_patches"}
# Servers that a cluster starts by their configuration alone.
_STARTED = dict.fromkeys(
    ("distserve_kill_series", "load_skew", "crossover", "hand_off_crossover"),
    ("distserve_patches",),
)
_FOLLOWED = ("kvrs", "experiments", "tests", "distserve_patches")
# How a result is kept, or when it is measured again, does not change it.
_KEEPING = {"experiments/record.py", "experiments/staleness.py"}
# Every engine loads this package; what is not named here only runs in instances of several ranks
# (tests/engine/test_one_rank.py). Settings that ask for these are named so.
_RANKS = "kvrs/engine/ranks"
WITHOUT_RANKS = {"__init__.py", "cells.py", "settings.py"}
_RANK_SETTINGS = {"tp", "pp"}


def state(result: Path, folder: str, root: Path = ROOT) -> str:
    """`current`, or why the result is to be measured again."""
    if not result.exists():
        return "no result"
    run = run_of(result)
    if "void" in run:
        return f"void: {run['void']}"
    commit = run.get("commit", "unknown")
    if commit == "unknown":
        return "stale: of an unknown commit"
    if commit.endswith("-dirty"):
        return f"stale: {shown(commit)} had changes that no commit has"
    if _git(root, "merge-base", "--is-ancestor", commit, "HEAD").returncode:
        return f"stale: commit {shown(commit)} is not in this history"
    paths = ["--", *sorted(paths_of(folder)), *NOT_CODE]
    if not has_ranks(folder):
        ranks = sorted(path.name for path in (ROOT / _RANKS).glob("*.py"))
        paths += [f":!{_RANKS}/{name}" for name in ranks if name not in WITHOUT_RANKS]
    if not _git(root, "diff", "--quiet", commit, *paths).returncode:
        return "current"
    count = _git(root, "rev-list", "--count", f"{commit}..HEAD", *paths).stdout.strip()
    return f"stale: {count} commits since" if count != "0" else "stale: changes without a commit"


def run_of(result: Path) -> dict[str, Any]:
    """The circumstances of a kept result; empty for one of an older form."""
    run: dict[str, Any] = json.loads(result.read_text()).get("run", {})
    return run


@cache
def paths_of(folder: str) -> frozenset[str]:
    """Files and packages on which the scripts of `experiments/FOLDER` depend: the folder itself,
    modules of experiments and tests that it imports, and packages of kvrs with all below them.
    """
    found = {f"experiments/{folder}", *_STARTED.get(folder, ())}
    waiting = list(_modules_in(ROOT / "experiments" / folder, names_processes=True))
    while waiting:
        path = _path_of(waiting.pop())
        if path is None or path in found or path in _KEEPING:
            continue
        found.add(path)
        of_kvrs = path.startswith("kvrs")
        waiting += _modules_in(ROOT / path, names_processes=not of_kvrs)
    if "kvrs" in found:
        found = {path for path in found if not path.startswith("kvrs/")}
    return frozenset(found)


@cache
def has_ranks(folder: str) -> bool:
    """Whether the scripts of `experiments/FOLDER` may have instances of several ranks: a module on
    which they depend, but for those of kvrs, names such a setting or imports code of ranks.
    """
    own = (ROOT / path for path in paths_of(folder) if not path.startswith("kvrs"))
    return any(
        _names_ranks(node)
        for path in own
        for file in (path.rglob("*.py") if path.is_dir() else [path])
        for node in ast.walk(ast.parse(file.read_text()))
    )


def _names_ranks(node: ast.AST) -> bool:
    match node:
        case ast.Import(names=names):
            return any(alias.name.startswith("kvrs.engine.ranks") for alias in names)
        case ast.ImportFrom(module=str(module)):
            return module.startswith("kvrs.engine.ranks")
        case ast.keyword(arg=str(word)):
            return word in _RANK_SETTINGS
        case ast.Constant(value=str(text)):  # A key, or YAML.
            return not _RANK_SETTINGS.isdisjoint(re.findall(r"\w+", text))
        case _:
            return False


def _path_of(module: str) -> str | None:
    """The package below kvrs, or the file elsewhere, that a module belongs to."""
    whole = next((path for name, path in _WHOLE.items() if module.startswith(name)), None)
    if whole or module == "kvrs":
        return whole or "kvrs"
    parts = module.split(".")
    parts = parts[:2] if parts[0] == "kvrs" else parts
    for count in range(len(parts), 1, -1):
        path = "/".join(parts[:count])
        if (ROOT / f"{path}.py").is_file():
            return f"{path}.py"
        if parts[0] == "kvrs" and (ROOT / path).is_dir():
            return path
    return None


@cache
def _modules_in(path: Path, *, names_processes: bool) -> tuple[str, ...]:
    """Modules of ours that a file, or all below a folder, import; and those that are named for
    processes that are started, as `python -m` has them.
    """
    names: set[str] = set()
    for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
        for node in ast.walk(ast.parse(file.read_text())):
            names.update(_named(node, names_processes=names_processes))
    return tuple(sorted(name for name in names if name.split(".")[0] in _FOLLOWED))


def _named(node: ast.AST, *, names_processes: bool) -> Iterator[str]:
    match node:
        case ast.Import(names=names):
            yield from (alias.name for alias in names)
        case ast.ImportFrom(module=str(module), names=names):
            if module != "kvrs":  # Its version.
                yield module
            yield from (f"{module}.{alias.name}" for alias in names)
        case ast.Constant(value=str(text)) if names_processes and re.fullmatch(
            r"kvrs(\.[a-z_]+)*", text
        ):
            yield text
        case _:
            pass


def _git(root: Path, *arguments: Any) -> subprocess.CompletedProcess[str]:
    words: Sequence[str] = ["git", *map(str, arguments)]
    return subprocess.run(words, cwd=root, capture_output=True, text=True, check=False)
