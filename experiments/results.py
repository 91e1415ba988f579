"""Kept results: dated measurements that never expire.

A result says at which commit, when, on which machine, under which load and with which seeds it was
measured. The program that measured it is the one that its command names at that commit, whatever
became of it since. What has moved since then is for the sentinels to tell (experiments/sentinels).
"""

import json
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from experiments.record import ROOT, commit_of, same_code, shown

KEPT = "kept"
NO_RESULT = "no result"


def run_of(result: Path) -> dict[str, Any]:
    """The circumstances of a kept result; empty for one without."""
    run: dict[str, Any] = json.loads(result.read_text()).get("run", {})
    return run


def state(result: Path, root: Path = ROOT) -> str:
    """`kept`, or why its figures do not show what they are to show, or are not known to."""
    if not result.exists():
        return NO_RESULT
    run = run_of(result)
    if "void" in run:
        return f"void: {run['void']}"
    commit = run.get("commit", "unknown")
    if commit == "unknown":
        return "unknown: it names no commit"
    if commit.endswith("-dirty"):
        return f"unknown: {shown(commit)} had changes that no commit has"
    return KEPT if _is_there(commit, root) else f"unknown: there is no commit {shown(commit)} here"


def is_of_this_code(result: Path, root: Path = ROOT) -> bool:
    """True if a run may go on from it, as one measurement: the tree is the same."""
    if state(result, root) != KEPT:
        return False
    return same_code(run_of(result)["commit"], commit_of(root), root)


def is_whole(result: Path) -> bool:
    """True if no part of the result is left to another run."""
    return not json.loads(result.read_text()).get("waiting")


def age(run: dict[str, Any], now: datetime | None = None) -> str:
    """Time since the run began, in days."""
    try:
        at = datetime.fromisoformat(run["at"])
    except (KeyError, ValueError):
        return "unknown"
    days = ((now or datetime.now(UTC)) - at).days
    return f"{days} day" if days == 1 else f"{days} days"


def _is_there(commit: str, root: Path) -> bool:
    words = ["git", "cat-file", "-e", f"{commit}^{{commit}}"]
    try:
        return not subprocess.run(words, cwd=root, capture_output=True, check=False).returncode
    except FileNotFoundError:  # A machine without git.
        return False
