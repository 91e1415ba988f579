"""Run one instance by hand: `python -m kvrs_engine.engine --config FILE --instance ID`.

At SIGHUP the instance reads the file again, to learn of new instances. At SIGTERM or Ctrl-C it ends
when its streams have moved (`cluster.drain_s`), at a second signal at once.
"""

import argparse
import asyncio
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

from kvrs.config.file import load_config, read_secrets
from kvrs.errors import ConfigError, MissingExtraError, check_extras
from kvrs.ids import InstanceId
from kvrs.process.logs import log_to_stderr
from kvrs.process.memory import collect_nothing_yet


async def _serve(arguments: argparse.Namespace) -> None:
    check_extras("engine")
    from kvrs_engine.engine.server import serve

    read = partial(load_config, arguments.config, os.environ)
    config = read()
    log_to_stderr(**config.logs.options)
    stop, at_once = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(
            number, lambda: (at_once if stop.is_set() else stop).set()
        )
    secret, *older = read_secrets(config.security, os.environ)
    ready = partial(print, "ready", flush=True)
    name, epoch = arguments.instance, arguments.epoch
    await serve(config, name, epoch, secret, stop, ready, at_once, older, read=read)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kvrs_engine.engine", description="Run one instance of the embedded engine."
    )
    parser.add_argument("--config", type=Path, required=True, help="YAML file with all ports given")
    parser.add_argument(
        "--instance", type=InstanceId, required=True, help="id of the instance in cluster.nodes"
    )
    parser.add_argument(
        "--epoch",
        type=int,
        default=int(time.time()),
        help="rises with every start of the same instance; default: the clock's seconds",
    )
    collect_nothing_yet()
    try:
        asyncio.run(_serve(parser.parse_args()))
    except (ConfigError, MissingExtraError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
