"""Ends of a cluster's start, with a reason or by a signal, and ends of a running cluster by
signals.
"""

import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cluster.launches import END_S, Launch, ask, token_ids, until

pytestmark = [pytest.mark.process, pytest.mark.network, pytest.mark.xdist_group("clusters")]

TOKENS = 2000  # Seconds of an undisturbed stream.
TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"  # The time in UTC as ISO 8601 has it.


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launch]]:
    launches: list[Launch] = []

    def start(*arguments: str, forked: bool = False) -> Launch:
        launches.append(Launch(tmp_path, "--nodes", "1", *arguments, forked=forked))
        return launches[-1]

    yield start
    for one in launches:
        one.process.kill()
        one.process.wait()


def test_a_model_that_cannot_be_loaded_ends_the_start_with_the_reason(
    tmp_path: Path, launch: Callable[..., Launch]
) -> None:
    """A restart would end in the same way, so there is none, and only the reason is printed."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "gpt2"}')

    failing = launch("--model", str(model), forked=True)

    assert failing.process.wait(END_S) == 2
    assert re.search(
        rf"^{TIME} instance [pd]0: {model}/config\.json: model_type: got 'gpt2'; allowed: ",
        failing.output,
        re.MULTILINE,
    ), failing.output
    assert "Traceback" not in failing.output
    failing.assert_nothing_left()


@pytest.mark.parametrize(
    ("stage", "number"),
    [
        ("generating a tiny random model", signal.SIGINT),
        ("instances", signal.SIGINT),
        ("instances", signal.SIGTERM),
    ],
)
def test_a_signal_ends_a_start_that_is_under_way(
    launch: Callable[..., Launch], tiny_llama: str, stage: str, number: signal.Signals
) -> None:
    """Ctrl-C during the start does not wait for the cluster to be up."""
    started = launch(*(["--model", tiny_llama] if stage == "instances" else []))
    started.wait_for_output(stage)

    started.signal_group(number)

    assert started.process.wait(END_S) != 0
    assert "is up" not in started.output
    assert "Traceback" not in started.output
    started.assert_nothing_left()


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.nightly)]
)
def test_a_running_cluster_ends_clean_by_signal(
    launch: Callable[..., Launch], tiny_llama: str, number: signal.Signals
) -> None:
    """A second signal hastens the end at most, and every line in the log has its time."""
    # A forked one has what SIGHUP does from the tests, which may run below `nohup`.
    started = launch("--model", tiny_llama, forked=number is not signal.SIGHUP)
    started.wait_for_output("kvrs is up")

    started.signal_group(number)
    started.wait_for_output("ending")
    started.signal_group(number)

    assert started.process.wait(END_S) == 0
    assert started.output.endswith("ending\n"), started.output
    timed = [re.match(f"{TIME} ", line) for line in started.output.splitlines()]
    assert all(timed), started.output
    started.assert_nothing_left()


@pytest.mark.parametrize("signals", [1, 2], ids=["one", "two"])
def test_the_first_signal_drains_and_the_second_cuts(
    launch: Callable[..., Launch], tiny_llama: str, signals: int
) -> None:
    """An open stream has every token after one signal, and ends at once after two."""
    started = launch("--model", tiny_llama, forked=True)
    started.wait_for_output("kvrs is up")
    url, admin = started.urls

    with ThreadPoolExecutor() as pool:
        asked = pool.submit(token_ids, url, [5, 6, 7], TOKENS)
        until(lambda: ask("GET", f"{admin}/kvrs/v1/state")["streams"])
        for _ in range(signals):
            started.signal_group(signal.SIGTERM)
            started.wait_for_output("draining: streams that still run (1) have 600 s")
        error = asked.exception()

    assert (error is None) == (signals == 1), error
    assert error is not None or len(asked.result()) == TOKENS
    assert started.process.wait(END_S) == 0
    started.assert_nothing_left()
