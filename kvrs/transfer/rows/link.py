"""Link of an engine to its node's agent: it passes the engine's memory and ledger, again to each
new agent.
"""

import fcntl
import logging
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kvrs.errors import TransferError
from kvrs.protocol.rows import RegionInfo, RowFrame, encode_region
from kvrs.protocol.secrets import ScopedKey
from kvrs.transfer.rows.ledger import RowLedger
from kvrs.transfer.rows.stream import RowStream

log = logging.getLogger(__name__)

RETRY_S = 1.0
_TIMEOUT_S = 5.0


class RegionLink:
    """A thread that makes the node's agent hold the memory of this process's engine."""

    def __init__(
        self,
        info: RegionInfo,
        memory: int,
        ledger: RowLedger,
        dial: Callable[[], socket.socket],
        key: ScopedKey,
    ) -> None:
        """`memory`: descriptor of the engine's region, owned by the caller. `dial` connects to the
        agent, and raises OSError without one.

        Raises:
            OSError: the memory cannot be opened for reading.
        """
        self._info, self._dial, self._key = info, dial, key
        self._ledger = ledger
        # Read-only descriptors: an agent can write neither file.
        self._shown = [read_only(memory), read_only(ledger.descriptor)]
        # The lock belongs to this process alone: a forked child does not have it, and the kernel
        # releases it at the process's end, although the agent still has the file open. Closing any
        # descriptor of the file would release it, so this process closes none.
        fcntl.lockf(ledger.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
        self._told = ToldOnce(log)
        self._stop = threading.Event()
        self._stream: RowStream | None = None
        self._thread = threading.Thread(target=self._run, name="kvrs-link", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread and its connection; the engine still counts as alive for the agent while
        this process lives.
        """
        self._stop.set()
        if (stream := self._stream) is not None:
            stream.end()
        if self._thread.is_alive():
            self._thread.join(_TIMEOUT_S)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._hold()
            except (OSError, TransferError) as error:
                if not self._stop.is_set():
                    self._told.warn(f"no agent holds the KV of this engine: {error}")
            except Exception:
                log.exception("no agent holds the KV of this engine")
                return
            self._stop.wait(RETRY_S)

    def _hold(self) -> None:
        stream = self._stream = RowStream(self._dial())
        try:
            stream.until(_TIMEOUT_S)
            stream.prove(self._key)
            stream.send_with(self._shown, encode_region(self._info))
            stream.expect(RowFrame.HELD)
            self._told.warn("the agent of this node holds the KV of this engine")
            stream.until(None)
            if not self._stop.is_set():
                stream.receive_head()
        finally:
            self._stream = None
            stream.close()


class ToldOnce:
    """Logs a state unless it equals the state logged last."""

    def __init__(self, log: logging.Logger) -> None:
        self._log, self._last = log, ""

    def warn(self, state: str) -> None:
        if state != self._last:
            self._last = state
            self._log.warning(state)


def read_only(descriptor: int) -> int:
    """Open the descriptor's file anew for reading only, and return that descriptor."""
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)


def unlink_region(path: Path, descriptor: int) -> None:
    """Unlink a region once all its processes have mapped it: memory without a name is never left
    behind. A name that belongs to another file by now is left alone.
    """
    with suppress(FileNotFoundError):
        found, own = os.stat(path), os.fstat(descriptor)
        if (found.st_dev, found.st_ino) == (own.st_dev, own.st_ino):
            os.unlink(path)
