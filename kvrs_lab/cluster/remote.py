"""Processes on the machines of a running Ray cluster.

Each node of the configuration has a Ray actor, which supervises the node's processes on a machine.
Files are in the machine's own directories, and the secret is read there. Ray carries only the
configuration, which has no secret, and no request, token or page.
"""

import logging
import os
import threading
import time
from collections.abc import Iterable, Mapping
from queue import SimpleQueue
from typing import Any

from kvrs.config.cluster import NodeSettings
from kvrs.config.file import Config, read_secret
from kvrs.errors import ConfigError, KvrsError
from kvrs.ids import InstanceId, NodeId
from kvrs.protocol.instance import ExitReport
from kvrs.protocol.secrets import derive
from kvrs_lab.cluster.exits import Ended
from kvrs_lab.cluster.guard import PATIENCE_S
from kvrs_lab.cluster.placing import Machine, faults_of_ray, host_of, moved, place
from kvrs_lab.cluster.processes import START_TIMEOUT_S, LaunchError, Process, Progress, processes_of
from kvrs_lab.cluster.run_directory import RunDirectory
from kvrs_lab.cluster.supervised import MachineSupervisor, ProcessStatus

_ANSWER_S = 10.0
_JOIN_S = 1.0
_EXITS = "exits"  # Concurrency group of waiting calls to an actor.
# The number of starts at another machine continues above all seen numbers.
_STARTS_UNSEEN = 1000


class NodeSupervisor(MachineSupervisor):
    """The supervisor of one node. Calls are serial; `next_exit` has its own thread."""

    def __init__(self, node: NodeId) -> None:
        self._node = node
        self._exits: SimpleQueue[tuple[InstanceId, ExitReport] | None] = SimpleQueue()
        super().__init__(RunDirectory(), {}, lambda *news: self._exits.put(news))

    def begin(self, config: Config, starts: int, secret_mark: str) -> str | None:
        """Start the node's processes; return the reason of a failure, or None. `starts` is the
        number of earlier starts at any machine.
        """
        try:
            # The guard must survive this process, which Ray ends with all its children.
            self._run.guard(config, apart=True)
            if mark_of(read_secret(config.security, os.environ)) != secret_mark:
                return "the secret there is another one; allowed: the same at all machines"
            self.learn(config)
            processes = [each for each in processes_of(config) if each.node == self._node]
            self.start(processes, config, starts)
        except KvrsError as error:
            return str(error)
        return None

    def next_exit(self) -> tuple[InstanceId, ExitReport] | None:
        """Wait for the end of an instance's process; None: `stop` was called."""
        return self._exits.get()

    def stop(self) -> None:
        """End all processes, and remove all files."""
        self._exits.put(None)
        super().stop()
        self._run.close()  # Waits for the shell that started the guard.
        give_up_s = time.monotonic() + PATIENCE_S
        while self._run.path.exists() and time.monotonic() < give_up_s:
            time.sleep(0.05)


def mark_of(secret: bytes) -> str:
    """A digest to compare secrets, which reveals nothing else."""
    return derive(secret, b"kvrs-ray")[:16].hex()


class RemoteSupervisor:
    """Supervises a cluster on Ray: `join`, `start`, then `look` until `stop`, in one thread."""

    def __init__(self, address: str, progress: Progress, ended: Ended) -> None:
        """Create a supervisor; `ended` is called from other threads."""
        self._address, self._progress, self._ended = address, progress, ended
        self._following: list[threading.Thread] = []
        self._placed: dict[NodeId, Machine] = {}
        self._actors: dict[NodeId, Any] = {}
        self._status: dict[InstanceId, ProcessStatus] = {}
        self._nodes: list[NodeSettings] = []
        self._node_of: dict[InstanceId, NodeId] = {}
        self._runs = False

    def join(self, config: Config) -> Config:
        """Join Ray and place all nodes; return the configuration with their addresses.

        Raises:
            ConfigError: the configuration cannot run on Ray, or a node has no machine.
            LaunchError: Ray does not answer.
        """
        if faults := [*faults_of_ray(config)]:
            raise ConfigError(faults)
        self._mark = mark_of(read_secret(config.security, os.environ))
        import ray

        try:
            ray.init(address=self._address, log_to_driver=False, logging_level=logging.CRITICAL)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            raise LaunchError(f"no Ray at {self._address}: {error}") from None
        self._runs = True
        self._nodes = config.cluster.nodes
        self._placed = place(self._nodes, _machines(), {})
        if lacking := [node for node in self._nodes if node.id not in self._placed]:
            known = ", ".join(sorted(machine.address for machine in _machines()))
            raise ConfigError(
                [
                    f"cluster.nodes: node {node.id!r}: no machine of Ray has {_wanted(node)}; "
                    f"machines: {known}"
                    for node in lacking
                ]
            )
        for node, machine in self._placed.items():
            self._progress(f"node {node} lies on {machine.address}")
        return moved(config, self._placed)

    def start(self, processes: Iterable[Process], config: Config) -> None:
        """Start the processes. Raises LaunchError: a machine cannot start its processes."""
        self._node_of = {process.name: process.node for process in processes}
        self._create(config, self._placed, 0)

    def _create(self, config: Config, placed: Mapping[NodeId, Machine], starts: int) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        started = {}
        supervisor = ray.remote(concurrency_groups={_EXITS: 1})(NodeSupervisor)
        for node, machine in placed.items():
            at = NodeAffinitySchedulingStrategy(machine.id, soft=False)
            # Ray must not restart an actor, since it may choose another machine.
            options = {"num_cpus": 0, "max_restarts": 0, "scheduling_strategy": at}
            actor = self._actors[node] = supervisor.options(**options).remote(node)
            started[node] = actor.begin.remote(config, starts, self._mark)
        for node, reference in started.items():
            where = f"node {node} at {placed[node].address}"
            try:
                fault = ray.get(reference, timeout=START_TIMEOUT_S)
            except ray.exceptions.RayError as error:
                raise LaunchError(f"{where}: {_last_line(error)}") from None
            if fault is not None:
                raise LaunchError("\n".join(f"{where}: {line}" for line in fault.splitlines()))
            following = threading.Thread(
                target=self._follow,
                args=(self._actors[node],),
                name=f"exits of {node}",
                daemon=True,
            )
            self._following.append(following)
            following.start()

    def _follow(self, actor: Any) -> None:
        """Report the ends of an actor's processes, until the actor ends."""
        import ray

        next_exit = actor.next_exit.options(concurrency_group=_EXITS)
        try:
            while (news := ray.get(next_exit.remote())) is not None:
                self._ended(*news)
        except ray.exceptions.RayError:
            return

    def look(self, config: Config) -> Config | None:
        """Place lost nodes again and start their processes; return the configuration with their new
        addresses, if any.

        Raises:
            LaunchError: Ray does not answer any more.
        """
        machines = _machines()
        alive = {machine.id for machine in machines}
        self.status()
        lost = [
            node
            for node, machine in self._placed.items()
            if machine.id not in alive or node not in self._actors
        ]
        for node in lost:
            self._progress(f"node {node} is lost with {self._placed.pop(node).address}")
            self._actors.pop(node, None)
        found = place(self._nodes, machines, self._placed)
        if not found:
            return None
        self._placed |= found
        config = moved(config, found)
        starts = max((each.starts for each in self._status.values()), default=0) + _STARTS_UNSEEN
        for node, machine in found.items():
            self._progress(f"node {node} lies on {machine.address} now")
        try:
            self._create(config, found, starts)
        except LaunchError as error:
            for node in found:
                del self._placed[node]
            self._progress(str(error))
            return None
        return config

    def status(self) -> dict[InstanceId, ProcessStatus]:
        """The states of all processes; of an unreachable node, the last known states."""
        import ray

        asked = {node: actor.status.remote() for node, actor in self._actors.items()}
        for node, reference in asked.items():
            try:
                self._status |= ray.get(reference, timeout=_ANSWER_S)
            except ray.exceptions.GetTimeoutError:
                continue
            except ray.exceptions.RayError:  # The actor is gone.
                del self._actors[node]
        return dict(self._status)

    def log_tail(self, name: InstanceId) -> str:
        import ray

        if (actor := self._actors.get(self._node_of[name])) is None:
            return "(its machine is gone)"
        try:
            return str(ray.get(actor.log_tail.remote(name), timeout=_ANSWER_S))
        except ray.exceptions.RayError:
            return "(its machine does not answer)"

    def learn(self, config: Config) -> None:
        """Have all processes read this configuration."""
        for actor in self._actors.values():
            actor.learn.remote(config)

    def stop(self) -> None:
        """End all processes."""
        if not self._runs:
            return
        import ray

        if stopping := [actor.stop.remote() for actor in self._actors.values()]:
            ray.wait(stopping, num_returns=len(stopping), timeout=_ANSWER_S)
        for following in self._following:  # The threads must end before Ray shuts down.
            following.join(_JOIN_S)
        ray.shutdown()


def _machines() -> list[Machine]:
    import ray

    try:
        rows = ray.nodes()
    except (ray.exceptions.RayError, ConnectionError, RuntimeError, OSError) as error:
        raise LaunchError(f"Ray does not answer any more: {_last_line(error)}") from None
    return [
        Machine(row["NodeID"], row["NodeManagerAddress"], row["Resources"])
        for row in rows
        if row["Alive"]
    ]


def _wanted(node: NodeSettings) -> str:
    return f"the address {host_of(node)}" if node.ray is None else f"room for {node.ray!r}"


def _last_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__
