"""The distribution has a small base, extras by name and a public API."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from typer.testing import CliRunner

import kvrs
from kvrs import api
from kvrs.cli import app
from kvrs.errors import EXTRAS, MissingExtraError, check_extras
from kvrs_lab import api as lab_api
from kvrs_lab.load import command
from tests.packaging.hashes import locked

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OPTIONAL = {*sum(EXTRAS.values(), ())}
# Distributions whose modules have other names.
MODULES = {
    "kubernetes-asyncio": "kubernetes_asyncio",
    "opentelemetry-api": "opentelemetry.trace",
    "opentelemetry-exporter-otlp-proto-http": "opentelemetry.exporter.otlp.proto.http",
    "opentelemetry-sdk": "opentelemetry.sdk",
}
PROXY_WITHOUT_TRACES = """
import asyncio, sys
sys.modules["opentelemetry"] = None  # An import of it fails, as where it is not installed.
from kvrs.config.file import parse_config
from kvrs.proxy.server import Proxy

async def main():
    instances = [{"id": "e0", "role": "both", "port": 1, "page_port": 2}]
    nodes = [{"id": "n0", "instances": instances}]
    ports = {"port": 0, "admin_port": 0}
    proxy = Proxy(parse_config({"proxy": ports, "cluster": {"nodes": nodes}}), bytes(32))
    await proxy.start()
    await proxy.close()

asyncio.run(main())
print([name for name in sys.modules if name.startswith("opentelemetry.")])
"""


@pytest.fixture
def base_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """No package of any extra can be found."""
    monkeypatch.setattr("kvrs.errors.find_spec", lambda module: None)


def requirements_of(extra: str) -> set[str]:
    """The modules that an extra installs, with those of the extras that it includes."""
    found = set()
    for requirement in PROJECT["optional-dependencies"][extra]:
        if included := re.fullmatch(r"kvrs\[(.*)\]", requirement):
            found |= set().union(*map(requirements_of, included[1].split(",")))
        else:
            name = re.split(r"[<>=]", requirement)[0]
            found.add(MODULES.get(name, name))
    return found


def test_extras_are_those_of_the_distribution() -> None:
    """A missing package is named with an extra that installs it."""
    for extra, modules in EXTRAS.items():
        assert requirements_of(extra) == set(modules), extra


def test_the_base_needs_nothing_of_the_extras() -> None:
    """`pip install kvrs` is a proxy, an agent and a replay client."""
    base = {re.split(r"[<>=]", requirement)[0] for requirement in PROJECT["dependencies"]}

    assert not base & OPTIONAL


def test_an_install_beside_vllm_changes_none_of_its_packages() -> None:
    """Versions of the environment of `make test-vllm` meet the ranges of `kvrs[vllm]`."""
    lines = (ROOT / "tests" / "vllm" / "requirements.txt").read_text().splitlines()
    there = dict(
        line.lower().replace("_", "-").split("==") for line in lines if line and line[0] not in "#-"
    )
    wanted = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["vllm"]]

    requirements = {each.name.lower(): each.specifier for each in map(Requirement, wanted)}

    assert {name for name in requirements if name not in there} == {"nvidia-ml-py"}
    for name in requirements.keys() & there.keys():
        assert there[name] in requirements[name], name


@pytest.mark.process
def test_everything_but_the_engine_and_the_cluster_is_imported_without_the_extras() -> None:
    """A proxy starts in a fraction of a second, and a simulator needs no tensors."""
    modules = (
        "kvrs.agent.__main__, kvrs.api, kvrs.cli, kvrs.proxy.server, kvrs_engine.cli, "
        "kvrs_lab.api, kvrs_lab.cli, kvrs_lab.cluster.fault_injection, "
        "kvrs_lab.explain.questions, kvrs_lab.load.command, kvrs_lab.report.compare, "
        "kvrs_lab.sim.command"
    )
    script = f"import sys, {modules}; print(sorted(sys.modules.keys() & {OPTIONAL}))"

    assert subprocess.check_output([sys.executable, "-c", script]) == b"[]\n"


@pytest.mark.process
def test_a_proxy_does_not_import_what_pages_and_rows_are_sealed_with() -> None:
    """A library of 9 MB, which agents and engines use."""
    script = "import sys, kvrs.cli, kvrs.proxy.server; print('cryptography' in sys.modules)"

    assert subprocess.check_output([sys.executable, "-c", script]) == b"False\n"


@pytest.mark.process
@pytest.mark.network
def test_a_proxy_without_traces_needs_no_extra_of_traces() -> None:
    """No code of spans runs: nothing of OpenTelemetry is imported, at the start either."""
    command = [sys.executable, "-c", PROXY_WITHOUT_TRACES]
    environment = {name: value for name, value in os.environ.items() if "OTEL_" not in name}

    assert subprocess.check_output(command, env=environment) == b"[]\n"


@pytest.mark.usefixtures("base_install")
@pytest.mark.parametrize(
    ("arguments", "extras"),
    [
        (["lab", "demo"], "engine,report"),
        (["lab", "up"], "engine"),
        (["lab", "up", "--backend", "distserve"], "distserve"),
        (["profile", "--out", "p.json"], "engine"),
    ],
)
def test_a_missing_extra_is_named_with_the_command_that_installs_it(
    arguments: list[str], extras: str
) -> None:
    """Before anything is started, and not as an ImportError."""
    error = CliRunner().invoke(app, arguments).exception

    assert isinstance(error, MissingExtraError)
    assert str(error).endswith(f"to install: pip install 'kvrs[{extras}]'")


def test_an_extra_that_is_installed_is_not_complained_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what is absent is named."""
    monkeypatch.setattr("kvrs.errors.find_spec", {"matplotlib": None}.get)
    monkeypatch.setitem(EXTRAS, "engine", ())

    check_extras("engine")
    with pytest.raises(MissingExtraError, match=r"not installed: matplotlib, numpy, scipy; "):
        check_extras("engine", "report")


@pytest.mark.usefixtures("base_install")
def test_a_replay_without_matplotlib_still_writes_its_numbers(tmp_path: Path) -> None:
    """The page is missing, with the command that would have made it possible."""
    report: dict[str, Any] = {"schema_version": 1}

    assert command._write_page(report, tmp_path / "report.html").endswith(
        "report.html: not installed: matplotlib, numpy, scipy; to install: "
        "pip install 'kvrs[report]')"
    )
    assert not (tmp_path / "report.html").exists()


def test_public_names_exist() -> None:
    """`kvrs.api` and `kvrs_lab.api` list what a program may rely on."""
    for module in (api, lab_api):
        assert [name for name in module.__all__ if not hasattr(module, name)] == []
    assert api.__version__ == kvrs.__version__


def test_public_functions_read_what_kvrs_writes(tmp_path: Path) -> None:
    """A policy can be driven, and a configuration, a trace and a table be read, with them alone."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 9, "output_length": 2, "hash_ids": [1]}\n')
    config = api.parse_config({"policy": {"name": "rom"}})
    policy = api.RecoveryPolicy(config.policy, config.slo, config.backup)

    assert policy.handle(api.events.TimerFired(), now_s=0.0) == []
    assert len(lab_api.load_trace(trace).requests) == 1
    assert api.prefill_table("opt-13b-a100-kvrs-seed")
    with pytest.raises(lab_api.ReportError):
        lab_api.read_report(tmp_path)


def test_hashes_are_those_of_the_files_that_pip_would_take() -> None:
    def taken(name: str, **download: Any) -> dict[str, Any]:
        return {"metadata": {"name": name, "version": "1.0"}, "download_info": download}

    sha256 = {"archive_info": {"hashes": {"sha256": "ab"}}}
    files = [taken("b", **sha256), taken("A", **sha256), taken("kvrs", dir_info={})]

    assert locked({"install": files}) == ["A==1.0 --hash=sha256:ab", "b==1.0 --hash=sha256:ab"]
    with pytest.raises(ValueError, match=r"c==1\.0: the report has no SHA-256"):
        locked({"install": [taken("c", archive_info={"hashes": {"md5": "ab"}})]})
