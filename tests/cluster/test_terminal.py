"""`kvrs lab up` as an operator meets it at a terminal: its file, its signals and what it prints."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrs.cli.findings import ProxyAnswer, cluster_findings
from kvrs.config.file import load_config
from tests.cluster.launches import END_S, Launch, ask

pytestmark = [
    pytest.mark.process,
    pytest.mark.network,
    pytest.mark.xdist_group("clusters"),
    pytest.mark.nightly,
]


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory, tiny_llama: str) -> Iterator[Launch]:
    """A cluster started from a file, under nohup."""
    folder = tmp_path_factory.mktemp("up")
    instances = [{"id": name, "role": role} for name, role in (("p0", "prefill"), ("d0", "decode"))]
    nodes = [{"id": "n0", "instances": instances}]
    document = {"cluster": {"model": tiny_llama, "nodes": nodes}}
    (folder / "c.yaml").write_text(json.dumps(document))
    # nohup itself would write to a file where this runs at a terminal.
    ignoring = ("sh", "-c", 'trap "" HUP; exec "$@"', "-")
    launch = Launch(folder, "--config", str(folder / "c.yaml"), before=ignoring)
    try:
        launch.wait_for_output("kvrs is up")
        yield launch
        launch.process.send_signal(signal.SIGTERM)
        launch.process.wait(END_S)
    finally:
        launch.process.kill()
        launch.process.wait()


def file_of(up: Launch) -> Path:
    return up.directory / "c.yaml"


def test_a_reload_below_up_says_which_file_counts(up: Launch) -> None:
    """The proxy has a copy of its own, which nobody edits: `applied: []` alone would mislead."""
    _, admin = up.urls

    answer = ask("POST", f"{admin}/kvrs/v1/reload")

    assert answer["file"] == str(up.run_directory / "proxy-0.yaml")
    assert answer["note"] == (
        f"this proxy was started by kvrs lab up, which read {file_of(up)} at its start"
    )


def test_the_file_of_up_is_that_of_its_proxy_for_doctor(up: Launch) -> None:
    """Ports and the like that `kvrs lab up` chose are no difference; another value is one."""
    _, admin = up.urls
    state = ask("GET", f"{admin}/kvrs/v1/state")

    def levels(path: Path) -> str:
        found = cluster_findings(load_config(path, os.environ), ProxyAnswer(admin, state))
        return next(each.level.value for each in found if each.check == "configuration in use")

    other = up.directory / "other.yaml"
    document = json.loads(file_of(up).read_text())
    other.write_text(json.dumps(document | {"policy": {"name": "always_recompute"}}))
    assert levels(file_of(up)) == "ok"
    assert levels(other) == "warning"


def test_the_death_of_an_instance_is_printed(up: Launch) -> None:
    """Deaths of instances are printed like those of proxies."""
    _, admin = up.urls
    rows = ask("GET", f"{admin}/kvrs/v1/state")["instances"]

    os.kill(next(row["pid"] for row in rows if row["id"] == "d0"), signal.SIGKILL)

    up.wait_for_output("instance d0 ended and is started again")
    up.wait_for_output("instance d0 is up again after ")


def test_a_closing_terminal_does_not_end_what_nohup_started(up: Launch) -> None:
    """SIGHUP stays ignored where it was when the process began."""
    _, admin = up.urls
    rows = ask("GET", f"{admin}/kvrs/v1/state")["instances"]
    up.process.send_signal(signal.SIGHUP)

    os.kill(next(row["pid"] for row in rows if row["id"] == "p0"), signal.SIGKILL)

    up.wait_for_output("instance p0 ended and is started again")

    assert "ending" not in up.output
    assert up.process.poll() is None
