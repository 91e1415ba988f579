"""Real vLLM with its own CPU tier, and kvrs's policy and tier in it: servers of one node, whose
rows the node's agent serves.
"""

import json
import mmap
import os
import random
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from kvrs.config.cluster import InstanceSettings
from kvrs.config.file import Config, parse_config
from kvrs.ids import InstanceId
from kvrs.protocol.rows import PARAMS_FIELD, params_key, seal
from kvrs_testkit.free_ports import free_ports
from kvrs_testkit.vllm_servers import PYTHON_ENV, ServerError, VllmServers, vllm_config


def asking(*agents: str) -> dict[str, Any]:
    """Fields of a request that is protected, and that loads what its node's agent holds of it, or
    these agents of other nodes. `TierServers.sealed` makes them right for a server.
    """
    return {"kv_transfer_params": {"kvrs": {"agents": list(agents)} if agents else {}}}


KVRS = asking()
CPU_BYTES = 64 << 20


def regions() -> set[str]:
    """Names of regions that lie in /dev/shm, also those that stock vLLM has left there."""
    names = os.listdir("/dev/shm")  # noqa: S108 - where vLLM has them.
    return {name for name in names if name.startswith("vllm_offload_")}


class TierServers(VllmServers):
    """Instances with the tier, each on its node of the configuration; beside NIXL where prompts are
    handed over.
    """

    def __init__(self, config: Config, *flags: str, python: str | None = None) -> None:
        super().__init__(config, python or os.environ[PYTHON_ENV], *flags)
        self.cpu_tier: dict[str, Any] = {}  # Options of vLLM's tier, beside those of all.
        self.options: dict[str, Any] = {}  # Of kvrs in it.
        self.config_of: dict[str, Path] = {}  # Of instances that see the cluster otherwise.
        self.stock: set[str] = set()  # Instances without the tier.

    @property
    def agent(self) -> str:
        return str(self.config.cluster.nodes[0].agent_id)

    def _connector(self, instance: InstanceSettings) -> dict[str, Any] | None:
        config = self.config_of.get(str(instance.id), self._config_path)
        place = {"config": str(config), "instance": str(instance.id)}
        tier = {
            "kv_connector": "KvrsOffloading",
            "kv_connector_module_path": "kvrs.vllm.offloading",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "spec_name": "CpuTieringSpec",
                "spec_module_path": "kvrs_testkit.vllm_cpu_tier",
                "cpu_bytes_to_use": CPU_BYTES,
                "kvrs": place | self.options,
            }
            | self.cpu_tier,
        }
        nixl = super()._connector(instance)
        if str(instance.id) in self.stock:
            return nixl
        if nixl is None:
            return tier
        return {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": [nixl, tier]},
        }

    @contextmanager
    def memory_of(self, name: str) -> Iterator[mmap.mmap]:
        """The CPU tier of a server that runs, also after its death."""
        places = [
            place
            for pid in self.parts(name)
            for place in Path(f"/proc/{pid}/fd").iterdir()
            if "vllm_offload_" in os.readlink(place)
        ]
        with places[0].open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            yield memory

    def sealed(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        """The body with what it asks of kvrs as a proxy asks this server."""
        params = body.get("kv_transfer_params") or {}
        given = params.get(PARAMS_FIELD)
        if not isinstance(given, dict) or "mac" in given:
            return body
        if not isinstance(agents := given.get("agents", []), list):
            return body
        made = msgspec.to_builtins(
            seal(agents, params_key(self.secret, InstanceId(name)), time.time())
        )
        return body | {"kv_transfer_params": params | {PARAMS_FIELD: made}}

    def _post(self, name: str, body: dict[str, Any]) -> Any:
        return super()._post(name, self.sealed(name, body))

    def stream(
        self,
        name: str,
        prompt: Sequence[int],
        tokens: int,
        got: Callable[[list[int]], None],
        **fields: Any,
    ) -> None:
        """Hand on each event's ids, until the stream or its server ends."""
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": tokens,
            "stream": True,
            "temperature": 0,
            "return_token_ids": True,
            "ignore_eos": True,
        } | fields
        try:
            with self._post(name, body) as answer:
                for line in answer:
                    if line.startswith(b"data: {"):
                        event = json.loads(line[6:])
                        if "choices" not in event:
                            raise ServerError(f"{name}: {event}")
                        got(event["choices"][0]["token_ids"])
        except OSError:
            return

    def said(self) -> str:
        """Return what servers and agent have logged of kvrs, and of errors."""
        lines = [
            f"{name}: {line}"
            for name in (self.agent, *self.names)
            for line in self._log(name).read_text(errors="replace").splitlines()
            if "kvrs" in line.lower() or "ERROR" in line or name == self.agent
        ]
        return "\n".join(lines)

    def loaded_tokens(self, name: str) -> float:
        """Tokens of prompts that came from the CPU tier, and so from agents."""
        return self.counters(name)["pulled_tokens"]


def row_config(
    directory: Path, nodes: Mapping[str, Sequence[str]], *, model: Path | None = None
) -> Config:
    """Instances of these nodes, and an agent on each. Those of several nodes serve rows to the
    other ones. `model`: another one than the tiny one.
    """
    config = vllm_config(directory, nodes, gossip={"enabled": False}, backup={"mode": "local"})
    document = config.model_dump(mode="json")
    if len(nodes) > 1:
        document["backup"]["mode"] = "remote"
        of_nodes = document["cluster"]["nodes"]
        for node, port in zip(of_nodes, _ports_beside(config, len(of_nodes)), strict=True):
            node["agent"]["row_port"] = port
    if model is not None:
        document["cluster"]["model"] = str(model)
    return parse_config(document)


def _ports_beside(config: Config, count: int) -> list[int]:
    """Free ports that the configuration does not have yet."""
    agents = [node.agent for node in config.cluster.nodes]
    used = {config.proxy.port, config.proxy.admin_port}
    used |= {port for each in agents for port in (each.port, each.page_port)}
    used |= {port for _, each in config.cluster.instances() for port in (each.port, each.page_port)}
    while not used.isdisjoint(found := free_ports(count)):
        pass
    return found


class RowServers(TierServers):
    """Decode instances d0, d1 ... on one node with its agent."""

    def __init__(
        self,
        directory: Path,
        *flags: str,
        model: Path | None = None,
        instances: int = 2,
        python: str | None = None,
    ) -> None:
        nodes = {"n0": [f"d{number}" for number in range(instances)]}
        super().__init__(row_config(directory, nodes, model=model), *flags, python=python)


def prompt_of(seed: int) -> list[int]:
    draw = random.Random(seed)
    return draw.choices(range(5, 200), k=draw.randrange(100, 400))


def run_in_vllm(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program of the testkit in vLLM's interpreter."""
    return subprocess.run(
        [os.environ[PYTHON_ENV], "-m", f"kvrs_testkit.{program}", *arguments],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
    )
