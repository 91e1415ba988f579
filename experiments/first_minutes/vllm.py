"""From nothing to a stream that outlives its server, where vLLM runs, by the commands of the README
alone: `git clone`, `pip install ./kvrs` into an empty environment, with what pip has in its cache,
and `kvrs proxy --prefill URL --decode URL --decode URL`, without a file.

    KVRS_VLLM_PYTHON=.venv-vllm/bin/python python -m experiments.first_minutes.vllm
    python -m experiments.first_minutes.vllm --scripted     # Servers with vLLM's interfaces alone.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

from experiments.command_line import parser_of
from experiments.demo_vllm.run import KILL_AT, stream, until_tested
from experiments.first_minutes.demo import Phases
from experiments.record import MARK_ENV, ROOT, Record
from kvrs.net.admin import AdminClient
from kvrs_testkit.free_ports import free_ports
from kvrs_testkit.vllm_servers import PYTHON_ENV, VllmServers, vllm_config

BAR_S = 60.0  # Behind the installation.
_PACE_S = 0.005
_SET_UP = ("clone", "installation")


class Servers(Protocol):
    """A prefill server, p0, and two decode servers."""

    @property
    def names(self) -> list[str]: ...

    @property
    def model(self) -> str: ...

    def url(self, name: str) -> str: ...

    def kill(self, name: str) -> object: ...


class ScriptedServers:
    """Processes with vLLM's interfaces, which compute nothing."""

    model = "tiny"

    def __init__(self, stack: ExitStack) -> None:
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._urls: dict[str, str] = {}
        self.names = ["p0", "d0", "d1"]
        for name in self.names:
            role = "prefill" if name == "p0" else "decode"
            process = subprocess.Popen(
                [sys.executable, "-m", "kvrs_testkit.vllm_process", name, "n0", role, str(_PACE_S)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.callback(process.communicate)
            stack.callback(process.kill)
            assert process.stdout is not None
            self._processes[name] = process
            self._urls[name] = f"http://127.0.0.1:{int(process.stdout.readline())}"

    def url(self, name: str) -> str:
        return self._urls[name]

    def kill(self, name: str) -> None:
        self._processes[name].kill()


@contextmanager
def servers_of(*, is_scripted: bool) -> Iterator[Servers]:
    """Three servers that run."""
    with ExitStack() as stack:
        if is_scripted:
            yield ScriptedServers(stack)
            return
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = stack.enter_context(VllmServers(vllm_config(folder), os.environ[PYTHON_ENV]))
        print("starting three servers of vLLM (a minute or two) ...", flush=True)
        servers.start_all()
        yield servers


def proxy_command(servers: Servers) -> list[str]:
    """The command of the README, with the addresses of the servers."""
    options = [
        part
        for name in servers.names
        for part in ("--prefill" if name.startswith("p") else "--decode", servers.url(name))
    ]
    return ["proxy", *options]


def measure(servers: Servers, folder: Path) -> tuple[Phases, bool]:
    """Times of the phases, and whether the stream ended once and whole behind a kill."""
    # Without settings and secrets, but with the mark by which a record knows its own processes.
    dropped = {name for name in os.environ if name.startswith("KVRS_")} - {MARK_ENV}
    dropped.add("PYTHONPATH")
    environ = {name: value for name, value in os.environ.items() if name not in dropped}
    # The versions with which the tests have run.
    environ["PIP_CONSTRAINT"] = str(ROOT / "constraints.txt")
    phases, killed = Phases(), list[str]()
    bin_ = folder / "venv/bin"
    with phases.phase("clone"):
        _run(["git", "clone", "-q", str(ROOT), "kvrs"], folder, environ)
    with phases.phase("installation"):
        _run([sys.executable, "-m", "venv", "venv"], folder, environ)
        _run([str(bin_ / "pip"), "install", "--quiet", "./kvrs"], folder, environ)
    port, admin_port = free_ports(2)
    url, admin = f"http://127.0.0.1:{port}", AdminClient(f"http://127.0.0.1:{admin_port}")
    ports = ["--port", str(port), "--admin-port", str(admin_port)]

    def strike() -> None:
        (row,) = admin.state()["streams"]
        killed.append(row["decode"])
        servers.kill(row["decode"])

    command = [str(bin_ / "kvrs"), *proxy_command(servers), *ports]
    proxy = subprocess.Popen(command, cwd=folder, env=environ, stderr=subprocess.DEVNULL)
    try:
        with phases.phase("the proxy, until its servers are tested"):
            until_tested(admin, len(servers.names))
        with phases.phase("a stream whose server is killed"):
            found = stream(url, servers.model, "first", at=KILL_AT, strike=strike)
    finally:
        proxy.terminate()
        proxy.wait()
    return phases, bool(killed) and found.is_whole and found.finishes == 1


def _run(command: Sequence[str], folder: Path, environ: dict[str, str]) -> None:
    subprocess.run(command, check=True, cwd=folder, env=environ)


def main() -> int:
    parser = parser_of(__doc__, __file__)
    parser.add_argument("--scripted", action="store_true", help="without vLLM")
    options = parser.parse_args()
    record = Record()
    with (
        tempfile.TemporaryDirectory() as directory,
        servers_of(is_scripted=options.scripted) as servers,
    ):
        phases, is_whole = measure(servers, Path(directory))
    after_s = sum(lasted for name, lasted in phases.seconds.items() if name not in _SET_UP)
    text = phases.as_text(BAR_S, after_s)
    if not is_whole:
        text += "\nthe stream did not end once and whole behind a kill"
    print(text)
    figures = {
        "seconds": phases.seconds,
        "whole_s": phases.whole_s,
        "after_installation_s": after_s,
        "is_whole": is_whole,
    }
    name = "scripted" if options.scripted else "vllm"
    is_void = record.keep(options.out, name, figures, text)
    return 0 if is_whole and after_s <= BAR_S and not is_void else 1


if __name__ == "__main__":
    sys.exit(main())
