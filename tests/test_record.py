"""Circumstances of kept results: commit, machine, command, and the CPU share of other processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import record
from experiments.record import CpuUse, as_lines, command, commit_of, reasons_against, shown

pytestmark = pytest.mark.nightly

MARK = b"KVRS_EXPERIMENT=abc"


class Proc:
    """A /proc of two CPUs and the processes that a test puts there."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.machine()
        self.process(1, parent=0, own=0)

    def machine(self, busy: int = 0, idle: int = 0, softirq: int = 0) -> None:
        (self.root / "stat").write_text(f"cpu  {busy} 0 0 {idle} 0 0 {softirq} 0 0 0\n")

    def process(
        self, pid: int, parent: int, own: int, awaited: int = 0, *, marked: bool = False
    ) -> None:
        folder = self.root / str(pid)
        folder.mkdir(exist_ok=True)
        fields = ["S", str(parent), *["0"] * 9, str(own), "0", str(awaited), "0", *["0"] * 30]
        (folder / "stat").write_text(f"{pid} (a) b) {' '.join(fields)}\n")
        (folder / "environ").write_bytes(b"A=1\0" + (MARK if marked else b"") + b"\0")

    def end(self, pid: int) -> None:
        for path in (self.root / str(pid)).iterdir():
            path.unlink()
        (self.root / str(pid)).rmdir()

    def use(self) -> CpuUse:
        return CpuUse(MARK, self.root, pid=10)


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    found = Proc(tmp_path)
    found.process(10, parent=1, own=500)
    found.process(11, parent=1, own=700)  # Of another program.
    return found


def test_time_of_other_processes_is_theirs_and_time_before_the_run_does_not_count(
    proc: Proc,
) -> None:
    """The share is that of all CPUs, idle ones too."""
    use = proc.use()

    proc.process(10, parent=1, own=520)
    proc.process(11, parent=1, own=730)
    proc.machine(busy=50, idle=150)

    assert use.others() == pytest.approx(30 / 200)


def test_descendants_and_marked_processes_are_ours(proc: Proc) -> None:
    """A worker whose parent has ended carries the mark of the run in its environment."""
    use = proc.use()

    proc.process(20, parent=10, own=10)
    proc.process(21, parent=20, own=10)
    proc.process(22, parent=1, own=10, marked=True)
    proc.process(23, parent=1, own=10)
    proc.machine(busy=40, idle=60)

    assert use.others() == pytest.approx(10 / 100)


def test_a_child_that_ended_counts_once(proc: Proc) -> None:
    """Its parent's figure has all its time, of which earlier samples had a part."""
    use = proc.use()

    proc.process(20, parent=10, own=30)
    proc.machine(busy=30, idle=70)
    use.sample()
    proc.end(20)
    proc.process(10, parent=1, own=500, awaited=35)
    proc.machine(busy=50, idle=150)

    assert use.others() == pytest.approx(15 / 200)


def test_a_child_that_is_not_awaited_counts_up_to_its_last_sample(proc: Proc) -> None:
    """Ray's workers end so: their time is in no other process's figure."""
    use = proc.use()

    proc.process(20, parent=10, own=30)
    use.sample()
    proc.end(20)
    proc.process(10, parent=1, own=510)
    proc.machine(busy=45, idle=55)

    assert use.others() == pytest.approx(5 / 100)


def test_interrupts_belong_to_no_process(proc: Proc) -> None:
    """A run's own packets would count as other processes."""
    use = proc.use()

    proc.machine(busy=0, idle=50, softirq=50)

    assert use.others() == 0


def test_a_busy_machine_voids_a_result() -> None:
    """Both before and during, and only above the limit."""
    assert reasons_against(0.1, 0.1) == []
    assert reasons_against(0.5, 0.0) == [
        "other processes had more than 10% of the CPU before the run"
    ]
    assert reasons_against(0.2, 0.11) == [
        "other processes had more than 10% of the CPU before and during the run"
    ]


def test_commands_name_neither_directories_nor_the_place_of_results() -> None:
    """Results are published."""
    words = ["--seed", "3", "--out", "/home/a/results", "--trace", "/data/some.jsonl"]

    assert command(words).endswith(" --seed 3 --trace some.jsonl")


def test_readers_see_commit_machine_load_command_and_what_voids() -> None:
    """A result without a figure shows the others."""
    run = {"commit": "0123456789abcdef-dirty", "machine": "2 cores", "python": "3.11.7"}
    more = {"others_before": 0.01, "others_during": 0.2, "command": "python -m a", "void": "busy"}

    assert as_lines(run) == ["commit 0123456789-dirty", "2 cores; Python 3.11.7"]
    assert as_lines(run | {"at": "2026-01-02T03:04:05Z"} | more) == [
        "commit 0123456789-dirty; 2026-01-02T03:04:05Z",
        "2 cores; Python 3.11.7",
        "other processes had 1% of the CPU before, 20% during the run",
        "python -m a",
        "VOID: busy",
    ]
    assert shown("unknown") == "unknown"


@pytest.mark.process
def test_a_tree_is_dirty_when_code_differs_and_not_for_results_or_markdown(tmp_path: Path) -> None:
    """A series of experiments writes results one after the other from one commit."""

    def git(*words: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        done = subprocess.run(
            ["git", *who, *words], cwd=tmp_path, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    results = tmp_path / "experiments/poison/results"
    results.mkdir(parents=True)
    (tmp_path / "docs/pictures").mkdir(parents=True)
    files = [tmp_path / "code.py", tmp_path / "README.md", results / "poison.json"]
    made = [tmp_path / "docs/evidence.json", tmp_path / "docs/pictures/rows.svg"]
    files += made  # From the results.
    for path in files:
        path.write_text("before")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "a")
    commit = git("rev-parse", "HEAD")

    for path in files[1:]:
        path.write_text("after")
    clean = commit_of(tmp_path)
    files[0].write_text("after")

    assert clean == commit
    assert commit_of(tmp_path) == f"{commit}-dirty"


def test_a_copy_without_a_repository_is_told_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled copies, and machines that get the files alone."""
    monkeypatch.setenv("KVRS_COMMIT", "abc")

    assert commit_of(tmp_path) == "abc"


@pytest.mark.process
def test_a_busy_machine_voids_only_what_depends_on_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulations and counts are the same on every machine."""
    monkeypatch.setattr(CpuUse, "others", lambda use: 0.5)
    monkeypatch.setattr(record, "_SAMPLE_S", 0.01)

    assert record.Record().keep(None, "a", {}, "")
    assert not record.Record(timed=False).keep(None, "a", {}, "")


@pytest.mark.process
def test_a_run_keeps_its_figures_with_the_circumstances(tmp_path: Path) -> None:
    """JSON for programs, text for readers, the same circumstances in both."""
    script = (
        "import sys; from pathlib import Path; from experiments.record import Record; "
        "record = Record(7); "
        "record.void('too short'); record.keep(Path(sys.argv[2]), 'a', {'rows': [1]}, 'one row\\n')"
    )

    done = subprocess.run(
        [sys.executable, "-c", script, "--out", str(tmp_path)],
        check=True,
        capture_output=True,
        text=True,
        cwd=record.ROOT,
    )

    kept = json.loads((tmp_path / "a.json").read_text())
    text = (tmp_path / "a.txt").read_text()
    assert kept["rows"] == [1]
    assert kept["run"]["seeds"] == [7]
    assert "too short" in kept["run"]["void"]
    assert set(kept["run"]) == {
        *("commit", "at", "took_s", "machine", "python", "command", "seeds", "void"),
        *("load_before", "load_after", "others_before", "others_during"),
    }
    assert text == "\n".join(["one row", "", *as_lines(kept["run"])]) + "\n"
    assert done.stdout == "\n".join(as_lines(kept["run"])) + "\n"
