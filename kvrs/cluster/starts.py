"""Files in the run directory about the starts of a process, for its next start and for the
launcher.
"""

from pathlib import Path

from kvrs.ids import InstanceId


def next_start(run_directory: Path, instance: InstanceId) -> int:
    """The number of this start: one more than the last one's; in a file, so that it outlives the
    process.
    """
    epoch = starts(run_directory, instance) + 1
    _write(run_directory / f"{instance}.epoch", str(epoch))
    return epoch


def starts(run_directory: Path, instance: InstanceId) -> int:
    """The number of starts so far."""
    path = run_directory / f"{instance}.epoch"
    return int(path.read_text()) if path.exists() else 0


def report_fault(run_directory: Path, instance: InstanceId, fault: str) -> None:
    """Record why a start failed, where a restart would fail for the same reason."""
    _write(run_directory / f"{instance}.fault", fault)


def start_fault(run_directory: Path, instance: InstanceId) -> str | None:
    path = run_directory / f"{instance}.fault"
    return path.read_text() if path.exists() else None


def forget_fault(run_directory: Path, instance: InstanceId) -> None:
    """Remove the record before a restart."""
    (run_directory / f"{instance}.fault").unlink(missing_ok=True)


def _write(path: Path, text: str) -> None:
    """Replace the file atomically: it may be read at any time."""
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(text)
    temporary.replace(path)
