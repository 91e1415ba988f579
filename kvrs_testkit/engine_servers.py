"""Processes of a configuration whose instances are unmodified servers, of vLLM or SGLang."""

import signal
from abc import ABC

from kvrs.config.file import Config
from kvrs_testkit.processes import Processes

_END_TIMEOUT_S = 30.0


class EngineServers(Processes, ABC):
    """The instances of a configuration, run by another interpreter, and at most one proxy at a
    time.
    """

    def __init__(self, config: Config, python: str, *flags: str) -> None:
        super().__init__(config)
        self._python, self._flags = python, flags
        self.flags: dict[str, list[str]] = {}  # By instance, beside those of all.
        self.environment: dict[str, str] = {}  # Of all, beside the module's own.
        self._instances = {
            str(instance.id): instance for _, instance in self.config.cluster.instances()
        }

    @property
    def names(self) -> list[str]:
        return list(self._instances)

    @property
    def model(self) -> str:
        assert self.config.cluster.model is not None
        return self.config.cluster.model

    def url(self, name: str) -> str:
        return self._instances[name].url

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to all processes of a server, here its only one."""
        self._running[name].send_signal(number)

    def start_all(self) -> None:
        """Start all agents and instances, and wait until they are ready."""
        config = self.config
        agents = [str(node.agent_id) for node in config.cluster.nodes if config.agents_run]
        self.start(*agents, *self.names)
        self.wait_ready(*agents, *self.names)

    def stop_proxy(self, name: str = "proxy") -> None:
        if (running := self._running.pop(name, None)) is not None:
            running.terminate()
            running.wait(_END_TIMEOUT_S)
