"""Real vLLM with its own CPU tier, and kvrs's policy and tier in it: servers of one node, whose
rows the node's agent serves.
"""

import json
import os
import random
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvrs.config.cluster import InstanceSettings
from kvrs.config.file import Config, parse_config
from kvrs.protocol.instance import Role
from kvrs_testkit.vllm_servers import (
    PYTHON_ENV,
    ServerError,
    VllmServers,
    connector_config,
)


def asking(*agents: str) -> dict[str, Any]:
    """Fields of a request that is protected, and that loads what its node's agent holds of it, or
    these agents of other nodes.
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

    def __init__(self, config: Config, *flags: str) -> None:
        super().__init__(config, os.environ[PYTHON_ENV], *flags)
        self.cpu_tier: dict[str, Any] = {}  # Options of vLLM's tier, beside those of all.
        self.options: dict[str, Any] = {}  # Of kvrs in it.
        self.config_of: dict[str, Path] = {}  # Of instances that see the cluster otherwise.

    @property
    def agent(self) -> str:
        return str(self.config.cluster.nodes[0].agent_id)

    def _connector(self, instance: InstanceSettings) -> dict[str, Any]:
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
        if all(each.role is Role.DECODE for each in self._instances.values()):
            return tier
        return {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": [super()._connector(instance), tier]},
        }

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


class RowServers(TierServers):
    """Decode instances d0, d1 ... on one node with its agent."""

    def __init__(
        self, directory: Path, *flags: str, model: Path | None = None, instances: int = 2
    ) -> None:
        document = connector_config(directory, max(instances, 2)).model_dump(mode="json")
        first, *others = document["cluster"]["nodes"]
        for node in others:
            first["instances"] += node["instances"]
        del first["instances"][instances:]
        for instance in first["instances"]:
            instance["connector_port"] = None
        document["cluster"]["nodes"] = [first]
        document["backup"]["mode"] = "local"
        if model is not None:
            document["cluster"]["model"] = str(model)
        super().__init__(parse_config(document), *flags)


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
