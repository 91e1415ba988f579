"""The proxies of a cluster: one process each, restarted at the same ports whenever it ends."""

import contextlib
import signal
import subprocess
import threading
import time
from collections.abc import Callable

from kvrs.config.proxy import ProxySettings
from kvrs.config.settings import netloc
from kvrs.errors import KvrsError
from kvrs.load.admin import AdminClient, AdminError

LOOK_INTERVAL_S = 0.05
_LOOK_TIMEOUT_S = 1.0
# A proxy that ends before it has taken a request is restarted this often, each time after twice the
# pause,
QUICK_ENDS = 5
FIRST_PAUSE_S = 0.25
# and from then on after this pause: others may serve meanwhile, and its file may be mended.
LONG_PAUSE_S = 5.0


class ProxyError(KvrsError):
    """A proxy ends whenever it is started; the message has its name and last log lines."""


class ProxyProcess:
    """One proxy, kept running by a thread of its own from `start` to `close`."""

    def __init__(
        self,
        settings: ProxySettings,
        spawn: Callable[[], subprocess.Popen[bytes]],
        log_tail: Callable[[], str],
        admin_token: bytes | None = None,
    ) -> None:
        self.settings = settings
        self._spawn = spawn
        self._log_tail = log_tail
        self._admin_token = admin_token
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()  # No process is started after `stop` has begun.
        self._closing = threading.Event()
        self._served = threading.Event()
        self.fault: str | None = None  # Why it cannot be restarted, while it cannot.
        self._thread = threading.Thread(target=self._keep, name=settings.id, daemon=True)

    @property
    def url(self) -> str:
        scheme = "http" if self.settings.tls is None else "https"
        return f"{scheme}://{netloc(self.settings.host, self.settings.port)}"

    @property
    def admin_url(self) -> str:
        return self.admin.url

    @property
    def admin(self) -> AdminClient:
        return self.admins[0]

    @property
    def admins(self) -> list[AdminClient]:
        """The admin port of the proxy, or of each of its workers."""
        settings = self.settings
        scheme = "http" if settings.admin_tls is None else "https"
        urls = [
            f"{scheme}://{netloc(settings.admin_host, port)}"
            for port in settings.ports_of("admin_port")
        ]
        return [AdminClient(url, self._admin_token, settings.admin_tls) for url in urls]

    @property
    def pid(self) -> int | None:
        """The process id, of the last process if there is none."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        self._thread.start()

    def served(self) -> bool:
        """The proxy has accepted requests at least once."""
        return self._served.is_set()

    def check(self) -> None:
        """Raises ProxyError: it cannot be restarted."""
        if self.fault is not None:
            raise ProxyError(self.fault)

    def signal(self, number: signal.Signals) -> int:
        """Signal the process; return its id. It is restarted if it ends."""
        with self._lock:
            assert self._process is not None
            self._process.send_signal(number)
            return self._process.pid

    def stop(self) -> None:
        """End the process without a successor and without draining."""
        with self._lock:
            self._closing.set()
            if self._process is not None:
                # Two different signals, because two of a kind may arrive as one.
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
                quick_ends = 0 if self._wait_until_served(process) else quick_ends + 1
                end = f"ended with status {process.wait()}"
            except OSError as error:
                quick_ends, end = quick_ends + 1, f"cannot be started: {error}"
            if self._closing.is_set() or not quick_ends:
                continue
            if is_hopeless := quick_ends >= QUICK_ENDS or not self.served():
                often = "" if quick_ends == 1 else f", {quick_ends} times before it took a request"
                self.fault = f"{self.settings.id} {end}{often}\n{self._log_tail()}"
            if not self.served():
                # A proxy that never served has a wrong configuration, which is reported at once.
                return
            self._closing.wait(
                LONG_PAUSE_S if is_hopeless else FIRST_PAUSE_S * 2 ** (quick_ends - 1)
            )

    def _start_one(self) -> subprocess.Popen[bytes] | None:
        with self._lock:
            if self._closing.is_set():
                return None
            self._process = self._spawn()
            return self._process

    def _wait_until_served(self, process: subprocess.Popen[bytes]) -> bool:
        """Wait until it accepts requests, or ends before; True if it accepts them."""
        while process.poll() is None:
            with contextlib.suppress(AdminError):
                self.admin.get("/healthz", _LOOK_TIMEOUT_S)
                self._served.set()
                self.fault = None
                return True
            time.sleep(LOOK_INTERVAL_S)
        return False
