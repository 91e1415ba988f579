"""The processes of a cluster by backend, without the proxies."""

import argparse
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import NoReturn, assert_never

import msgspec

from kvrs.config.cluster import Backend
from kvrs.config.file import Config
from kvrs.errors import ConfigError, KvrsError
from kvrs.ids import InstanceId, NodeId

# Longest wait of `kvrs lab up` for a process to start.
START_TIMEOUT_S = 600.0
_CONVERSION_S = 1800.0  # DistServe converts a model's weights before their first load.

Progress = Callable[[str], object]  # Takes a line about progress.


class LaunchError(KvrsError):
    """A cluster did not start, or cannot continue. The message names the process and ends with its
    last log lines.
    """


class Kind(StrEnum):
    INSTANCE = "instance"  # Embedded engine.
    STAGE = "stage host"  # Stage of an instance whose own process is elsewhere.
    AGENT = "agent"
    SERVER = "DistServe server"  # Both instances of a node.


class Process(msgspec.Struct, frozen=True):
    name: InstanceId
    node: NodeId
    kind: Kind
    start_timeout_s: float

    @property
    def label(self) -> str:
        match self.kind:
            case Kind.INSTANCE:
                return f"instance {self.name}"
            case Kind.STAGE:
                return f"stage host {self.name}"
            case Kind.AGENT:
                return str(self.name)
            case Kind.SERVER:
                return f"DistServe on node {self.node}"
            case _:
                assert_never(self.kind)


def processes_of(config: Config) -> list[Process]:
    """List the processes. Raises ConfigError: kvrs cannot start engines of this backend."""
    return list(_processes(config))


def _processes(config: Config) -> Iterator[Process]:
    cluster, start_s = config.cluster, START_TIMEOUT_S
    match cluster.backend:
        case Backend.EMBEDDED:
            for node, instance in cluster.instances():
                yield Process(instance.id, node.id, Kind.INSTANCE, start_s)
                for stage, host in instance.remote_stages.items():
                    name = instance.stage_host_id(stage)
                    yield Process(name, host.node, Kind.STAGE, start_s)
        case Backend.DISTSERVE:
            for node in cluster.nodes:
                name, server_s = InstanceId(f"server-{node.id}"), _CONVERSION_S
                yield Process(name, node.id, Kind.SERVER, server_s)
        case Backend.VLLM | Backend.SGLANG as stock:
            raise ConfigError(
                f"cluster.backend: got {stock.value!r}; allowed for `kvrs lab up`: 'embedded', "
                f"'distserve' (see `kvrs docs {stock.value}`)"
            )
        case _:
            assert_never(cluster.backend)
    if config.agents_run:
        for node in cluster.nodes:
            yield Process(node.agent_id, node.id, Kind.AGENT, start_s)


def instances_in(config: Config, process: Process) -> list[InstanceId]:
    """The instances that end with the process. A stage host ends none."""
    match process.kind:
        case Kind.INSTANCE:
            return [process.name]
        case Kind.SERVER:
            found = config.cluster.instances()
            return [instance.id for node, instance in found if node.id == process.node]
        case Kind.STAGE | Kind.AGENT:
            return []
        case _:
            assert_never(process.kind)


def has_ranks(config: Config, process: Process) -> bool:
    """Return whether the process has rank processes below it."""
    return process.kind is Kind.STAGE or any(
        instance.ranks > 1 and instance.own_stages
        for _, instance in config.cluster.instances()
        if instance.id == process.name
    )


def has_spare(config: Config, process: Process) -> bool:
    """Return whether a spare successor is made and loaded beforehand, since memory outlives the
    process. The memory of ranks ends with their instance.
    """
    if process.kind is not Kind.INSTANCE or not config.state_plane.enabled:
        return False
    _, instance = config.cluster.find(process.name)
    return instance.ranks == 1


def gpus_of(config: Config) -> int | None:
    """The logical GPUs that DistServe's workers need without real GPUs; None: Ray counts real ones.

    Raises:
        ConfigError: a flag of DistServe has no number.
    """
    if config.cluster.backend is not Backend.DISTSERVE or config.cluster.engine.device != "cpu":
        return None
    parser = _Parser(allow_abbrev=False, add_help=False)
    for stage in ("context", "decoding"):
        for kind in ("tensor", "pipeline"):
            parser.add_argument(f"--{stage}-{kind}-parallel-size", type=int, default=1)
    flags, _ = parser.parse_known_args(config.cluster.distserve.flags)
    workers = flags.context_tensor_parallel_size * flags.context_pipeline_parallel_size
    workers += flags.decoding_tensor_parallel_size * flags.decoding_pipeline_parallel_size
    return int(workers) * len(config.cluster.nodes)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"cluster.distserve.flags: {message}")
