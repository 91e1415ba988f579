"""Real vLLM beside a Mooncake store on this machine, over TCP: its master, and a process that has
the memory, which outlives the servers.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from kvrs.config.cluster import InstanceSettings
from kvrs.config.policy import PolicyName
from kvrs_testkit.free_ports import free_ports
from kvrs_testkit.vllm_servers import PYTHON_ENV, VllmServers, vllm_config

_IMPORT = "from mooncake.store import MooncakeDistributedStore"


def lacks_store() -> str:
    """Why vLLM's interpreter has no Mooncake store; empty: it has one. The wheel for servers
    without CUDA (`mooncake-transfer-engine-non-cuda`) needs `libibverbs.so.1` and
    `libcudart.so.12`.
    """
    python = os.environ.get(PYTHON_ENV)
    if python is None:
        return f"{PYTHON_ENV} names no interpreter"
    found = subprocess.run([python, "-c", _IMPORT], capture_output=True, text=True)
    return found.stderr.strip().rpartition("\n")[2] if found.returncode else ""


class StoreServers(VllmServers):
    """Servers d0 and d1 on two nodes."""

    def __init__(self, directory: Path) -> None:
        policy = {"name": PolicyName.ALWAYS_RESTORE.value}
        config = vllm_config(directory, {"n0": ["d0"], "n1": ["d1"]}, policy=policy)
        super().__init__(config, os.environ[PYTHON_ENV])
        self._ports = free_ports(3)
        place = directory / "mooncake.json"
        store = {
            "metadata_server": "P2PHANDSHAKE",
            "master_server_address": f"127.0.0.1:{self._ports[0]}",
            "protocol": "tcp",
            "mode": "standalone-store",
            "global_segment_size": 0,
            "local_buffer_size": "128MB",
        }
        place.write_text(json.dumps(store))
        # Keys of blocks are the same in all servers only with one seed of hashes.
        self.environment = {"MOONCAKE_CONFIG_PATH": str(place), "PYTHONHASHSEED": "0"}

    def start_store(self) -> None:
        master, metrics, client = self._ports
        ports = (f"--rpc_port={master}", f"--metrics_port={metrics}")
        self._spawn("master", "mooncake.cli", *ports, python=self._python)
        self._spawn(
            "memory",
            "mooncake.cli_client",
            "--host=127.0.0.1",
            f"--port={client}",
            "--global_segment_size=256 MB",
            f"--master_server_address=127.0.0.1:{master}",
            "--metadata_server=P2PHANDSHAKE",
            "--protocol=tcp",
            python=self._python,
        )

    def _connector(self, instance: InstanceSettings) -> dict[str, Any] | None:
        return {
            "kv_connector": "MooncakeStoreConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"save_decode_cache": True},
        }
