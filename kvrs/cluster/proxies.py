"""The proxies of a cluster: one process each, brought back at the same ports whenever it ends."""

import contextlib
import http.client
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable

from kvrs.errors import KvrsError
from kvrs.proxy.config import ProxySettings

LOOK_INTERVAL_S = 0.05
# A proxy that ends before it has taken a request is started again so often, each time after twice the pause,
QUICK_ENDS = 5
FIRST_PAUSE_S = 0.25
# and then, for others may serve meanwhile and its file may be changed, after this one.
LONG_PAUSE_S = 5.0


class ProxyError(KvrsError):
    """A proxy ends whenever it is started; the message names it and ends with its last log lines."""


class ProxyProcess:
    """One proxy, kept running by a thread of its own from `start` to `close`."""

    def __init__(
        self,
        settings: ProxySettings,
        spawn: Callable[[], subprocess.Popen[bytes]],
        log_tail: Callable[[], str],
    ) -> None:
        self.settings = settings
        self._spawn = spawn
        self._log_tail = log_tail
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()  # Nobody is started once the end has begun.
        self._closing = threading.Event()
        self._served = threading.Event()
        self.fault: str | None = None  # Why it cannot be brought back, as long as it cannot.
        self._thread = threading.Thread(target=self._keep, name=settings.id, daemon=True)

    @property
    def url(self) -> str:
        return f"http://{self.settings.host}:{self.settings.port}"

    @property
    def admin_url(self) -> str:
        return f"http://{self.settings.host}:{self.settings.admin_port}"

    @property
    def pid(self) -> int | None:
        """Of the process that there is, or was last."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        self._thread.start()

    def served(self) -> bool:
        """Whether it ever took requests."""
        return self._served.is_set()

    def check(self) -> None:
        """Raises ProxyError: it cannot be brought back."""
        if self.fault is not None:
            raise ProxyError(self.fault)

    def signal(self, number: signal.Signals) -> int:
        """To the process that there is; its id. It will be brought back if it ends of it."""
        with self._lock:
            assert self._process is not None
            self._process.send_signal(number)
            return self._process.pid

    def tell_to_end(self) -> None:
        """Without a successor, and without waiting for its streams: everything ends."""
        with self._lock:
            self._closing.set()
            if self._process is not None:
                # Two different ones, because two of a kind may arrive as one.
                self._process.send_signal(signal.SIGTERM)
                self._process.send_signal(signal.SIGINT)

    def wait(self, timeout_s: float) -> None:
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(max(0.0, timeout_s))

    def _keep(self) -> None:
        quick_ends = 0
        while not self._closing.is_set():
            try:
                if (process := self._start_one()) is None:
                    return
                quick_ends = 0 if self._see_it_serve(process) else quick_ends + 1
                end = f"ended with status {process.wait()}"
            except OSError as error:
                quick_ends, end = quick_ends + 1, f"cannot be started: {error}"
            if self._closing.is_set() or not quick_ends:
                continue
            if is_hopeless := quick_ends >= QUICK_ENDS or not self.served():
                often = "" if quick_ends == 1 else f", {quick_ends} times before it took a request"
                self.fault = f"{self.settings.id} {end}{often}\n{self._log_tail()}"
            if not self.served():
                return  # What cannot be started at all is a mistake of the user's, and better told at once.
            self._closing.wait(LONG_PAUSE_S if is_hopeless else FIRST_PAUSE_S * 2 ** (quick_ends - 1))

    def _start_one(self) -> subprocess.Popen[bytes] | None:
        with self._lock:
            if self._closing.is_set():
                return None
            self._process = self._spawn()
            return self._process

    def _see_it_serve(self, process: subprocess.Popen[bytes]) -> bool:
        """Wait until it takes requests, or ends before it does."""
        while process.poll() is None:
            with (
                contextlib.suppress(OSError, http.client.HTTPException),
                urllib.request.urlopen(f"{self.admin_url}/healthz", timeout=1),  # noqa: S310 - our own URL
            ):
                self._served.set()
                self.fault = None
                return True
            time.sleep(LOOK_INTERVAL_S)
        return False
