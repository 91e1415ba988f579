"""Processes of a configuration whose instances are unmodified servers, of vLLM or SGLang."""

from kvrs.config.file import Config
from kvrs_testkit.processes import Processes

_END_TIMEOUT_S = 30.0


class EngineServers(Processes):
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

    def stop_proxy(self, name: str = "proxy") -> None:
        if (running := self._running.pop(name, None)) is not None:
            running.terminate()
            running.wait(_END_TIMEOUT_S)
