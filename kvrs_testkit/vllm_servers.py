"""Real vLLM on this machine's CPU or GPU, prefill and decode apart: started, killed in parts,
stopped and started again.

Unmodified but for its environment's pause in NIXL's progress thread (`tests/vllm/install.sh`). A
server is three processes: the API server, below it the engine, below that its worker. An instance's
`page_port` is NIXL's side channel here.
"""

import contextlib
import json
import os
import re
import signal
import time
import urllib.request
from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

from kvrs.config.cluster import InstanceSettings
from kvrs.config.file import Config, parse_config
from kvrs.errors import KvrsError
from kvrs.protocol.instance import Role
from kvrs_engine.engine.random_model import write_tiny_model
from kvrs_lab.cluster.ports import resolve_ports
from kvrs_testkit.engine_servers import EngineServers
from kvrs_testkit.free_ports import free_ports
from kvrs_testkit.processes import below

# The interpreter of an environment with vLLM, as `make test-vllm` makes one.
PYTHON_ENV = "KVRS_VLLM_PYTHON"
# Nodes with their instances: NIXL brings prompts from p0 to both others.
HANDED_OVER = {"n0": ("p0", "d0"), "n1": ("d1",)}
MODEL_SEED = 1
# Float32 and no compiler: small differences must come from nothing but the engine's own batches. 64
# MB hold 32,768 tokens of KV.
PAGE_TOKENS = 32
FLAGS = [
    *(
        "--dtype",
        "float32",
        "--block-size",
        str(PAGE_TOKENS),
        "--enforce-eager",
        "--kv-cache-memory-bytes",
        "67108864",
    ),
    *("--max-model-len", "2048", "--max-num-seqs", "48"),
]
# vLLM refuses speculative decoding beside it.
REPLAY_FLAGS = ("--logits-processors", "kvrs.vllm.replay:Replay")
# Beside them, where servers share a GPU.
GPU_FLAGS = ("--gpu-memory-utilization", "0.2")
# On a GPU the same stream has other tokens in another batch without it.
BATCH_INVARIANT = {"VLLM_BATCH_INVARIANT": "1"}
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
    "UCX_NET_DEVICES": "lo",
    "UCX_TLS": "all",
}
# Three interpreters import torch one after the other: 40 to 60 s of CPU time.
START_TIMEOUT_S = 300.0
# The first use of a path may compile it.
REQUEST_TIMEOUT_S = 120.0
_END_TIMEOUT_S = 30.0

_ROLES = {Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer", Role.BOTH: "kv_both"}
_SAMPLE = re.compile(r"^vllm:(\w+)\{(.*)\} (\S+)$", re.MULTILINE)


class Part(StrEnum):
    """The part of a server that is hit."""

    SERVER = "server"  # All three processes, as at the death of the machine.
    ENGINE = "engine"
    WORKER = "worker"


_TITLES = {
    Part.ENGINE: "VLLM::EngineCor",
    Part.WORKER: "VLLM::Worker",
}  # What the kernel keeps of them.


class ServerError(KvrsError):
    """A server did not answer as vLLM does."""


def vllm_config(
    directory: Path, nodes: Mapping[str, Sequence[str]] = HANDED_OVER, **sections: Any
) -> Config:
    """Instances of these nodes on free ports, those with a p for prefill and others for decode;
    their model, tiny and random, is written into the directory. `sections`: of the configuration.
    """
    model = directory / "tiny-llama"
    write_tiny_model(model, MODEL_SEED)
    ports = iter(free_ports(sum(map(len, nodes.values()))))

    def instance(name: str) -> dict[str, Any]:
        role = Role.PREFILL if name.startswith("p") else Role.DECODE
        return {"id": name, "role": role.value, "port": next(ports)}

    document: dict[str, Any] = {
        "proxy": {"port": 0, "admin_port": 0},
        "cluster": {
            "backend": "vllm",
            "model": str(model),
            "nodes": [
                {"id": node, "instances": [*map(instance, names)]} for node, names in nodes.items()
            ],
        },
        # Of another machine: it decides nothing where the policy names its option.
        "profiles": {"prefill": "llama-3.1-8b-a100-vllm-tp1"},
    }
    return resolve_ports(parse_config(document | sections))


class VllmServers(EngineServers):
    """The instances of a configuration whose backend is vllm."""

    def __init__(self, config: Config, python: str, *flags: str) -> None:
        super().__init__(config, python, *flags)
        self.replays = True
        # By instance, beside those of all: fields of --kv-transfer-config.
        self.transfer: dict[str, dict[str, Any]] = {}

    def start(self, *names: str) -> None:
        for name in names:
            if name not in self._instances:
                super().start(name)  # An agent.
                continue
            if (former := self._running.get(name)) is not None:
                # A server whose engine is dead ends by itself, when its last connection has closed.
                self.kill(name)
                former.wait(_END_TIMEOUT_S)
            instance = self._instances[name]
            flags = self.flags.get(name, [])
            if (connector := self._connector(instance)) is not None:
                given = json.dumps(connector | self.transfer.get(name, {}))
                flags = [*flags, "--kv-transfer-config", given]
            self._spawn(
                name,
                "vllm.entrypoints.openai.api_server",
                *(
                    "--model",
                    self.model,
                    "--host",
                    instance.host,
                    "--port",
                    str(instance.port),
                    *FLAGS,
                    *(REPLAY_FLAGS if self.replays else ()),
                    *self._flags,
                    *flags,
                ),
                python=self._python,
                **ENVIRONMENT | self.environment,
                VLLM_NIXL_SIDE_CHANNEL_PORT=str(instance.page_port),
                PYTHONPATH=str(Path(__file__).parents[1]),
                # Beside the environment: the next start finds it, and it goes when that goes.
                VLLM_CACHE_ROOT=str(Path(self._python).parent.parent / "cache"),
            )

    @property
    def are_handed_prompts(self) -> bool:
        return any(each.role is Role.PREFILL for each in self._instances.values())

    def _connector(self, instance: InstanceSettings) -> dict[str, Any] | None:
        """NIXL's where prompts are handed over; None: vLLM has no connector."""
        if not self.are_handed_prompts:
            return None
        return {
            "kv_connector": "NixlConnector",
            "kv_role": _ROLES[instance.role],
            "kv_buffer_device": "cpu",
        }

    def wait_ready(self, *names: str) -> None:
        """Wait until these take requests and have taken some: every path once, because the first
        time takes seconds.
        """
        for name in names:
            if name in self._instances:
                self._wait(name, partial(_is_healthy, self.url(name)), START_TIMEOUT_S)
            else:
                super().wait_ready(name)
        prefills = [
            name for name in self._instances if self._instances[name].role is not Role.DECODE
        ]
        for name in names:
            if name in self._instances and self._instances[name].role is not Role.PREFILL:
                for prefill in prefills:
                    self._warm_up(prefill, name)

    def parts(self, name: str) -> list[int]:
        """Processes of a server that runs, but for its API server."""
        return [*below(self.pid(name))]

    def is_up(self, name: str) -> bool:
        return self._running[name].poll() is None and _is_healthy(self.url(name))

    def kill(self, name: str, part: Part = Part.SERVER) -> None:
        self.signal(name, signal.SIGKILL, part)

    def signal(self, name: str, number: signal.Signals, part: Part = Part.SERVER) -> None:
        """Send a signal to a server's processes, the API server first, so that it does not notice
        the others.
        """
        server = self._running[name]
        others = list(below(server.pid))
        if part is Part.WORKER and _TITLES[part] not in map(_title, others):
            part = Part.ENGINE  # On a GPU a single worker is a part of the engine's process.
        if part is Part.SERVER:
            server.send_signal(number)
        for pid in others:
            if part is Part.SERVER or _title(pid) == _TITLES[part]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def counters(self, name: str) -> dict[str, float]:
        """The values of `/metrics` that tests watch."""
        samples = {
            (metric, labels): float(value)
            for metric, labels, value in _SAMPLE.findall(_get(self.url(name) + "/metrics"))
        }

        def total(wanted: str, label: str = "") -> float:
            return sum(
                value
                for (metric, labels), value in samples.items()
                if metric == wanted and label in labels
            )

        def prompts_of(source: str) -> float:
            return total("prompt_tokens_by_source_total", f'source="{source}"')

        return {
            "pulled_tokens": prompts_of("external_kv_transfer"),
            "local_tokens": prompts_of("local_cache_hit"),
            "computed_tokens": prompts_of("local_compute"),
            "pulled_bytes": total("nixl_bytes_transferred_sum"),
            "stored_bytes": total("kv_offload_tiering_write_bytes_total"),
            "running": total("num_requests_running"),
            "preemptions": total("num_preemptions_total"),
            "cache_usage": total("kv_cache_usage_perc"),
        }

    def complete(self, name: str, **fields: Any) -> Any:
        """A completion of one server, not streamed."""
        body = {
            "model": self.model,
            "temperature": 0,
            "return_token_ids": True,
            "ignore_eos": True,
        } | fields
        try:
            with self._post(name, body) as answer:
                return json.load(answer)
        except OSError as error:
            raise ServerError(f"{name}: {error}") from None

    def _post(self, name: str, body: dict[str, Any]) -> Any:
        """Ask for a completion; the answer is to be closed. Raises OSError."""
        request = urllib.request.Request(  # noqa: S310 - our own URL
            self.url(name) + "/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        return urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S)  # noqa: S310 - our own URL

    def _warm_up(self, prefill: str, decode: str) -> None:
        """Hand two prompts over; the second shares a beginning with the first, at both."""
        for rest in range(2):
            prompt = [*range(2, 82), *[rest + 2] * 40]
            asked = {"do_remote_decode": True, "do_remote_prefill": False}
            answer = self.complete(prefill, prompt=prompt, max_tokens=1, kv_transfer_params=asked)
            self.complete(
                decode, prompt=prompt, max_tokens=8, kv_transfer_params=answer["kv_transfer_params"]
            )
            self.complete(decode, prompt=prompt[::-1], max_tokens=4, logprobs=1)


def wait_ended(parts: Sequence[int]) -> None:
    """Wait until these processes are gone.

    Raises:
        ServerError: some are left.
    """
    until_s = time.monotonic() + _END_TIMEOUT_S
    while alive := [pid for pid in parts if Path(f"/proc/{pid}").exists()]:
        if time.monotonic() > until_s:
            raise ServerError(f"processes {alive} are left")
        time.sleep(0.05)


def _title(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=1):  # noqa: S310 - our own URL
            return True
    except OSError:
        return False


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as answer:  # noqa: S310 - our own URL
        return str(answer.read().decode())
