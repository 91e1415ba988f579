"""Runs one agent until SIGTERM or Ctrl-C: `python -m kvrs.agent --config FILE --node ID`.

At SIGHUP it reads the file again for instances of its node that are new.
"""

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import uvloop

from kvrs.agent.server import serve
from kvrs.config.file import Config, load_config, read_secrets
from kvrs.errors import ConfigError
from kvrs.ids import NodeId
from kvrs.process.logs import log_to_stderr
from kvrs.process.memory import collect_nothing_yet


def run_agent(read: Callable[[], Config], node: NodeId) -> None:
    """Serve until SIGTERM or Ctrl-C; prints `ready` once requests are served. `read` reads the
    configuration.

    Raises:
        ConfigError: see `serve`; or there is no secret.
    """
    config = read()
    log_to_stderr(**config.logs.options)
    uvloop.run(_serve(config, node, read_secrets(config.security, os.environ), read))


async def _serve(
    config: Config, node: NodeId, secrets: Sequence[bytes], read: Callable[[], Config]
) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    secret, *older = secrets
    await serve(config, node, secret, stop, lambda: print("ready", flush=True), older, read)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kvrs.agent", description="Run the agent of one node."
    )
    parser.add_argument("--config", type=Path, required=True, help="YAML file with all ports given")
    parser.add_argument(
        "--node", type=NodeId, required=True, help="id of the node in cluster.nodes"
    )
    arguments = parser.parse_args()
    collect_nothing_yet()
    try:
        run_agent(
            partial(load_config, arguments.config, os.environ),
            arguments.node,
        )
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
