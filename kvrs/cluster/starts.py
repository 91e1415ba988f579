"""What an instance leaves in the run directory about its starts, for its next one and for the launcher."""

from pathlib import Path

from kvrs.ids import InstanceId


def next_start(run_directory: Path, instance: InstanceId) -> int:
    """Its number: one more than the last start's, whatever the clock says; kept in a file because the process is not."""
    epoch = starts(run_directory, instance) + 1
    _write(run_directory / f"{instance}.epoch", str(epoch))
    return epoch


def starts(run_directory: Path, instance: InstanceId) -> int:
    """How often it was started."""
    path = run_directory / f"{instance}.epoch"
    return int(path.read_text()) if path.exists() else 0


def report_fault(run_directory: Path, instance: InstanceId, fault: str) -> None:
    """Say why a start failed, where another one would fail for the same reason."""
    _write(run_directory / f"{instance}.fault", fault)


def start_fault(run_directory: Path, instance: InstanceId) -> str | None:
    path = run_directory / f"{instance}.fault"
    return path.read_text() if path.exists() else None


def forget_fault(run_directory: Path, instance: InstanceId) -> None:
    """It is about to be started anew, and may fail for another reason, or not at all."""
    (run_directory / f"{instance}.fault").unlink(missing_ok=True)


def _write(path: Path, text: str) -> None:
    """Whole or not at all: whoever reads it may do so at any moment."""
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(text)
    temporary.replace(path)
