"""Findings of `kvrs doctor`, one line per check."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check. `allowed` and `remedy` are empty if nothing needs to be done."""

    check: str
    level: Level
    value: str
    allowed: str = ""
    remedy: str = ""


def good(check: str, value: str) -> Finding:
    return Finding(check, Level.OK, value)


def doubtful(check: str, value: str, allowed: str, remedy: str) -> Finding:
    return Finding(check, Level.WARNING, value, allowed, remedy)


def bad(check: str, value: str, allowed: str, remedy: str) -> Finding:
    return Finding(check, Level.FAILURE, value, allowed, remedy)


def of_fault(fault: str, remedy: str, check: str = "configuration") -> Finding:
    """Make a finding of a fault of the configuration: path, value and allowed values."""
    value, _, allowed = fault.partition("; allowed: ")
    return bad(check, value, allowed, remedy)


def has_failed(findings: Iterable[Finding]) -> bool:
    return any(each.level is Level.FAILURE for each in findings)
