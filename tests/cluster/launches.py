"""`kvrs lab up` as a process of its own, for tests of how clusters start, run and end."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

from kvrs_lab.cluster.guard import members
from kvrs_testkit.forked import starts_forked

END_S = 180.0  # Only ends what hangs: on a starved machine a cluster takes minutes.

Found = TypeVar("Found")


def pause_s(began_s: float) -> float:
    """The pause before the next look, in a wait that began then: each look at a state costs its
    cluster CPU time, so a long wait has few.
    """
    return min(0.1, max(0.02, (time.monotonic() - began_s) / 20))


def until(holds: Callable[[], Found | None], within_s: float = END_S) -> Found:
    """The first result of `holds` that counts as true."""
    began_s = time.monotonic()
    while not (found := holds()):
        assert time.monotonic() < began_s + within_s
        time.sleep(pause_s(began_s))
    return found


def token_ids(url: str, prompt: list[int], tokens: int, seed: int | None = None) -> list[int]:
    """Return the token ids of a completion; without a seed it is greedy."""
    body = {"model": "tiny-llama", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
    body |= {"return_token_ids": True, "temperature": 0.0 if seed is None else 0.9}
    body |= {} if seed is None else {"seed": seed}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=END_S) as answer:
        found: list[int] = json.load(answer)["choices"][0]["token_ids"]
    return found


def is_running(pid: int) -> bool:
    """A zombie is not: an orphan that ended stays one until init looks at it, which not every
    container's does.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ask(method: str, url: str, body: Any = None) -> Any:
    """The answer of an admin port."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, data, headers, method=method)
    with urllib.request.urlopen(request, timeout=2 * END_S) as answer:
        return json.load(answer)


def _heed_hangups() -> None:
    """SIGHUP ends a launch as it does by default, also where the tests run below `nohup`."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


class Launch:
    """`kvrs lab up` in a process group of its own, as a terminal would start it."""

    def __init__(
        self,
        tmp_path: Path,
        *arguments: str,
        before: Sequence[str] = (),
        forked: bool = False,
    ) -> None:
        """`before`: a command that runs it, such as nohup. `forked`: rather than run by its
        command line, and so is what it starts.
        """
        self.directory = tmp_path
        self._log = tmp_path / "up.log"
        command = [
            *before,
            sys.executable,
            "-m",
            "kvrs",
            "lab",
            "up",
            "--port",
            "0",
            "--admin-port",
            "0",
            *arguments,
        ]
        start = starts_forked(with_children=True) if forked else nullcontext()
        with self._log.open("wb") as log, start:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                process_group=0,
                preexec_fn=None if forked else _heed_hangups,
            )

    @property
    def output(self) -> str:
        return self._log.read_text()

    @property
    def run_directory(self) -> Path:
        (path,) = re.findall(r"logs are in (\S+)", self.output)
        return Path(path)

    @property
    def urls(self) -> tuple[str, str]:
        """Addresses of the first proxy: for clients, and for the operator."""
        return self.all_urls[0]

    @property
    def all_urls(self) -> list[tuple[str, str]]:
        """The same for every proxy."""
        found = re.findall(
            r"(?:kvrs is up:|or at) (\S+)/v1 \(OpenAI API\), (\S+)/kvrs/v1/state", self.output
        )
        assert found, self.output
        return [(client, admin) for client, admin in found]

    def wait_for_output(self, words: str, within_s: float = END_S) -> None:
        deadline_s = time.monotonic() + within_s
        while words not in self.output:
            assert self.process.poll() is None, self.output
            if time.monotonic() > deadline_s:
                self.process.kill()  # A test that fails leaves nothing running either.
                raise AssertionError(self.output)
            time.sleep(0.02)

    def signal_group(self, number: int) -> None:
        """Signal all processes of the group, as a terminal does."""
        os.killpg(self.process.pid, number)

    def assert_nothing_left(self) -> None:
        assert not self.run_directory.exists()
        assert not list(members(self.run_directory))
