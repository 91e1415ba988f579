"""Loads of models that block: instances that are started stay in the states before they serve."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvrs_testkit.processes import Processes


@contextmanager
def blocked_load(processes: Processes, model: Path | None = None) -> Iterator[None]:
    """A process that starts in the block gets no further than its model's configuration, or that of
    another model that it loads, and fails when the block ends.
    """
    model = model or Path(processes.config.cluster.model or "")
    read = model / "config.json"
    kept = read.rename(model / "kept")
    os.mkfifo(read)
    try:
        yield
    finally:
        with suppress(OSError):  # There is none that reads.
            os.close(os.open(read, os.O_WRONLY | os.O_NONBLOCK))  # It reads nothing.
        kept.replace(read)
