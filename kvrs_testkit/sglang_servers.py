"""Real SGLang on this machine's CPU, prefill and decode apart: started, killed in parts, stopped
and started again.

Its own code is not changed; `tests/sglang/stand_ins` stands in for what it calls of a GPU. A server
is three processes: the HTTP server, below it the scheduler and the detokeniser. An instance's
`page_port` is a prefill's bootstrap server here.
"""

import contextlib
import json
import os
import signal
import urllib.request
from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

from kvrs.config.cluster import InstanceSettings
from kvrs.config.file import Config, parse_config
from kvrs.protocol.instance import Role
from kvrs_engine.engine.random_model import write_tiny_model
from kvrs_lab.cluster.ports import resolve_ports
from kvrs_testkit.engine_servers import EngineServers
from kvrs_testkit.free_ports import free_ports
from kvrs_testkit.processes import below

# The interpreter of an environment with SGLang, as `make test-sglang` makes one.
PYTHON_ENV = "KVRS_SGLANG_PYTHON"
STAND_INS = Path(__file__).parents[1] / "tests/sglang/stand_ins"
NODES = {"n0": ("p0", "d0"), "n1": ("p1", "d1")}
MODEL_SEED = 1
PAGE_TOKENS = 16
FLAGS = (
    *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native"),
    *("--disable-overlap-schedule", "--sleep-on-idle", "--skip-server-warmup"),
    *("--page-size", str(PAGE_TOKENS), "--max-total-tokens", "16384"),
    *("--max-running-requests", "24", "--context-length", "2048"),
    "--enable-cache-report",
)
_ROLES = {Role.PREFILL: "prefill", Role.DECODE: "decode"}
# Host memory that CUDA registers takes no part: retracted requests go to plain tensors.
_DECODE_FLAGS = ("--disaggregation-decode-retraction-backup", "cpu_tensor")
ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_HOST_IP": "127.0.0.1",
    "SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS": "0",
    "MKL_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
}
START_TIMEOUT_S = 300.0
REGION_BYTES = 64 << 20
REQUEST_TIMEOUT_S = 120.0


class Part(StrEnum):
    """The part of a server that is hit."""

    SERVER = "server"  # All its processes, as at the death of the machine.
    SCHEDULER = "scheduler"


def sglang_config(
    directory: Path, nodes: Mapping[str, Sequence[str]] = NODES, **sections: Any
) -> Config:
    """Instances of these nodes on free ports, those with a p for prefill and others for decode;
    their model, tiny and random, is written into the directory. `sections`: of the configuration.
    Where it keeps copies, each node has an agent.
    """
    model = directory / "tiny-llama"
    write_tiny_model(model, MODEL_SEED)
    ports = iter(free_ports(sum(map(len, nodes.values())) + len(nodes)))

    def agent() -> dict[str, Any]:
        return {"agent": {"row_port": next(ports)}} if "backup" in sections else {}

    def instance(name: str) -> dict[str, Any]:
        role = Role.PREFILL if name.startswith("p") else Role.DECODE
        return {"id": name, "role": role.value, "port": next(ports)}

    document: dict[str, Any] = {
        "proxy": {"port": 0, "admin_port": 0},
        "cluster": {
            "backend": "sglang",
            "model": str(model),
            "nodes": [
                {"id": node, "instances": [*map(instance, names)], **agent()}
                for node, names in nodes.items()
            ],
        },
    }
    return resolve_ports(parse_config(document | sections))


class SglangServers(EngineServers):
    """The instances of a configuration whose backend is sglang."""

    def __init__(self, config: Config, python: str, *flags: str) -> None:
        super().__init__(config, python, *flags)
        self._has_prefill = Role.PREFILL in self.config.cluster.roles

    def start(self, *names: str) -> None:
        for name in names:
            if name not in self._instances:
                super().start(name)
                continue
            if (former := self._running.get(name)) is not None:
                self.kill(name)
                former.wait()
            libraries = Path(self._python).parent.parent / "libraries"
            nccl_port, *_ = free_ports(1)
            self._spawn(
                name,
                "sglang.launch_server",
                *("--model-path", self.model, "--host", self._instances[name].host),
                *("--port", str(self._instances[name].port), "--nccl-port", str(nccl_port)),
                *FLAGS,
                *self._role_flags(self._instances[name]),
                *self._flags,
                *self.flags.get(name, ()),
                python=self._python,
                **ENVIRONMENT | self.environment,
                PYTHONPATH=os.pathsep.join(map(str, (STAND_INS, Path(__file__).parents[1]))),
                LD_LIBRARY_PATH=str(libraries),
            )

    def keep_pages(self, name: str, region_bytes: int = REGION_BYTES) -> None:
        """Let a server have kvrs's storage, from its next start on."""
        options = {
            "backend_name": "kvrs",
            "module_path": "kvrs.sglang.storage",
            "class_name": "KvrsStorage",
            "interface_v1": 1,
            "config": str(self._config_path),
            "instance": name,
            "region_bytes": region_bytes,
        }
        flags = [
            *("--hicache-storage-backend", "dynamic", "--hicache-io-backend", "direct"),
            *("--hicache-storage-backend-extra-config", json.dumps(options)),
        ]
        if self._instances[name].role is Role.PREFILL:
            flags += ["--enable-hierarchical-cache", "--hicache-ratio", "2"]
            flags += ["--hicache-storage-prefetch-policy", "wait_complete"]
        else:
            flags.append("--disaggregation-decode-enable-offload-kvcache")
        self.flags[name] = flags

    def said(self, name: str) -> str:
        """Return the log of a process since its last start."""
        return self._log(name).read_text(errors="replace")

    def _role_flags(self, instance: InstanceSettings) -> Sequence[str]:
        if not self._has_prefill:
            return ()
        flags = [
            *("--disaggregation-mode", _ROLES[instance.role]),
            *("--disaggregation-transfer-backend", "mooncake_tcp"),
        ]
        if instance.role is Role.DECODE:
            return (*flags, *_DECODE_FLAGS)
        return (*flags, "--disaggregation-bootstrap-port", str(instance.page_port))

    def wait_ready(self, *names: str) -> None:
        for name in names:
            if name in self._instances:
                self._wait(name, partial(self._is_ready, name), START_TIMEOUT_S)
            else:
                super().wait_ready(name)

    def _is_ready(self, name: str) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url(name)}/server_info", timeout=2):  # noqa: S310
                return True
        except OSError:
            return False

    def kill(self, name: str, part: Part = Part.SERVER) -> None:
        self.signal(name, signal.SIGKILL, part)

    def signal(self, name: str, number: signal.Signals, part: Part = Part.SERVER) -> None:
        """Send a signal to a server's processes, or to its scheduler alone."""
        server = self._running[name]
        others = list(below(server.pid))
        if part is Part.SERVER:
            server.send_signal(number)
        for pid in others:
            if part is Part.SERVER or "scheduler" in _title(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def loads(self, name: str) -> list[dict[str, Any]]:
        """Loads of a server, by each of its schedulers."""
        return list(self._get(name, "/v1/loads?include=all")["loads"])

    def info(self, name: str) -> dict[str, Any]:
        return dict(self._get(name, "/server_info"))

    def _get(self, name: str, path: str) -> Any:
        with urllib.request.urlopen(self.url(name) + path, timeout=REQUEST_TIMEOUT_S) as answer:  # noqa: S310
            return json.load(answer)


def _title(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    return ""
