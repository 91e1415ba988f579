"""DistServe's server with the additions of kvrs: a prefill and a decode instance of the cluster.

    python -m distserve_patches.api_server <DistServe's own flags> --kvrs-config FILE --kvrs-node
    NODE

The server prints "ready" once both instances take requests, and serves until SIGTERM or Ctrl-C.
Hosts and ports come from the file.
"""

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from distserve_patches import upstream
from kvrs.config.cluster import Backend, NodeSettings
from kvrs.config.file import Config, load_config, read_secrets
from kvrs.errors import ConfigError, KvrsError
from kvrs.ids import NodeId
from kvrs.net.http import naming_port
from kvrs.process.logs import log_to_stderr
from kvrs.protocol.instance import Role
from kvrs_engine.engine.model_config import ModelConfig
from kvrs_engine.engine.nursery import die_with_parent

if TYPE_CHECKING:
    from distserve_patches.server import Launch

# Upstream's default exceeds a laptop's memory; the tiny model needs no swap space.
_SWAP_SPACE_OFF_GPU_GB = 1


class _FlagParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        _serve(sys.argv[1:] if arguments is None else arguments)
    except KvrsError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _serve(arguments: Sequence[str]) -> None:
    parser = _FlagParser(
        prog="python -m distserve_patches.api_server",
        description=__doc__,
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument(
        "--kvrs-config", type=Path, required=True, help="YAML file with all ports given"
    )
    parser.add_argument(
        "--kvrs-node", type=NodeId, required=True, help="id of the node in cluster.nodes"
    )
    parser.add_argument(
        "--epoch",
        type=int,
        default=int(time.time()),
        help="rises with every start for the same node; default: the clock's seconds",
    )
    parser.add_argument(
        "--end-with", type=int, metavar="PID", help="end when this process, which started us, ends"
    )
    wants_help = bool({"-h", "--help"} & set(arguments))
    if wants_help and "--kvrs-config" not in arguments:
        print(
            parser.format_help()
            + "\nWith --kvrs-config FILE the flags of DistServe itself are shown too."
        )
        return
    ours, _ = parser.parse_known_args(arguments)
    if ours.end_with is not None:
        die_with_parent(ours.end_with)
    config = load_config(ours.kvrs_config)
    node = _node(config, ours.kvrs_node)
    off_gpu = config.cluster.engine.device == "cpu"
    upstream.load(
        off_gpu=off_gpu,
        logical_gpu_bytes=_logical_gpu_bytes(config),
        pace=config.cluster.engine.pace,
    )
    _add_flags(parser, config, off_gpu=off_gpu)
    if wants_help:
        print(parser.format_help())
        return
    flags = parser.parse_args(arguments)
    _check(flags, config, node)
    log_to_stderr()
    # Upstream logs every step, and a status every second.
    logging.getLogger("distserve").setLevel(logging.WARNING)

    from distserve_patches.server import Launch

    secret, *older = read_secrets(config.security, os.environ)
    _run(Launch(config, node, flags, ours.epoch, secret, off_gpu, older))


def _run(launch: "Launch") -> None:
    import ray

    from distserve_patches.engine import RecoverableEngine
    from distserve_patches.server import Server, describe_model
    from distserve_patches.worker import PageWorker

    flags = launch.flags
    wanted_gpus = _wanted_gpus(flags)
    _start_ray(wanted_gpus, off_gpu=launch.off_gpu)
    upstream.use_worker(PageWorker)
    # The event loop must not run yet, since upstream starts its own.
    try:
        engine = RecoverableEngine.from_args(flags)
    except (AssertionError, ValueError) as error:
        raise ConfigError(f"DistServe refuses its flags: {error}") from error
    model = describe_model(launch, engine.geometry)

    async def serve() -> None:
        stop = asyncio.Event()
        # Ray takes some signals for itself, so the handlers come later.
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await Server(launch, engine, model).serve(stop, lambda: print("ready", flush=True))

    try:
        asyncio.run(serve())
    finally:
        ray.shutdown()


def _start_ray(wanted_gpus: int, *, off_gpu: bool) -> None:
    """Join the Ray of RAY_ADDRESS or of this machine, or start one.

    Raises:
        ConfigError: Ray has fewer GPUs.
        KvrsError: Ray does not start, or does not answer.
    """
    # Upstream reads the answer of one rank; other ranks' errors are expected when a stage dies.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    import ray

    quiet = {"log_to_driver": False, "logging_level": logging.WARNING}
    try:
        if off_gpu and "RAY_ADDRESS" not in os.environ:
            logical = {"num_cpus": 1, "num_gpus": wanted_gpus, "object_store_memory": 80 << 20}
            ray.init(include_dashboard=False, _node_ip_address="127.0.0.1", **logical, **quiet)
        else:
            ray.init(**quiet)
    except Exception as error:  # Ray raises the base class when its processes are too slow.
        raise KvrsError(f"Ray: {' '.join(str(error).split()):.300}") from error
    has_gpus = int(ray.cluster_resources().get("GPU", 0))
    if has_gpus < wanted_gpus:
        raise ConfigError(
            f"the flags ask for {wanted_gpus} GPUs; allowed: at most the {has_gpus} that Ray has"
        )


def _wanted_gpus(flags: argparse.Namespace) -> int:
    context = flags.context_tensor_parallel_size * flags.context_pipeline_parallel_size
    return int(
        context + flags.decoding_tensor_parallel_size * flags.decoding_pipeline_parallel_size
    )


def _node(config: Config, wanted: NodeId) -> NodeSettings:
    if config.cluster.backend is not Backend.DISTSERVE:
        raise ConfigError(
            f"cluster.backend: got {config.cluster.backend.value!r}; allowed here: 'distserve'"
        )
    for node in config.cluster.nodes:
        if node.id == wanted:
            if all(instance.role is not Role.PREFILL for instance in node.instances):
                raise ConfigError(
                    f"cluster.nodes: node {wanted!r} has no prefill instance; allowed here: both"
                )
            return node
    allowed = ", ".join(node.id for node in config.cluster.nodes)
    raise ConfigError(f"--kvrs-node: {wanted!r} is not in cluster.nodes; allowed: {allowed}")


def _add_flags(parser: argparse.ArgumentParser, config: Config, *, off_gpu: bool) -> None:
    """Add DistServe's own flags."""
    import distserve.engine

    distserve.engine.add_engine_cli_args(parser)
    engine = config.cluster.engine
    parser.set_defaults(model=config.cluster.model, block_size=engine.page_size_tokens)
    if off_gpu:
        parser.set_defaults(swap_space=_SWAP_SPACE_OFF_GPU_GB)
    for action in parser._actions:
        if action.dest == "model":
            action.required = False


def _check(flags: argparse.Namespace, config: Config, node: NodeSettings) -> None:
    """Check the flags before anything is loaded.

    Raises:
        ConfigError: a flag cannot work.
    """
    _check_model(flags, config)
    model = ModelConfig.from_directory(Path(flags.model))
    for stage in ("context", "decoding"):
        for kind, parts, what in (
            ("tensor", model.kv_heads, "KV heads"),
            ("pipeline", model.layers, "layers"),
        ):
            size = getattr(flags, f"{stage}_{kind}_parallel_size")
            if size < 1 or parts % size:
                name = f"--{stage}-{kind}-parallel-size"
                raise ConfigError(
                    f"{name}: got {size}; allowed: a divisor of the model's {parts} {what}"
                )
    for instance in node.instances:
        for key, host, port in (
            ("port", instance.bound(instance.host), instance.port),
            ("page_port", instance.bound(instance.host), instance.page_port),
        ):
            name = f"instance {instance.id}"
            if not port:
                raise ConfigError(f"{name}: {key} is 0; allowed: the port at which peers reach it")
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            with naming_port(name, key, host, port), socket.socket(family) as trial:
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                trial.bind((host, port))


def _check_model(flags: argparse.Namespace, config: Config) -> None:
    if flags.model is None:
        raise ConfigError("cluster.model: missing; allowed: a Hugging Face directory")
    if (
        config.cluster.model is not None
        and Path(flags.model).resolve() != Path(config.cluster.model).resolve()
    ):
        raise ConfigError(
            f"--model: got {flags.model}; allowed: cluster.model, which is {config.cluster.model}"
        )
    if not (Path(flags.model) / "config.json").is_file():
        raise ConfigError(
            f"--model: {flags.model} has no config.json; allowed: a Hugging Face model directory"
        )


def _logical_gpu_bytes(config: Config) -> int:
    """Memory of a logical GPU by which a stage gets about `cluster.engine.pages` blocks."""
    if config.cluster.model is None:
        return upstream.LOGICAL_GPU_BYTES
    model = ModelConfig.from_directory(Path(config.cluster.model))
    engine = config.cluster.engine
    page_bytes = 2 * 4 * model.layers * model.kv_heads * model.head_dim * engine.page_size_tokens
    # Upstream's estimate of the weights.
    weights = model.hidden * (
        model.vocab + model.max_positions + model.layers * (12 * model.hidden + 5)
    )
    return int((engine.pages * page_bytes + 4 * weights) / 0.89) + page_bytes


if __name__ == "__main__":
    sys.exit(main())
