"""A DistServe server as a process of its own, in the Ray that the tests have."""

import http.client
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from kvrs.config.file import Config, dump_config, parse_config
from kvrs.protocol.secrets import Scope, scoped_key
from kvrs_lab.cluster.ports import resolve_ports
from kvrs_testkit.ports import ProvenConnection

ROOT = Path(__file__).parents[2]
# Generous: they only end what hangs.
START_S = 300.0
STOP_S = 60.0
SECRET = secrets.token_hex(32)


def config_for(model: Path, nodes: int = 1) -> Config:
    document = {
        "proxy": {"port": 0, "admin_port": 0},
        "cluster": {
            "backend": "distserve",
            "model": str(model),
            "engine": {"pages": 512},
            "nodes": [
                {
                    "id": f"n{n}",
                    "instances": [
                        {"id": f"p{n}", "role": "prefill"},
                        {"id": f"d{n}", "role": "decode"},
                    ],
                }
                for n in range(nodes)
            ],
        },
    }
    return resolve_ports(parse_config(document))


class ServerProcess:
    """Node n0 of the configuration."""

    def __init__(self, config: Config, directory: Path, *flags: str) -> None:
        import ray

        path, self.log = directory / "config.yaml", directory / "server.log"
        path.write_text(dump_config(config))
        self.urls = {instance.id: instance.url for _, instance in config.cluster.instances()}
        command = [sys.executable, "-m", "distserve_patches.api_server", *flags]
        command += ["--kvrs-config", str(path), "--kvrs-node", "n0", "--end-with", str(os.getpid())]
        environment = os.environ | {
            "KVRS_SECRET": SECRET,
            "RAY_ADDRESS": ray.get_runtime_context().gcs_address,
        }
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, cwd=ROOT
            )

    def wait_ready(self) -> None:
        give_up_s = time.monotonic() + START_S
        while b"ready" not in self.log.read_bytes().splitlines():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < give_up_s, self.log.read_text()
            time.sleep(0.05)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_S)

    def get(self, instance: str, path: str) -> Any:
        """The answer, or the status that it has instead."""
        with closing(self._connection(instance, 10)) as connection:
            connection.request("GET", path)
            answer = connection.getresponse()
            return json.load(answer) if answer.status == 200 else answer.status

    def complete(self, instance: str, prompt: list[int], max_tokens: int, **fields: Any) -> Any:
        body = {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "return_token_ids": True,
            "ignore_eos": True,
        } | fields
        with closing(self._connection(instance, 60)) as connection:
            return json.load(_posted(connection, body))

    def stream(
        self, instance: str, prompt: list[int], max_tokens: int, **fields: Any
    ) -> Iterator[Any]:
        """The events of a stream as they come."""
        body = {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "return_token_ids": True,
            "ignore_eos": True,
            "stream": True,
        }
        with closing(self._connection(instance, 60)) as connection:
            for line in _posted(connection, body | fields):
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])

    def wait_for(self, instance: str, epoch: int) -> Any:
        """The instance's description once it is in a later epoch."""
        give_up_s = time.monotonic() + START_S
        while True:
            info = self.get(instance, "/kvrs/v1/instance")
            if isinstance(info, dict) and info["epoch"] > epoch:
                return info
            assert time.monotonic() < give_up_s, self.log.read_text()
            time.sleep(0.05)

    def _connection(self, instance: str, timeout_s: float) -> ProvenConnection:
        key = scoped_key(SECRET.encode(), Scope.INSTANCE, instance)
        return ProvenConnection(self.urls[instance], key, timeout_s)  # type: ignore[index]


def _posted(connection: ProvenConnection, body: Any) -> http.client.HTTPResponse:
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body).encode(), headers)
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    return answer
