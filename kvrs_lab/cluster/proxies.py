"""The proxies of a cluster: one process each, restarted at the same ports after an end."""

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable

from kvrs.config.proxy import ProxySettings
from kvrs.config.settings import netloc
from kvrs.net.admin import AdminClient, AdminError
from kvrs_lab.cluster.supervised import Supervised

LOOK_INTERVAL_S = 0.05
_LOOK_TIMEOUT_S = 1.0
# Pauses after failed starts in turn. After the last pause other proxies may serve.
PAUSES_S = (0.25, 0.5, 1.0, 2.0, 5.0)


class ProxyProcess(Supervised):
    """One proxy, kept running from `start` to `stop`."""

    def __init__(
        self,
        settings: ProxySettings,
        spawn: Callable[[], subprocess.Popen[bytes]],
        log_tail: Callable[[], str],
        admin_token: bytes | None = None,
    ) -> None:
        super().__init__(settings.id, PAUSES_S)
        self.settings = settings
        self._spawn = spawn
        self._log_tail = log_tail
        self._admin_token = admin_token
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        scheme = "http" if self.settings.tls is None else "https"
        return f"{scheme}://{netloc(self.settings.host, self.settings.port)}"

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
        """The process id, also of a process that has ended."""
        return None if self._process is None else self._process.pid

    def signal(self, number: signal.Signals) -> int:
        """Signal the process; return its id. An ended process is restarted."""
        with self._lock:
            assert self._process is not None
            self._process.send_signal(number)
            return self._process.pid

    @property
    def is_over(self) -> bool:
        """True when no process runs and none will be started."""
        return not self._thread.is_alive()

    def drain(self) -> None:
        """End the process without a successor, as its drain settings say."""
        self._end(signal.SIGTERM)

    def stop(self) -> None:
        """End the process without a successor and without draining."""
        # Two equal signals may arrive as one.
        self._end(signal.SIGTERM, signal.SIGINT)

    def _end(self, *numbers: int) -> None:
        with self._lock:
            self._closing.set()
            if self._process is not None:
                for number in numbers:
                    self._process.send_signal(number)

    def wait(self, timeout_s: float) -> None:
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(max(0.0, timeout_s))

    def _run_one(self) -> str | None:
        with self._lock:
            if self._closing.is_set():
                return None
            self._process = process = self._spawn()
        self.status.starts += 1
        is_served = self._wait_until_served(process)
        end = f"ended with status {process.wait()}"
        return None if is_served else end

    def _fault(self, failure: str, failures: int) -> str | None:
        if self.status.has_served and failures < len(PAUSES_S):
            return self.status.fault
        often = "" if failures == 1 else f", {failures} times before it took a request"
        return f"{self.settings.id} {failure}{often}\n{self._log_tail()}"

    def _wait_until_served(self, process: subprocess.Popen[bytes]) -> bool:
        """Wait until the process accepts requests; return False if it ends first."""
        while process.poll() is None:
            with contextlib.suppress(AdminError):
                self.admin.get("/healthz", _LOOK_TIMEOUT_S)
                self._note_served()
                return True
            time.sleep(LOOK_INTERVAL_S)
        return False
