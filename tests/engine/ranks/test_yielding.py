"""Loads that yield to whatever else runs on the machine."""

import os
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from kvrs_engine.engine.ranks.yielding import LOAD_NICE, yielding
from kvrs_testkit.processes import below
from tests.engine.ranks.on_nodes import config_of, head_of, hosting

pytestmark = [pytest.mark.engine, pytest.mark.nightly]


def nice_of(thread: Path) -> int:
    return int((thread / "stat").read_text().rpartition(")")[2].split()[16])


def test_work_that_yields_leaves_the_priority_of_others() -> None:
    """That of the thread which waits for it, too; errors come through."""

    def own() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def fail() -> None:
        raise ValueError("of the work")

    before = own()

    assert yielding(own, LOAD_NICE) == before + LOAD_NICE
    with pytest.raises(ValueError, match="of the work"):
        yielding(fail, LOAD_NICE)
    assert own() == before


@pytest.mark.process
@pytest.mark.network
def test_a_host_loads_at_a_low_priority_and_computes_at_the_usual_one(
    tiny_model: Path, tmp_path: Path
) -> None:
    config = config_of(tiny_model)
    own, seen, has_loaded = os.getpriority(os.PRIO_PROCESS, 0), set[int](), threading.Event()

    def look() -> None:
        """The priorities of all threads of the ranks below this process."""
        while not has_loaded.wait(0.01):
            for pid in below(os.getpid()):
                with suppress(OSError):  # It has ended.
                    if (Path(f"/proc/{pid}/comm").read_text()) == "rank-1\n":
                        seen.update(map(nice_of, Path(f"/proc/{pid}/task").iterdir()))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        with hosting(config, tmp_path):
            has_loaded.set()
            head = head_of(config)
            try:
                threads = Path(f"/proc/{head.pids[1]}/task").iterdir()
                assert {*map(nice_of, threads)} == {own}
            finally:
                head.close()
    finally:
        has_loaded.set()
        looking.join()

    assert own + LOAD_NICE in seen
