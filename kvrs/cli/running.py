"""Commands that run one process: a proxy, an agent."""

import os
import secrets
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import typer

import kvrs.cli.options as opt
from kvrs.config.cluster import Backend
from kvrs.config.exposure import needs_secret
from kvrs.config.file import ENV_NAME, Config, checked, load_config, load_source, read_secrets
from kvrs.config.origin import (
    CommandLine,
    ConfigFile,
    UpCommand,
    WorkerPlan,
    with_proxy,
    worker_config,
)
from kvrs.errors import ConfigError
from kvrs.ids import NodeId


def command_line(
    config: Path | None,
    prefill: list[str] | None,
    decode: list[str] | None,
    model: str | None,
    backend: str | None,
    of_proxy: Mapping[str, int | str | None],
) -> CommandLine | None:
    """Return the configuration that the command line gives in place of a file; None: a file is
    given.

    Raises:
        ConfigError: neither a file nor a server is given, or both.
    """
    given = {"--prefill": prefill, "--decode": decode, "--model": model, "--backend": backend}
    if config is not None:
        if faults := [
            f"{option}: got {value if isinstance(value, str) else ', '.join(value)} beside "
            f"--config {config}; allowed: one of them (the file names the servers and the model)"
            for option, value in given.items()
            if value
        ]:
            raise ConfigError(faults)
        return None
    if not (prefill or decode):
        raise ConfigError(
            "--decode: missing; allowed: URLs of servers, as --prefill http://a:8100 --decode "
            "http://b:8200 --decode http://c:8200, or --config FILE"
        )
    engine = Backend(backend or Backend.VLLM)
    return CommandLine(prefill or [], decode or [], model, engine, dict(of_proxy))


def secrets_of_proxy(config: Config, environ: MutableMapping[str, str]) -> list[bytes]:
    """Return the cluster's secrets. A proxy that shares no secret with another process makes its
    own, and passes it to its workers in `environ`.

    Raises:
        ConfigError: a shared secret is needed and missing, or a secret is not usable.
    """
    is_set = config.security.secret_file is not None or ENV_NAME in environ
    if not is_set and not needs_secret(config):
        environ[ENV_NAME] = secrets.token_hex(32)
    return read_secrets(config.security, environ)


def proxy(
    config: opt.ProxyFile = None,
    prefill: opt.Prefill = None,
    decode: opt.Decode = None,
    model: opt.ProxyModel = None,
    backend: opt.StockBackend = None,
    host: opt.Host = None,
    port: opt.Port = None,
    admin_port: opt.AdminPort = None,
    workers: opt.Workers = None,
    no_env: opt.NoEnv = False,
    launch: opt.LaunchJson = None,
    worker: opt.WorkerJson = None,
) -> None:
    """Run one proxy in front of instances that are already up."""
    import uvloop

    from kvrs.cli.feasibility import check_all, faults_of_start
    from kvrs.process.logs import log_to_stderr
    from kvrs.proxy.server import serve

    plan = None if worker is None else msgspec.json.decode(worker, type=WorkerPlan)
    launched = None if launch is None else msgspec.json.decode(launch, type=UpCommand)
    asked = {"host": host, "port": port, "admin_port": admin_port, "workers": workers}
    line = command_line(config, prefill, decode, model, backend, asked)
    environ = None if no_env else os.environ

    def read_whole() -> Config:
        source = load_source(config, environ) if line is None else line.source(environ)
        given = with_proxy(checked(source), asked)
        # Only for files that operators write: a file of `kvrs lab up` has every key.
        if launched is None:
            check_all(source, faults_of_start(given, os.environ))
        return given

    def read_config() -> Config:
        whole = read_whole()
        return whole if plan is None else worker_config(whole, plan)

    file = ConfigFile(config, read_config, launched, line)
    settings = read_config()
    if faults := [*_without_ports(settings)]:
        raise ConfigError(faults)
    facts = {} if plan is None else {"worker": settings.proxy.id}
    log_to_stderr(**settings.logs.options, **facts)
    secret, *older = secrets_of_proxy(settings, os.environ)
    supervisor = None
    if settings.proxy.workers > 1:
        from kvrs.proxy.process.workers import supervise

        # Command of a worker: that of this process, to which the worker's plan is added.
        command = (sys.executable, "-m", "kvrs", *sys.argv[1:], "--worker")
        raise typer.Exit(supervise(settings, command))
    if plan is not None:
        from kvrs.proxy.process.workers import Supervisor

        supervisor = Supervisor()
    watched = config if settings.proxy.reload_on_change else None
    uvloop.run(serve(settings, secret, older, file, watched, supervisor))


def _without_ports(config: Config) -> Iterator[str]:
    """Yield the instances and agents whose port is 0: a proxy cannot reach a running process
    without it.
    """
    # A stock engine needs no `page_port`: each hand-off names the port of its pages.
    needed = ("port",) if config.cluster.backend.is_stock else ("port", "page_port")
    for _, instance in config.cluster.instances():
        for key in needed:
            if not getattr(instance, key):
                yield (
                    f"instance {instance.id}: {key} is 0; allowed: the port it listens on, since "
                    f"it is already up"
                )
    for node in config.cluster.nodes if config.agents_run else ():
        for key in ("port", "page_port"):
            if not getattr(node.agent, key):
                yield (
                    f"agent of node {node.id}: {key} is 0; allowed: the port it listens on, or "
                    f"backup.mode: off and no gossip"
                )


def agent(
    config: opt.ConfigFile,
    node: Annotated[str, typer.Option(help="Id of the agent's node in cluster.nodes")],
) -> None:
    """Run the agent of one node; it keeps checkpoints of KV in host memory."""
    from kvrs.agent.__main__ import run_agent
    from kvrs.agent.node import node_of

    read = partial(load_config, config, os.environ)
    settings = read()
    given = node_of(settings, NodeId(node)).agent
    if not (given.port and given.page_port):
        raise ConfigError(
            f"agent of node {node}: its port or page_port is 0; allowed: the ports "
            f"at which other processes reach it"
        )
    run_agent(read, NodeId(node))
