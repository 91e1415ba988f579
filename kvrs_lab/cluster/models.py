"""Several models behind one proxy: a cluster for each, with instances and agents of its own, and
one process of the proxy for all of them.
"""

import signal
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, Self

from kvrs.config.file import Config, configs_of, parse_config
from kvrs.config.models import joined
from kvrs.config.origin import UpCommand
from kvrs.config.proxy import ProxySettings
from kvrs.errors import ConfigError
from kvrs.ids import InstanceId
from kvrs.net.admin import AdminClient
from kvrs_lab.cluster.launcher import STOP_TIMEOUT_S, Cluster
from kvrs_lab.cluster.processes import START_TIMEOUT_S, LaunchError, Process, Progress
from kvrs_lab.cluster.proxies import ProxyProcess
from kvrs_lab.cluster.signals import EndingSignals
from kvrs_lab.cluster.supervised import ProcessStatus, StartWait, wait_ready

_LOOK_AGAIN_S = 0.05
_ROWS = ("instances", "agents", "proxies")  # Of a state.


class ProxyOfModels(ProxyProcess):
    """The process of the proxy; it serves once its port for clients answers."""

    @property
    def admins(self) -> list[AdminClient]:
        return [AdminClient(self.url, None, self.settings.tls)]


class ProxyOfModel(ProxyProcess):
    """The same process, as one model's cluster has it: at the admin port of that model."""

    def __init__(self, settings: ProxySettings, whole: ProxyProcess, token: bytes | None) -> None:
        super().__init__(settings, lambda: whole._spawn(), lambda: whole._log_tail(), token)
        self._whole = whole
        self.status = whole.status

    @property
    def pid(self) -> int | None:
        return self._whole.pid

    def signal(self, number: signal.Signals) -> int:
        return self._whole.signal(number)

    def start(self) -> None:
        """The whole is started once."""

    def stop(self) -> None:
        """The whole ends once."""

    def wait(self, timeout_s: float) -> None:
        """The whole is waited for once."""


class _NoSignals(EndingSignals):
    """No handlers: those of all models are set around it."""

    def __init__(self) -> None:
        self._found = {}


class ModelCluster(Cluster):
    """The cluster of one model, without a proxy before it has joined that of all models."""

    _new_signals = _NoSignals

    def __init__(
        self,
        config: Config,
        progress: Progress,
        launch: UpCommand | None,
        taken: set[int],
        tell: Callable[[Config], None],
    ) -> None:
        """`taken`: ports of all models; `tell` gets the configuration that the proxy has of this
        one, whenever it changes.
        """
        super().__init__(config, progress, launch=launch)
        self._taken = taken
        self._tell = tell

    def _write_proxies(self, config: Config) -> None:
        self._tell(config.model_copy(update={"proxy": self._proxy_settings[0]}))

    def _bring_up(self) -> None:
        """The processes of all models start at the same time."""

    def wait_ready(self) -> None:
        """Raises LaunchError: a process did not start."""
        supervisor = self.supervisor
        wait_ready(self.processes, supervisor.status, supervisor.log_tail, self._progress)

    def write_proxy(self, config: Config) -> None:
        self._run.write_config(config, config.proxy.id)

    def new_proxy(self, settings: ProxySettings) -> ProxyOfModels:
        """The proxy of all models, with its files in the directory of this one."""
        tail = partial(self._run.log_tail, settings.id)
        return ProxyOfModels(settings, partial(self._spawn_proxy, settings.id), tail)

    def join(self, whole: ProxyProcess) -> None:
        self.proxies = [ProxyOfModel(self._proxy_settings[0], whole, self._admin_token)]
        self.wait_all_up()


class ModelClusters:
    """The clusters of all models, with what `Upkeep` uses of a `Cluster`. Ids of processes are
    unique among them.
    """

    def __init__(self, config: Config, progress: Progress, launch: UpCommand | None = None) -> None:
        """Raises ConfigError: an instance of a model cannot be started."""
        self._base = config
        self._progress = progress
        self._told: dict[str, Config] = {}
        taken: set[int] = set()
        self.by_name = {
            name: ModelCluster(
                own, partial(self._say, name), launch, taken, partial(self._told.__setitem__, name)
            )
            for name, own in configs_of(config).items()
        }
        self._first = next(iter(self.by_name.values()))
        self.proxies: list[ProxyProcess] = []
        self.supervisor = self  # As that of all models.

    def __enter__(self) -> Self:
        self._signals = EndingSignals()
        self._stack = ExitStack()
        try:
            self._signals.interrupt()
            for cluster in self.by_name.values():
                self._stack.enter_context(cluster)
            for cluster in self.by_name.values():
                cluster.wait_ready()
            self._start_proxy()
            self._signals.hand_back()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._signals.ignore()
        try:
            for proxy in self.proxies:
                proxy.stop()
            for proxy in self.proxies:
                proxy.wait(STOP_TIMEOUT_S)
            self._stack.close()
        finally:
            self._signals.restore()

    def _say(self, name: str, line: str) -> None:
        self._progress(f"{name}: {line}")

    def _start_proxy(self) -> None:
        self._progress(f"starting the proxy of {len(self.by_name)} models")
        proxy = self._first.new_proxy(self._write_file())
        self.proxies = [proxy]
        proxy.start()
        wait = StartWait(START_TIMEOUT_S, self._progress)
        while not proxy.status.has_served:
            self.check()
            if wait.is_over([proxy.settings.id]):
                raise LaunchError(f"{proxy.settings.id} did not answer within {wait.limit}")
            time.sleep(_LOOK_AGAIN_S)
        for cluster in self.by_name.values():
            cluster.join(proxy)

    def _write_file(self) -> ProxySettings:
        """Write the proxy's file, with what each model has now."""
        document = joined(
            self._base, {name: self._told[name].model_dump(mode="json") for name in self.by_name}
        )
        port = self._first.config.proxy.port
        document["proxy"] = {**document.get("proxy", {}), "port": port}
        whole = parse_config(document)
        self._first.write_proxy(whole)
        return whole.proxy

    # As a cluster has it.

    @property
    def urls(self) -> list[str]:
        return [proxy.url for proxy in self.proxies]

    @property
    def admin_urls(self) -> dict[str, str]:
        """The admin port of each model."""
        return {name: cluster.admin_url for name, cluster in self.by_name.items()}

    @property
    def config(self) -> Config:
        """The first model's, with the nodes of all and the longest of their times."""
        clusters = [cluster.config.cluster for cluster in self.by_name.values()]
        changes = {
            "nodes": [node for each in clusters for node in each.nodes],
            "drain_s": max(each.drain_s for each in clusters),
        }
        first = self._first.config
        return first.model_copy(update={"cluster": first.cluster.model_copy(update=changes)})

    @property
    def processes(self) -> dict[InstanceId, Process]:
        clusters = self.by_name.values()
        return {name: each for cluster in clusters for name, each in cluster.processes.items()}

    def status(self) -> Mapping[InstanceId, ProcessStatus]:
        clusters = self.by_name.values()
        return {
            name: each for cluster in clusters for name, each in cluster.supervisor.status().items()
        }

    def end(self, name: InstanceId) -> None:
        """Have a process drain and end; it is started again."""
        self._of(name).end(name)

    def kill(self, *names: InstanceId) -> list[int]:
        """SIGKILL processes; raises as `Cluster.kill` does."""
        return [pid for name in names for pid in self._of(name).kill(name)]

    def _of(self, name: InstanceId) -> ModelCluster:
        return next(each for each in self.by_name.values() if name in each.processes)

    def state(self, proxy: int = 0) -> dict[str, Any]:
        """The rows of all models; raises AdminError, as that of each."""
        states = [cluster.state(proxy) for cluster in self.by_name.values()]
        return {key: [row for state in states for row in state[key]] for key in _ROWS}

    def down(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for cluster in self.by_name.values():
            found |= cluster.down()
        return found

    def check(self) -> None:
        """Raises LaunchError: the proxy cannot be restarted, or never served."""
        for proxy in self.proxies:
            if proxy.status.fault is not None:
                raise LaunchError(proxy.status.fault)

    def follow_fleet(self) -> None:
        before = dict(self._told)
        for cluster in self.by_name.values():
            cluster.follow_fleet()
        if self._told != before:
            try:
                self._write_file()
            # Two models have an instance of the same id now; or a disk is full.
            except (ConfigError, OSError) as error:
                self._progress(f"the next start of the proxy does not know of others: {error}")

    def renew(self, config: Config, launch: UpCommand | None = None) -> None:
        """Raises ConfigError: it differs in more than a running cluster can change; nothing has
        changed.
        """
        configs = configs_of(config)
        if list(configs) != list(self.by_name):
            raise ConfigError(
                f"models: got {', '.join(configs) or 'none'}; allowed: {', '.join(self.by_name)}, "
                "in this order, or another `kvrs lab up`"
            )
        faults = [
            f"model {name!r}: {fault}"
            for name, cluster in self.by_name.items()
            for fault in cluster.faults_of_renewal(configs[name])
        ]
        if faults:
            raise ConfigError(faults)
        self._base = config
        for name, cluster in self.by_name.items():
            cluster.renew(configs[name], launch)
        self._write_file()
