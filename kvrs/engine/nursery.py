"""Makes the processes of an instance before they are needed.

`python -m kvrs.engine.nursery --config FILE --instance ID --line FD` imports what an engine needs
and forks, which takes milliseconds. Each message on its line brings a descriptor, the line of a new
process; that process loads the model and serves when it is told the number of its start. Until then
it is a spare, with its weights mapped.

    to a process:  "start N"; then "stop" (drain and end), "learn" (read the file again for peers
                   that are new); a closed line ends it at once
    from it:       "ready", once it takes requests; "fault TEXT", before it ends, where a start of
                   the same configuration would end likewise
    for it:        "exit STATUS", from the nursery, when it has ended; 0: it has drained

A nursery ends when its line is closed; its processes do not.
"""

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
import traceback
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch

from kvrs.config.file import Config, load_config, read_secrets
from kvrs.engine.forking import tend
from kvrs.engine.instance import LoadedModel
from kvrs.engine.server import serve
from kvrs.errors import KvrsError
from kvrs.garbage import collect_nothing_yet
from kvrs.ids import InstanceId
from kvrs.logs import log_to_stderr

log = logging.getLogger("kvrs.engine.nursery")  # Not of the module that is run.

MAX_MESSAGE_BYTES = 1 << 16


class Spare:
    """One process of an instance."""

    def __init__(self, config_path: Path, instance: InstanceId, line: socket.socket) -> None:
        self._config_path, self._instance, self._line = config_path, instance, line
        self._stop = asyncio.Event()
        self._document: bytes | None = None

    def run(self) -> None:
        """Until its line is closed, or it was stopped and has drained."""
        config = self.config()
        log_to_stderr(**config.logs.options)
        secret, *_ = read_secrets(config.security, os.environ)
        loaded = LoadedModel.load(config, self._instance, secret)
        log.info("loaded", extra={"instance": self._instance, "pid": os.getpid()})
        word, _, number = self._line.recv(MAX_MESSAGE_BYTES).decode().partition(" ")
        if word == "start":
            # A running cluster may have changed its settings by now.
            asyncio.run(self._serve(self.config(), int(number), loaded))

    def report_fault(self, fault: str) -> None:
        self._tell(f"fault {fault}")

    def _tell(self, message: str) -> None:
        self._line.send(message.encode()[:MAX_MESSAGE_BYTES])

    def config(self) -> Config:
        """The configuration of the file; it is parsed again only if it has changed.

        Raises:
            ConfigError: it cannot be read, or holds faults.
        """
        document = b""
        with suppress(OSError):  # Which the parser reports.
            document = self._config_path.read_bytes()
        if document != self._document:
            self._config, self._document = load_config(self._config_path), document
        return self._config

    async def _serve(self, config: Config, start: int, loaded: LoadedModel) -> None:
        asyncio.get_running_loop().add_reader(self._line, self._heard)
        ring = read_secrets(config.security, os.environ)
        ready = partial(self._tell, "ready")
        await serve(
            config,
            self._instance,
            start,
            ring[0],
            self._stop,
            ready,
            older=ring[1:],
            loaded=loaded,
            read=self.config,
        )

    def _heard(self) -> None:
        word = self._line.recv(MAX_MESSAGE_BYTES)
        if not word:
            os._exit(1)  # As if it had been killed: its memory stays as it is.
        if word == b"learn":
            signal.raise_signal(signal.SIGHUP)
        else:
            self._stop.set()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m kvrs.engine.nursery", description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--instance", type=InstanceId, required=True)
    parser.add_argument("--line", type=int, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)

    def be_spare(line: socket.socket) -> NoReturn:
        status = 1
        try:
            spare = Spare(given.config, given.instance, line)
            try:
                spare.run()
                status = 0
            except KvrsError as error:
                print(error, file=sys.stderr, flush=True)
                spare.report_fault(str(error))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)

    with socket.socket(fileno=given.line) as line:
        tend(line, be_spare)


collect_nothing_yet()
if __name__ == "__main__":
    main()
