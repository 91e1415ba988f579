"""An agent that owns memory, and processes of instances that attach it and are killed."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from kvrs.config.file import Config, parse_config
from kvrs.ids import InstanceId
from kvrs.protocol.instance import EPOCHS_PER_START
from kvrs.protocol.secrets import Scope, scoped_key
from kvrs_engine.engine.instance import EngineInstance
from kvrs_engine.engine.routes import make_routes
from kvrs_testkit.forked import ForkedProcess
from kvrs_testkit.free_ports import free_ports
from kvrs_testkit.ports import client_of, instance_client
from kvrs_testkit.processes import says_ready
from tests.agent.agents import SECRET, AgentProcess

ENGINE = InstanceId("e0")


def anchored_document(base: Path, model: Path, instances: int = 1) -> dict[str, Any]:
    """A configuration whose node n0 has an agent that owns the memory of its instances."""
    ports = iter(free_ports(2 + 2 * instances))
    listed = [
        {"id": f"e{number}", "role": "both", "port": next(ports), "page_port": next(ports)}
        for number in range(instances)
    ]
    node = {
        "id": "n0",
        "instances": listed,
        "agent": {"port": next(ports), "page_port": next(ports)},
    }
    engine = {"pages": 256, "max_running": 16}
    return {
        "cluster": {"model": str(model), "engine": engine, "nodes": [node]},
        "backup": {"directory": str(base)},
        "state_plane": {"enabled": True},
    }


class EngineProcess:
    """An instance as `python -m kvrs_engine.engine` runs it; it can be killed and started again."""

    def __init__(self, directory: Path, written: dict[str, Any], instance: str = "e0") -> None:
        self.config = parse_config(written)
        self._path = directory / f"{instance}.yaml"
        self._path.write_text(yaml.safe_dump(written))
        self._output, self._errors = (directory / f"{instance}.{name}" for name in ("out", "err"))
        self._instance = instance
        self.process: ForkedProcess | None = None

    def begin(self, start: int) -> None:
        with self._output.open("wb") as output, self._errors.open("wb") as errors:
            self.process = ForkedProcess(
                *("kvrs_engine.engine", "--config", str(self._path)),
                *("--instance", self._instance, "--epoch", str(start)),
                environment=os.environ | {"KVRS_SECRET": SECRET.decode(), "OMP_NUM_THREADS": "1"},
                stdout=output,
                stderr=errors,
            )

    def wait_ready(self) -> None:
        assert self.process is not None
        while not says_ready(self._output):
            if self.process.poll() is not None:
                raise AssertionError(self.end(signal.SIGKILL))
            time.sleep(0.02)

    def start(self, start: int) -> None:
        self.begin(start)
        self.wait_ready()

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def end(self, number: signal.Signals = signal.SIGKILL) -> tuple[int, str]:
        """Exit status, and what it wrote to its standard error."""
        assert self.process is not None
        process, self.process = self.process, None
        process.send_signal(number)
        process.send_signal(signal.SIGCONT)
        return process.wait(60), self._errors.read_text()

    def client(self) -> aiohttp.ClientSession:
        ((_, settings),) = [
            each for each in self.config.cluster.instances() if each[1].id == self._instance
        ]
        return client_of(
            self.config.url_of(settings), scoped_key(SECRET, Scope.INSTANCE, self._instance), 60
        )


@contextmanager
def ended(*processes: EngineProcess | AgentProcess) -> Iterator[None]:
    """A block after which none of the processes runs."""
    try:
        yield
    finally:
        for each in processes:
            if each.process is not None:
                each.end(signal.SIGKILL)


def instance_of(config: Config, start: int) -> EngineInstance:
    """Instance e0 in this process."""
    return EngineInstance(config, ENGINE, start * EPOCHS_PER_START, SECRET)


@asynccontextmanager
async def attached(
    config: Config, start: int
) -> AsyncIterator[tuple[EngineInstance, aiohttp.ClientSession]]:
    """Instance e0 in this process, with a client."""
    instance = instance_of(config, start)
    async with asyncio.timeout(180), instance_client(make_routes(instance), SECRET) as client:
        await instance.start()
        try:
            yield instance, client
        finally:
            await instance.close()


def completion(stream: str, prompt: list[int], max_tokens: int, attempt: int = 1) -> dict[str, Any]:
    """The body of a request, in which `prompt` may have output of an attempt before."""
    return {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "return_token_ids": True,
        "ignore_eos": True,
        "kvrs": {"stream": stream, "attempt": attempt, "prompt_tokens": len(prompt)},
    }
