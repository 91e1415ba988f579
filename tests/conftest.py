"""Ray's environment; markers that are checked; groups for parallel runs; servers of real vLLM."""

import gc
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from kvrs_lab.cluster.loopback_ray import ENVIRONMENT, ray_token
from kvrs_testkit.examples import examples

if TYPE_CHECKING:
    from kvrs_testkit.sglang_servers import SglangServers
    from kvrs_testkit.vllm_servers import VllmServers

# Ray reads these when it is imported, which a test module may do when it is collected; and one
# token serves a whole process.
os.environ.update(
    {name: value for name, value in ENVIRONMENT.items() if name.startswith("RAY_")},
    RAY_AUTH_TOKEN=ray_token(),
)

# An example may take long on a busy machine. In CI the same examples are drawn each time.
settings.register_profile("kvrs", examples(settings().max_examples))
settings.load_profile("kvrs")

# A test that depends on one of these fixtures has the markers; upstream binds a socket as it loads.
MARKERS_OF_FIXTURE = {
    "distserve": ("distserve", "network"),
    "logical_gpus": ("process", "nightly"),
    "sglang_servers": ("sglang", "nightly"),
    "vllm_servers": ("vllm", "nightly"),
}
MARKER_OF_EVENT = {
    "subprocess.Popen": "process",
    "os.fork": "process",
    "os.posix_spawn": "process",
    "socket.bind": "network",
    "socket.connect": "network",
}
# Tests of whole clusters wait more than they compute: each of these groups takes a worker from the
# start, and every other file goes to a worker that is free.
FIRST_GROUPS = ("clusters", "systems", "networks")

TESTS = Path(__file__).resolve().parent
MAX_IN_NAME = 200

_running: pytest.Item | None = None


def pytest_collection(session: pytest.Session) -> None:
    """Modules and items are no garbage: to look for it among them takes a sixth of this."""
    gc.disable()
    config, worker = session.config, getattr(session.config, "workerinput", None)
    asked = [Path(each).resolve() for each in config.args]
    if worker is not None and asked == [TESTS] and not config.option.ignore:
        config.args = collected_by(int(worker["workerid"][2:]), worker["workercount"])


def collected_by(worker: int, workers: int) -> list[str]:
    """All files and folders, from another one on in each worker: on a fresh checkout it compiles
    its share of them, which takes as long as all else, and finds the others compiled.
    """
    files = sorted(TESTS.rglob("test_*.py"))
    entries = [TESTS / file.relative_to(TESTS).parts[0] for file in files]
    first = len(entries) * worker // workers
    return [*map(str, dict.fromkeys(entries[first:] + entries[:first]))]


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """No test is called by megabytes, which each report of it would have several times."""
    if isinstance(val, str | bytes) and len(val) > MAX_IN_NAME:
        return f"{argname} of {len(val)}"
    return None


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups in a hook of the same name.
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of a file share its fixtures and run in one worker."""
    for item in items:
        for fixture in getattr(item, "fixturenames", ()):
            for marker in MARKERS_OF_FIXTURE.get(fixture, ()):
                item.add_marker(marker)
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
    items.sort(key=lambda item: (_rank_of_group(item), item.path))  # The same in each worker.


def pytest_collection_finish() -> None:
    """Items and modules live until the end: the garbage collector passes over them from now on,
    which saves 6 % of the CPU time of tests. It collects less often, which saves as much again.
    """
    gc.set_threshold(5_000, 10, 10)
    gc.enable()
    gc.collect()
    gc.freeze()


def _rank_of_group(item: pytest.Item) -> int:
    marker = item.get_closest_marker("xdist_group")
    name = marker.args[0] if marker else ""
    return FIRST_GROUPS.index(name) if name in FIRST_GROUPS else len(FIRST_GROUPS)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    global _running
    _running = item
    try:
        return (yield)
    finally:
        _running = None
        _forget_applications()


def _forget_applications() -> None:
    """aiohttp keeps the last 1024 handlers that have answered, and with them what they belong to:
    the weights and pages of each instance that a test has served in this process, 70 MB each.
    """
    if (web_app := sys.modules.get("aiohttp.web_app")) is not None:
        web_app._cached_build_middleware.cache_clear()


def _check_markers(event: str, arguments: tuple[Any, ...]) -> None:
    """Fail the running test when it does what it has no marker for."""
    if _running is None or (marker := MARKER_OF_EVENT.get(event)) is None:
        return
    if marker == "network" and arguments[0].family not in (socket.AF_INET, socket.AF_INET6):
        return
    if not any(_running.iter_markers(marker)):
        pytest.fail(f"{event} in a test without the marker {marker!r}")


sys.addaudithook(_check_markers)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of the model that `kvrs lab up` generates where none is given, which takes a
    process with torch each time. Its prefill is noted, which each instance would measure.
    """
    from kvrs_engine.engine.random_model import write_tiny_model
    from kvrs_testkit.noted_prefill import note_prefill

    directory: Path = tmp_path_factory.mktemp("models") / "tiny-llama"
    write_tiny_model(directory, seed=0)
    note_prefill(directory)
    return str(directory)


@pytest.fixture
def tiny_beside(tmp_path: Path, tiny_llama: str) -> None:
    """The same model as `tiny` in the directory of the test."""
    (tmp_path / "tiny").symlink_to(tiny_llama)


@pytest.fixture(scope="session")
def vllm_servers(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[VllmServers]":
    """One prefill (p0) and two decode servers (d0, d1), up and warm. A test that ends one
    brings it back.
    """
    python = os.environ.get("KVRS_VLLM_PYTHON")
    if not python:
        pytest.skip(
            "KVRS_VLLM_PYTHON does not name the interpreter of an environment with vLLM; "
            "`make test-vllm` makes one"
        )
    # Imported late: it loads torch, which skipped tests do not need.
    from kvrs_testkit.vllm_servers import VllmServers, vllm_config

    flags = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    with VllmServers(vllm_config(tmp_path_factory.mktemp("vllm")), python, *flags) as servers:
        servers.start(*servers.names)
        servers.wait_ready(*servers.names)
        yield servers


@pytest.fixture(scope="session")
def sglang_servers(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[SglangServers]":
    """One prefill (p0) and two decode servers (d0, d1), up. A test that ends one brings it back."""
    python = os.environ.get("KVRS_SGLANG_PYTHON")
    if not python:
        pytest.skip(
            "KVRS_SGLANG_PYTHON does not name the interpreter of an environment with SGLang; "
            "`make test-sglang` makes one"
        )
    from kvrs_testkit.sglang_servers import START_TIMEOUT_S, SglangServers, sglang_config

    nodes = {"n0": ("p0", "d0"), "n1": ("d1",)}
    # The only prefill may die.
    policy = {"recovery": dict.fromkeys(("wait_s", "role_wait_s"), START_TIMEOUT_S)}
    config = sglang_config(tmp_path_factory.mktemp("sglang"), nodes, policy=policy)
    with SglangServers(config, python) as servers:
        servers.start(*servers.names)
        servers.wait_ready(*servers.names)
        yield servers
