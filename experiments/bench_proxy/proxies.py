"""The proxies that are compared: kvrs of one tree or another, its peers, and none.

Each is a context manager that starts its process on the proxy's core and yields where it listens.
A peer that does not install here raises `MissingError` with the reason.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.bench_proxy.engines import SECRET, BenchError, Engines, pinned
from kvrs.config.file import ENV_NAME
from kvrs.config.proxy import ADMIN_PORT_STEP
from kvrs_testkit.free_ports import free_ports

HERE = Path(__file__).parents[2]
START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 10.0
_NGINX = """
daemon off;
worker_processes 1;
error_log {directory}/nginx-error.log;
pid {directory}/nginx.pid;
events {{ worker_connections 16384; }}
http {{
    access_log off;
    client_body_temp_path {directory}/nginx-body;
    proxy_temp_path {directory}/nginx-proxy;
    fastcgi_temp_path {directory}/nginx-fastcgi;
    uwsgi_temp_path {directory}/nginx-uwsgi;
    scgi_temp_path {directory}/nginx-scgi;
    keepalive_requests 1000000;
    upstream engine {{
        server 127.0.0.1:{engine};
        keepalive 1024;
        keepalive_requests 1000000;
    }}
    server {{
        listen 127.0.0.1:{port} backlog=4096;
        location / {{
            proxy_pass http://engine;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_buffering off;
            proxy_read_timeout 600s;
        }}
    }}
}}
"""

# Of the model of the vLLMs, for the size of its KV.
MODEL_CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_size": 32,
    "torch_dtype": "bfloat16",
}


class MissingError(BenchError):
    """A peer is not here; the message says why."""


@dataclass(frozen=True, slots=True)
class Bench:
    """The parts that all proxies need."""

    engines: Engines
    directory: Path  # For their configurations and logs.
    peers: Path  # Where peers were installed that are no part of the project.
    core: int | None  # Of the proxies.


@dataclass(slots=True)
class Running:
    port: int
    process: subprocess.Popen[bytes] | None = None  # None: there is no proxy.
    admin_port: int = 0
    others: list["Running"] = field(default_factory=list)  # Its mirror.

    @property
    def pids(self) -> list[int]:
        """Ids of the process and all that it started."""
        return [] if self.process is None else descendants(self.process.pid)


Start = Callable[[Bench], AbstractContextManager[Running]]


def descendants(ancestor: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(entry.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.parent.name))
    found = [ancestor]
    for pid in found:
        found += children.get(pid, [])
    return found


@contextmanager
def started(
    directory: Path,
    name: str,
    command: Sequence[str],
    port: int,
    ready_path: str,
    *,
    core: int | None = None,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Running]:
    """Start a process whose log lies in `directory`; yield it once it answers 200, and end it at
    the end.
    """
    log = directory / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            pinned(core, command),
            stdout=output,
            stderr=output,
            cwd=cwd,
            env=os.environ | (environment or {}),
        )
    try:
        give_up_s = time.monotonic() + START_TIMEOUT_S
        while not _answers(f"http://127.0.0.1:{port}{ready_path}"):
            if process.poll() is not None or time.monotonic() > give_up_s:
                last = log.read_text(errors="replace")[-2000:]
                raise BenchError(f"{name} was not ready: {last}")
            time.sleep(0.05)
        yield Running(port, process)
    finally:
        below = descendants(process.pid)[1:]
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(2)
        process.terminate()  # The second ends streams that kvrs would wait for.
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pid in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1):  # noqa: S310 - our own URL
            return True
    except OSError:  # Refused, silent, or not ready yet by its status.
        return False


@contextmanager
def none(bench: Bench) -> Iterator[Running]:
    """The load goes to the decode instance."""
    yield Running(bench.engines.ports["d0"])


@contextmanager
def nginx(bench: Bench) -> Iterator[Running]:
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if program is None:
        raise MissingError("nginx is not installed (Debian: apt-get install nginx-light)")
    (port,) = free_ports(1)
    config = bench.directory / "nginx.conf"
    engine = bench.engines.ports["d0"]
    config.write_text(_NGINX.format(directory=bench.directory, engine=engine, port=port))
    command = [program, "-p", str(bench.directory), "-c", str(config)]
    with started(bench.directory, "nginx", command, port, "/health", core=bench.core) as running:
        yield running


def router(*, disaggregated: bool) -> Start:
    @contextmanager
    def start(bench: Bench) -> Iterator[Running]:
        program = bench.peers / "vllm-router/bin/vllm-router"
        if not program.exists():
            raise MissingError("vllm-router is not installed below --peers (README.md)")
        port, metrics = free_ports(2)
        urls = {name: f"http://127.0.0.1:{port}" for name, port in bench.engines.ports.items()}
        command = [str(program), "--port", str(port), "--prometheus-port", str(metrics)]
        command += ["--policy", "round_robin", "--log-level", "error"]
        command += ["--max-concurrent-requests", "16384"]
        if disaggregated:
            command += ["--vllm-pd-disaggregation"]
            command += ["--prefill", urls["p0"], "--decode", urls["d0"]]
        else:
            command += ["--worker-urls", urls["d0"]]
        with started(
            bench.directory, "vllm-router", command, port, "/health", core=bench.core
        ) as running:
            yield running

    return start


def kvrs(
    tree: Path = HERE,
    *,
    mirrored: bool = False,
    sections: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    **settings: Any,
) -> Start:
    """`kvrs proxy` of one tree; `settings` are of section `proxy`, `sections` are others. With
    `mirrored` a second one runs, which keeps copies of the streams with a key.
    """

    @contextmanager
    def start(bench: Bench) -> Iterator[Running]:
        python = tree / ".venv/bin/python"
        command = [str(python if python.exists() else sys.executable), "-m", "kvrs", "proxy"]
        count = 2 if mirrored else 1
        ports = free_ports(3 * count)
        ids = [f"proxy-{n}" for n in range(count)]
        with contextlib.ExitStack() as stack:
            begun: list[Running] = []
            for n in range(count):
                port, admin_port, peer_port = ports[3 * n : 3 * n + 3]
                proxy = {"id": ids[n], "port": port, "admin_port": admin_port} | settings
                proxy |= {"self_test": False}
                if mirrored:
                    proxy["peer_port"] = peer_port
                    proxy["peers"] = [
                        {"id": ids[m], "peer_port": ports[3 * m + 2]}
                        for m in range(count)
                        if m != n
                    ]
                config = bench.directory / f"{tree.name}-{ids[n]}.yaml"
                document = {"proxy": proxy, **_cluster(bench), **(sections or {})}
                config.write_text(json.dumps(document))
                running = stack.enter_context(
                    started(
                        bench.directory,
                        f"kvrs-{tree.name}-{ids[n]}",
                        [*command, "--config", str(config)],
                        port,
                        "/readyz",
                        core=bench.core,
                        cwd=tree,
                        environment={ENV_NAME: SECRET.decode(), **(environment or {})},
                    )
                )
                running.admin_port = admin_port
                begun.append(running)
            begun[0].others = begun[1:]
            yield begun[0]

    return start


def _cluster(bench: Bench) -> dict[str, Any]:
    """Sections of the configuration."""
    engines = bench.engines
    nodes: dict[str, list[dict[str, Any]]] = {}
    for page_port, instance in enumerate(engines.instances, 1):
        row = {
            "id": instance.id,
            "role": instance.role.value,
            "port": engines.ports[instance.id],
            "page_port": page_port,
        }
        nodes.setdefault(instance.node, []).append(row)
    cluster: dict[str, Any] = {
        "nodes": [{"id": node, "instances": rows} for node, rows in nodes.items()]
    }
    if not engines.instances[0].is_vllm:
        return {"cluster": cluster}
    model = bench.directory / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(MODEL_CONFIG))
    cluster |= {"backend": "vllm", "model": str(model)}
    return {"cluster": cluster, "profiles": {"prefill": "opt-13b-a100-distserve-tp1"}}


def state(running: Running, worker: int = 0) -> Any:
    """The state of a kvrs proxy, or of one of its workers, from its admin port."""
    url = f"http://127.0.0.1:{running.admin_port + ADMIN_PORT_STEP * worker}/kvrs/v1/state"
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.loads(answer.read())
