"""The process of one worker."""

import os
import socket
import sys
from pathlib import Path

import uvloop

from kvrs.config.file import Config, load_config, read_secrets
from kvrs.config.workers import with_workers, worker_config
from kvrs.errors import ConfigError
from kvrs.logs import log_to_stderr
from kvrs.proxy.reload import fleet_orders, with_nodes
from kvrs.proxy.server import serve
from kvrs.proxy.workers.link import WorkerLink
from kvrs.proxy.workers.messages import WorkerPlan


def main(descriptor: int) -> None:
    """Run until the supervisor ends it; exits with status 2 where the configuration is wrong."""
    try:
        uvloop.run(_work(socket.socket(fileno=descriptor)))
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


async def _work(end: socket.socket) -> None:
    link = WorkerLink()
    plan = await link.open(end)
    config = _read(plan)
    link.orders = orders = fleet_orders(config)
    orders.take(plan.orders)
    config = with_nodes(config, orders.over())
    log_to_stderr(**config.logs.options, worker=config.proxy.id)
    link.others = frozenset(plan.names) - {config.proxy.id}
    secret, *older = read_secrets(config.security, os.environ)
    await serve(config, secret, older, lambda: _read(plan), link)


def _read(plan: WorkerPlan) -> Config:
    """Raises ConfigError."""
    found = load_config(Path(plan.path), None if plan.no_env else os.environ)
    whole = with_workers(found, len(plan.names))
    return worker_config(whole, plan.worker, plan.port, plan.peer_ports)
