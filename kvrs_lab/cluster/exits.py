"""Exits of instances' processes, as their supervisor learns them, and the news of them for the
proxies.

A proxy refuses a request that has ended several instances (`kvrs.core`). What ended from outside no
request has ended; the supervising process alone can tell that.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from kvrs.ids import InstanceId
from kvrs.net.admin import AdminClient, AdminError
from kvrs.protocol.instance import ExitReport

# Signals that end a process and that others send to it. A process that is aborted, or at a fault of
# its own, has another one.
_FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
# An end by SIGKILL is laid to the kernel where it has ended a process for its memory within this
# time; it counts that before it sends the signal.
_KERNEL_KILLED_S = 3.0
LOOK_INTERVAL_S = 1.0

_CGROUP_FILES = (  # By the controllers of a line of /proc/self/cgroup; "": version 2.
    ("", "/sys/fs/cgroup", "memory.events"),
    ("memory", "/sys/fs/cgroup/memory", "memory.oom_control"),
)


# Told of the end of a process of an instance.
Ended = Callable[[InstanceId, ExitReport], object]


def classify(status: int, *, kernel_killed: bool | None) -> tuple[str, bool] | None:
    """The cause of an end, and whether it came from outside; None: that is not known. Pure.

    Args:
        status: as of `subprocess`, below 0 minus a signal; 0: it has drained, as it was told to.
        kernel_killed: the kernel has ended a process for its memory just now; None: not known.
    """
    if status >= 0:
        return f"exit status {status}", status == 0
    try:
        name = signal.Signals(-status).name
    except ValueError:  # One of real time.
        name = f"signal {-status}"
    if -status == signal.SIGKILL:
        if kernel_killed is None:
            return None
        if kernel_killed:
            return "out of memory", False
    return name, -status in _FROM_OUTSIDE


class KernelKills:
    """Processes that the kernel has ended to find memory: in the cgroup of this process, which
    those that it starts share, or where that is not counted on the whole machine.
    """

    def __init__(self, files: Sequence[Path] | None = None) -> None:
        found = _files() if files is None else files
        self._file = next((file for file in found if _count(file) is not None), None)
        self._count = 0 if self._file is None else _count(self._file)
        self._rose_s = -_KERNEL_KILLED_S
        self._lock = threading.Lock()

    def look(self) -> None:
        """Before an end, so that kills of long ago are not taken for its cause."""
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
    """None: it does not say."""
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
    """Tell proxies, and each of their workers, of an exit: each in a thread of its own, so that one
    that hangs delays no other. A proxy that is not reached does without: it is starting, and its
    streams have met no death.
    """

    def tell(admin: AdminClient) -> None:
        try:
            admin.note_exit(instance, report)
        except AdminError as error:
            # Without a status it is not reached; 404 and 409: it has not seen that process up.
            if error.status not in (None, 404, 409):
                say(f"a proxy is not told how {instance} ended: {error}")

    for admin in admins:
        threading.Thread(target=tell, args=(admin,), name="exits", daemon=True).start()
