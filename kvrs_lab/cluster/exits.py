"""Exits of instances' processes, found by their supervisor and reported to the proxies.

A proxy refuses a request that has ended several instances (`kvrs.core`). Only the supervising
process can tell such a death from a kill from outside.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from kvrs.ids import InstanceId
from kvrs.net.admin import AdminClient, AdminError
from kvrs.protocol.instance import ExitReport

# Signals that end a process and that others send to it. An abort or a fault has other signals.
_FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
# A SIGKILL counts as the kernel's if the kernel's count of out-of-memory kills rose within this
# time. The kernel counts a kill before it sends the signal.
_KERNEL_KILLED_S = 3.0
LOOK_INTERVAL_S = 1.0

_CGROUP_FILES = (  # Controllers of a line of /proc/self/cgroup ("": version 2), directory, file.
    ("", "/sys/fs/cgroup", "memory.events"),
    ("memory", "/sys/fs/cgroup/memory", "memory.oom_control"),
)


# Callback at the end of an instance's process.
Ended = Callable[[InstanceId, ExitReport], object]


def classify(status: int, *, kernel_killed: bool | None) -> tuple[str, bool] | None:
    """The cause of an end, and whether the cause came from outside; None: unknown. Pure.

    Args:
        status: as of `subprocess`; below 0: minus a signal; 0: the process was told to drain.
        kernel_killed: the kernel has just killed a process for its memory; None: unknown.
    """
    if status >= 0:
        return f"exit status {status}", status == 0
    try:
        name = signal.Signals(-status).name
    except ValueError:  # A real-time signal.
        name = f"signal {-status}"
    if -status == signal.SIGKILL:
        if kernel_killed is None:
            return None
        if kernel_killed:
            return "out of memory", False
    return name, -status in _FROM_OUTSIDE


class KernelKills:
    """Counts processes that the kernel has killed to free memory: in the cgroup of this process and
    its children, or on the whole machine if the cgroup has no count.
    """

    def __init__(self, files: Sequence[Path] | None = None) -> None:
        found = _files() if files is None else files
        self._file = next((file for file in found if _count(file) is not None), None)
        self._count = 0 if self._file is None else _count(self._file)
        self._rose_s = -_KERNEL_KILLED_S
        self._lock = threading.Lock()

    def look(self) -> None:
        """Update the count, so that old kills are not taken for the cause of a later end."""
        with self._lock:
            count = None if self._file is None else _count(self._file)
            if count is not None and self._count is not None and count > self._count:
                self._rose_s = time.monotonic()
            self._count = count

    def lately(self) -> bool | None:
        """True if the kernel killed a process just now; None: such kills are not counted."""
        self.look()
        if self._count is None or self._file is None:
            return None
        return time.monotonic() - self._rose_s < _KERNEL_KILLED_S


def _files() -> Iterator[Path]:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for wanted, root, name in _CGROUP_FILES:
            if wanted in controllers.split(","):
                yield Path(root + path) / name
    yield Path("/proc/vmstat")


def _count(file: Path) -> int | None:
    """The count of kills in a file; None: no count."""
    try:
        for line in file.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == "oom_kill":
                return int(value)
    except (OSError, ValueError):
        pass
    return None


def tell_exit(
    admins: Iterable[AdminClient],
    instance: InstanceId,
    report: ExitReport,
    say: Callable[[str], object],
) -> None:
    """Tell each proxy worker of an exit, in threads, so that no hanging proxy delays another. An
    unreachable proxy is skipped: it is starting, and its streams have met no death.
    """

    def tell(admin: AdminClient) -> None:
        try:
            admin.note_exit(instance, report)
        except AdminError as error:
            # No status: unreachable; 404 and 409: the proxy has not seen that process up.
            if error.status not in (None, 404, 409):
                say(f"a proxy is not told how {instance} ended: {error}")

    for admin in admins:
        threading.Thread(target=tell, args=(admin,), name="exits", daemon=True).start()
