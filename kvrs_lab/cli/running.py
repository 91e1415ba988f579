"""Commands that run a cluster: the demo, and `kvrs lab up`."""

import os
import signal
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import kvrs.cli.options as base
import kvrs_lab.cli.options as opt
from kvrs.cli.common import faults_in, say
from kvrs.config.backup import BackupMode
from kvrs.config.cluster import Backend, NodeSettings, demo_nodes, pipeline_nodes
from kvrs.config.exposure import check_exposure
from kvrs.config.file import Config, Source, checked, config_digest, load_source, parse_config
from kvrs.config.origin import UpCommand
from kvrs.config.policy import PolicyName
from kvrs.config.presets import SystemPreset
from kvrs.errors import ConfigError, KvrsError, check_extras
from kvrs.process.logs import utc_text

if TYPE_CHECKING:
    from kvrs_lab.cluster.launcher import Cluster


def demo(
    policy: Annotated[
        PolicyName,
        typer.Option(metavar=base.POLICY, help=f"How victims are recovered: {base.POLICIES}"),
    ] = PolicyName.AUTO,
    requests: Annotated[int, typer.Option(min=1, max=2000, help="Streams to replay")] = 60,
    trace: opt.DemoTrace = None,
    fault: opt.DemoFault = None,
    out: opt.Out = Path("out/demo"),
) -> None:
    """Start a cluster, kill an instance and a node under load, compare every stream by token."""
    check_extras("engine", "report")
    from kvrs_lab.demo import DemoOptions, run_demo

    options = DemoOptions(
        policy=policy,
        requests=requests,
        trace=trace,
        fault=fault,
        out=out,
    )
    raise typer.Exit(0 if run_demo(options) else 1)


def up(
    config: opt.DemoConfig = None,
    model: base.Model = None,
    nodes: opt.Nodes = None,
    pipelines: opt.Pipelines = None,
    port: base.Port = None,
    admin_port: base.AdminPort = None,
    backend: Annotated[
        opt.StartedEngine | None, typer.Option(help="Engine of the instances; default: embedded")
    ] = None,
    proxies: opt.Proxies = 1,
    preset: base.Preset = None,
    tp: opt.Tp = None,
    pp: opt.Pp = None,
    ray: opt.Ray = None,
) -> None:
    """Run a cluster behind its proxies until Ctrl-C; without --config, with the preset best."""
    from kvrs.tracing.settings import trace_settings
    from kvrs_lab.cluster.launcher import Cluster
    from kvrs_lab.cluster.upkeep import Upkeep

    of_proxy = {"port": port, "admin_port": admin_port}
    settings = _up_config(
        config,
        preset,
        proxies,
        model,
        nodes,
        pipelines,
        of_proxy,
        None if backend is None else Backend(backend),
        {"tp": tp, "pp": pp},
        ray,
    )
    needed = "engine" if ray is None else "ray"
    check_extras("distserve" if settings.cluster.backend is Backend.DISTSERVE else needed)
    trace_settings(os.environ)  # Raises ConfigError, like every process of the cluster.
    launch, upkeep = _launch(config), Upkeep(_log)
    # Every ending signal takes the same path from here on, which always cleans up.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # The end of the terminal must not end a cluster under nohup.
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: upkeep.end())
    if preset is not None:
        _log(preset.line)
    try:
        with Cluster(settings, _log, proxies, ray, launch) as cluster:
            for line in _addresses(cluster):
                _log(line)
            _log("Ctrl-C ends it")
            upkeep.run(cluster)
            _log("ending")
    except KvrsError as error:
        _log(str(error))
        raise typer.Exit(2) from None


def _log(message: str) -> None:
    """Print a message about a cluster that starts or runs, with the time before each line."""
    time_text = utc_text(time.time())
    for line in message.splitlines():
        say(f"{time_text} {line}")


def _addresses(cluster: "Cluster") -> Iterator[str]:
    """A line for each proxy."""
    for number, (url, admin_url) in enumerate(zip(cluster.urls, cluster.admin_urls, strict=True)):
        what = "or at" if number else "kvrs is up:"
        pages = f"{admin_url}/kvrs/v1/state, {admin_url}/ui (page)"
        yield f"{what} {url}/v1 (OpenAI API), {pages}"


def _launch(config: Path | None) -> UpCommand:
    """The row that proxies show for this process, with the file for `kvrs doctor`."""
    file = None if config is None else str(config.resolve())
    settings = checked(load_source(config, os.environ))
    return UpCommand(os.getpid(), file, config_digest(settings))


def _up_config(
    config: Path | None,
    preset: SystemPreset | None,
    proxies: int,
    model: Path | None,
    nodes: int | None,
    pipelines: int | None,
    of_proxy: Mapping[str, int | None],
    backend: Backend | None,
    of_instances: Mapping[str, int | None],
    ray: str | None = None,
) -> Config:
    """The settings of file and preset, or of the demo, overridden by the command line."""
    asked_nodes = _asked_nodes(config, nodes, pipelines, of_instances)
    # Checkpoints slow DistServe down (docs/evidence.md).
    is_plain = preset is None and config is None and backend in (None, Backend.EMBEDDED)
    if is_plain:
        preset = SystemPreset.BEST
    source = load_source(config, os.environ, preset, backend)
    given = checked(source)
    document = given.model_dump(mode="json")
    # Agents share a target's slots among several proxies, which needs gossip.
    if proxies > 1 and "enabled" not in given.gossip.model_fields_set:
        document["gossip"]["enabled"] = True
    if asked_nodes is not None:
        document["cluster"]["nodes"] = [node.model_dump(mode="json") for node in asked_nodes]
        if is_plain and nodes == 1:  # No other node for checkpoints.
            document["backup"]["mode"] = BackupMode.LOCAL.value
    if model is not None:
        document["cluster"]["model"] = _directory("--model", model)
    if backend is not None:
        document["cluster"]["backend"] = backend.value
    for key, value in of_proxy.items():
        if value is not None:
            document["proxy"][key] = value
    _set_degrees(document, of_instances)
    asked = parse_config(document)
    _check_exposure(asked, source)
    return asked


def _asked_nodes(
    config: Path | None,
    nodes: int | None,
    pipelines: int | None,
    of_instances: Mapping[str, int | None],
) -> list[NodeSettings] | None:
    """The nodes of the command line; None: those of the file or demo. Raises ConfigError."""
    given = {"--config": config, "--nodes": nodes, "--pipelines": pipelines}
    of_nodes = [option for option, value in given.items() if value is not None]
    if len(of_nodes) > 1:
        first, last = of_nodes[0], of_nodes[-1]
        raise ConfigError(
            f"{last}: got {given[last]} beside {first}; allowed: one of them (each names the nodes)"
        )
    if pipelines is None:
        return None if nodes is None else demo_nodes(nodes)
    stages, tp = of_instances["pp"] or 1, of_instances["tp"] or 1
    if stages < 2:
        raise ConfigError(
            f"--pipelines: got {pipelines} with --pp {stages}; allowed: with --pp 2 or more"
        )
    if pipelines * stages > opt.MAX_NODES:
        raise ConfigError(
            f"--pipelines: got {pipelines} with --pp {stages}, which are {pipelines * stages} "
            f"nodes; allowed: at most {opt.MAX_NODES}"
        )
    return pipeline_nodes(pipelines, stages, tp)


def _directory(option: str, model: Path) -> str:
    """The absolute path of a model; raises ConfigError."""
    if not (model / "config.json").is_file():
        raise ConfigError(
            f"{option}: {model} has no config.json; allowed: a Hugging Face model directory"
        )
    return str(model.resolve())


def _check_exposure(config: Config, source: Source) -> None:
    """Raises ConfigError, with the places in the file."""
    from kvrs.cli.feasibility import check_all

    check_all(source, [*faults_in(partial(check_exposure, config, os.environ))])


def _set_degrees(document: dict[str, Any], of_instances: Mapping[str, int | None]) -> None:
    for node in document["cluster"]["nodes"]:
        for instance in node["instances"]:
            instance |= {key: value for key, value in of_instances.items() if value is not None}
