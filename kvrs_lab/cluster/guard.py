"""Ends the processes that a launcher left behind, however the launcher ended.

`python -m kvrs_lab.cluster.guard RUN_DIRECTORY [SHARED_MEMORY]` reads its standard input until the
launcher's end of the pipe is closed, by a clean exit or by SIGKILL alike. The run directory is
private to one run, and every process of the run writes a log file there. A process belongs to the
run if it has a file of that directory open for writing, whatever its name and parent. Readers
(`tail -f`) do not belong to the run, nor do editors, which write hidden files. Both directories are
removed: killed agents have left their segments in the second one.
"""

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

# Ray's helpers start each other while they end. A few scans without a process mean the end.
QUIET_LOOKS = 3
LOOK_INTERVAL_S = 0.2
PATIENCE_S = 20.0


def members(run_directory: Path) -> Iterator[int]:
    """Ids of processes that write a file of `run_directory`, without the guard itself and a
    waiting launcher.
    """
    prefix = str(run_directory.resolve()) + "/"
    spared = {os.getpid(), os.getppid()}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) not in spared and _writes(entry, prefix):
            yield int(entry.name)


def _writes(process: Path, prefix: str) -> bool:
    # A process may end during the scan, or belong to another user.
    with contextlib.suppress(OSError):
        for link in process.joinpath("fd").iterdir():
            path = os.readlink(link)
            # The mode of the link is that of the open file. Swap files of editors are hidden.
            is_hidden = os.path.basename(path).startswith(".")
            if path.startswith(prefix) and not is_hidden and link.lstat().st_mode & stat.S_IWUSR:
                return True
    return False


def start_guard(*directories: Path, apart: bool = False) -> subprocess.Popen[bytes]:
    """Start the guard of the run directory and of other directories to remove. The guard waits
    until its standard input is closed. `apart` detaches the guard from this process, which may be
    ended with all its children.
    """
    command = [sys.executable, "-m", "kvrs_lab.cluster.guard", *map(str, directories)]
    if apart:
        # A shell gives a background process no input, unless a descriptor is passed.
        command = ["sh", "-c", 'exec 3<&0; "$@" <&3 3<&- &', "sh", *command]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def sweep(run_directory: Path, *others: Path) -> None:
    """SIGKILL the members until no member is left, then remove the directories."""
    quiet = 0
    give_up_s = time.monotonic() + PATIENCE_S
    while quiet < QUIET_LOOKS and time.monotonic() < give_up_s:
        quiet += 1
        for pid in members(run_directory):
            quiet = 0
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(LOOK_INTERVAL_S)
    for directory in (*others, run_directory):
        shutil.rmtree(directory, ignore_errors=True)


def main() -> None:
    # Ctrl-C goes to the launcher; the guard has to outlive it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while sys.stdin.buffer.read(4096):
        continue
    sweep(*map(Path, sys.argv[1:]))


if __name__ == "__main__":
    main()
