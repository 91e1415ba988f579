"""Client of an agent's row port: it asks which rows the agent holds, and receives their bytes into
the caller's memory. Calls block, up to a deadline; each calling thread has its own connection.

Link of an engine to its node's agent: it passes the engine's memory and ledger, again to each
new agent.
"""

import fcntl
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from kvrs.errors import TransferError
from kvrs.protocol import rows
from kvrs.protocol.rows import RegionInfo, RowFrame, Space, encode_region
from kvrs.protocol.secrets import ScopedKey
from kvrs.transfer.rows.connections import TOO_SLOW, RowStream
from kvrs.transfer.rows.ledger import RowLedger
from kvrs.transfer.rows.tags import RowTags

log = logging.getLogger(__name__)

# Time for which an agent that failed to answer is not asked again.
SILENT_S = 1.0
_BATCH = 256  # Most rows of one LOAD question, so that a lost connection loses few.


class RowClient:
    """Client of one agent's rows of one space, with a connection per calling thread. Threads may
    share it.
    """

    def __init__(
        self,
        name: str,
        dial: Callable[[float], socket.socket],
        key: ScopedKey,
        space: Space,
        tags: RowTags,
        *,
        is_local: bool = False,
    ) -> None:
        """`dial` connects within the given seconds, and raises OSError if no agent listens; `name`
        is for messages. `is_local`: the agent is on this host, so that a row may come with a
        checksum instead of a tag.
        """
        self.name = name
        self._dial, self._key = dial, key
        self._space, self._tags, self._is_local = space, tags, is_local
        self._idle: list[RowStream] = []
        self._lock = threading.Lock()
        self._silent_until_s = 0.0
        self._said = ""

    @property
    def is_usable(self) -> bool:
        return time.monotonic() >= self._silent_until_s

    def find(self, keys: Sequence[bytes], timeout_s: float) -> Sequence[bool]:
        """Ask which rows the agent holds; return for each key whether it does, False for all keys
        that it does not answer in time.
        """
        give_up_s = time.monotonic() + timeout_s
        found: list[bool] = []

        def ask(stream: RowStream) -> None:
            some = keys[len(found) : len(found) + rows.MAX_KEYS]
            stream.send(rows.encode(RowFrame.LOOKUP, some))
            head = stream.expect(RowFrame.FOUND)
            if head.body_bytes != len(some):
                raise TransferError(f"row port: FOUND for {head.body_bytes} of {len(some)} keys")
            found.extend(bool(each) for each in stream.receive_exactly(head.body_bytes))

        for end in _ends(len(keys), rows.MAX_KEYS):
            self._call(ask, give_up_s)
            if len(found) < end:
                break
        return found + [False] * (len(keys) - len(found))

    def load(self, wanted: Sequence[tuple[bytes, memoryview]], timeout_s: float) -> int:
        """Receive the row of each key into its memory, and verify it. Returns the number of leading
        correct rows; the memory of later rows is undefined.
        """
        give_up_s = time.monotonic() + timeout_s
        loaded = 0

        def ask(stream: RowStream) -> None:
            """Load the batch's rows that have not come over an earlier connection."""
            nonlocal loaded
            batch = wanted[loaded:end]
            stream.send(rows.encode(RowFrame.LOAD, [key for key, _ in batch]))
            is_whole = True
            for key, view in batch:
                is_whole &= self._receive(stream, key, view)
                loaded += is_whole

        for end in _ends(len(wanted), _BATCH):
            self._call(ask, give_up_s)
            if loaded < end:
                break
        if loaded and self._said.endswith(TOO_SLOW):
            # Rows have come, so the agent is asked again at once: only the time was too short.
            self._silent_until_s = 0.0
        return loaded

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for stream in idle:
            stream.close()

    def _receive(self, stream: RowStream, key: bytes, view: memoryview) -> bool:
        if (found := stream.receive_row(view)) is None:
            return False
        frame, tag = found
        if frame is RowFrame.CHECKED and self._is_local:
            is_right = rows.checksum(view) == tag
        else:
            is_right = self._tags.is_right(tag, self._space, key, view)
        if not is_right:
            raise TransferError("row port: a row is damaged")
        return True

    def _call(self, ask: Callable[[RowStream], None], give_up_s: float) -> None:
        """Ask on an idle or a new connection, until the time `give_up_s`. If an idle connection
        turns out to belong to an ended agent, the question is repeated once.
        """
        for _ in range(2):
            if not self.is_usable or time.monotonic() >= give_up_s:
                return
            with self._lock:
                stream = self._idle.pop() if self._idle else None
            was_idle = stream is not None
            try:
                if stream is None:
                    stream = self._connected(give_up_s)
                stream.until(give_up_s - time.monotonic())
                ask(stream)
            except (OSError, TransferError) as error:
                if stream is not None:
                    stream.close()
                self.close()
                if was_idle and "lost" in str(error):
                    continue
                self._fail(error)
                return
            with self._lock:
                self._idle.append(stream)
            self._said = ""
            return

    def _connected(self, give_up_s: float) -> RowStream:
        stream = RowStream(self._dial(give_up_s - time.monotonic()))
        try:
            stream.until(give_up_s - time.monotonic())
            stream.prove(self._key)
            stream.choose(self._space)
        except BaseException:
            stream.close()
            raise
        return stream

    def _fail(self, error: Exception) -> None:
        self._silent_until_s = time.monotonic() + SILENT_S
        if str(error) != self._said:
            self._said = str(error)
            log.warning("agent %s gives no rows: %s", self.name, error)


def _ends(count: int, step: int) -> list[int]:
    return [min(end, count) for end in range(step, count + step, step)]


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
