"""The containers of deploy/compose come up, and a stream outlives the container of its server.

The images are built beforehand (`docker compose build` in that folder), since tests reach for no
registry. Prometheus is left out where its image is not there.
"""

import json
import os
import secrets
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from experiments.demo_vllm.run import stream
from kvrs_engine.engine.random_model import write_tiny_model
from tests.packaging.charts import CHART
from tests.packaging.test_end_to_end_examples import compose_program

pytestmark = [pytest.mark.package, pytest.mark.process, pytest.mark.network]

COMPOSE = CHART.parent / "compose"
URL = "http://127.0.0.1:8000"
MODEL = "/models/model"
UP_WITHIN_S = 600.0  # Both servers import torch on the same cores.
# The stream is not over when its container is known, and killed.
TOKENS, KILL_AT = 1200, 20
ASK_FOR_STATE = """
import os, urllib.request
url = "http://127.0.0.1:8001/kvrs/v1/state"
token = {"Authorization": "Bearer " + os.environ["KVRS_ADMIN_TOKEN"]}
print(urllib.request.urlopen(urllib.request.Request(url, headers=token)).read().decode())
"""


def has_image(name: str) -> bool:
    asked = subprocess.run(["docker", "image", "inspect", name], capture_output=True, check=False)
    return asked.returncode == 0


def said(command: list[str], environment: dict[str, str]) -> str:
    """Output of a command that succeeds."""
    ended = subprocess.run(
        command,
        cwd=COMPOSE,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=UP_WITHIN_S,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


class Containers:
    """Those of compose.yaml, in a project of their own."""

    def __init__(self, command: list[str], model: Path) -> None:
        self._command = [*command, "--project-name", "kvrs-tested"]
        self._environment = os.environ | {
            "MODEL": str(model),
            "KVRS_SECRET": secrets.token_hex(32),
            "KVRS_ADMIN_TOKEN": secrets.token_hex(32),
        }

    def run(self, *arguments: str) -> str:
        return said([*self._command, *arguments], self._environment)

    def of_service(self, name: str) -> str:
        """Its id."""
        return self.run("ps", "--quiet", name).strip()

    def state(self, proxy: str) -> dict[str, Any]:
        """By the proxy in that container, whose administrative port is not published."""
        text = said(["docker", "exec", proxy, "python", "-c", ASK_FOR_STATE], {**os.environ})
        found: dict[str, Any] = json.loads(text)
        return found

    def wait_until(self, proxy: str, is_so: Callable[[dict[str, Any]], bool]) -> None:
        until_s = time.monotonic() + UP_WITHIN_S
        while time.monotonic() < until_s:
            try:
                state = self.state(proxy)
            except AssertionError:  # The proxy has no ports yet.
                time.sleep(1.0)
                continue
            if is_so(state):
                return
            time.sleep(1.0)
        pytest.fail(self.run("logs", "--tail", "40"))


@pytest.fixture
def containers(tmp_path: Path) -> Iterator[Containers]:
    command = compose_program()
    if subprocess.run(["docker", "info"], capture_output=True, check=False).returncode:
        pytest.skip("no docker daemon answers")
    services = yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"]
    images = {name: each["image"] for name, each in services.items()}
    chosen = [name for name, image in images.items() if has_image(image)]
    if missing := {image for name, image in images.items() if name not in {*chosen, "prometheus"}}:
        pytest.skip(f"{', '.join(sorted(missing))}: not built by docker compose build")
    model = tmp_path / "model"
    write_tiny_model(model, 1)
    for path in (tmp_path, *tmp_path.parents[:2], model, *model.rglob("*")):
        path.chmod(path.stat().st_mode | 0o055)  # A container's user is another one.
    up = Containers(command, model)
    try:
        up.run("up", "--detach", "--no-build", *chosen)
        yield up
    finally:
        up.run("down", "--volumes", "--timeout", "5")


def is_tested(state: dict[str, Any]) -> bool:
    return all(
        row["health"] == "up" and (row["self_test"] or {}).get("done") for row in state["instances"]
    )


def test_a_stream_outlives_the_container_of_its_server(containers: Containers) -> None:
    proxy = containers.of_service("proxy")
    servers = {name: containers.of_service(name) for name in ("vllm-0", "vllm-1")}
    containers.wait_until(proxy, is_tested)
    clean = stream(URL, MODEL, "undisturbed", tokens=TOKENS)
    killed: list[str] = []

    def strike() -> None:
        (row,) = containers.state(proxy)["streams"]
        killed.append(row["decode"])
        said(["docker", "kill", servers[row["decode"]]], {**os.environ})

    found = stream(URL, MODEL, "killed", tokens=TOKENS, at=KILL_AT, strike=strike)

    assert found.is_whole
    assert (found.finishes, found.tokens) == (1, TOKENS)
    assert found.text == clean.text
    (recovery,) = containers.state(proxy)["recoveries"]
    assert [recovery["from"]] == killed
    told = containers.run("exec", "-T", "proxy", "kvrs", "incidents", "/tmp/events.jsonl")
    assert killed[0] in told
