"""The circumstances of the run that made a kept result, and the files that keep it.

    record = Record(options.seed)  # First: it measures what else the machine does.
    rows = asyncio.run(measure(options.seed))
    record.keep(options.out, "poison", {"rows": rows}, as_text(rows))

`NAME.json` has the figures, with the circumstances under `run`; `NAME.txt` the table for readers,
which ends with them. READMEs link to it (experiments/readme.py).
"""

import json
import os
import platform
import secrets
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml

ROOT = Path(__file__).parent.parent
# Files on which no run depends: a tree that differs only in them is the commit's.
NOT_CODE = (
    ":!*.md",
    ":!experiments/*/results/*",
    ":!experiments/sentinels/kept.json",
    ":!docs/evidence.json",
    ":!docs/pictures/*",
)
# More than this share of the machine's CPU in other processes, before or during a run, and its
# times are theirs too.
MAX_OTHERS = 0.1
COMMIT_ENV = "KVRS_COMMIT"  # Names the commit where a copy of the tree has no repository.
MARK_ENV = "KVRS_EXPERIMENT"  # Inherited by all processes of a run, also by those of daemons.
_SAMPLE_S = 1.0


class Record:
    """One run of an experiment, from its beginning on: commit, machine, load, command, seeds.

    Args:
        timed: a figure or a bar depends on time, so that other processes make the result void.
    """

    def __init__(self, *seeds: int, timed: bool = True) -> None:
        self._seeds = list(seeds)
        self._timed = timed
        self._commit = commit_of(ROOT)
        self._at, self._begun_s = time.gmtime(), time.monotonic()
        self._load_before = os.getloadavg()[0]
        self._reasons: list[str] = []
        mark = secrets.token_hex(8)
        os.environ[MARK_ENV] = mark
        self._use = CpuUse(f"{MARK_ENV}={mark}".encode())
        time.sleep(_SAMPLE_S)
        self.others_before = self._use.others()
        self._use.begin()
        threading.Thread(target=self._watch, name="cpu-use", daemon=True).start()

    def void(self, reason: str) -> None:
        """Mark the result as void: its figures do not show what they are to show."""
        self._reasons.append(reason)

    def check_cpu(self, share: float, most: float) -> None:
        """Void when all processes together, the run's own too, had more of the CPU."""
        if share > most:
            self.void(f"more than {most:.0%} of the CPU was in use")

    def is_void(self) -> bool:
        """True if the result is void, as far as is known now."""
        return "void" in self._circumstances()

    def keep(self, out: Path | None, name: str, figures: dict[str, Any], text: str) -> bool:
        """Print the circumstances; write the figures and the text with them to `out`, if given.

        Returns whether the result is void.
        """
        run = self._circumstances()
        lines = as_lines(run)
        print(*lines, sep="\n")
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            document = json.dumps({"run": run} | figures, indent=1, ensure_ascii=False)
            _replace(out / f"{name}.json", document + "\n")
            _replace(out / f"{name}.txt", "\n".join([text.rstrip("\n"), "", *lines]) + "\n")
        return "void" in run

    def keep_beside(self, out: Path | None, name: str, figures: dict[str, Any], text: str) -> bool:
        """Keep the result as `keep` does, but replace no result that holds by a void one."""
        is_spared = out is not None and self.is_void() and _holds(out / f"{name}.json")
        return self.keep(None if is_spared else out, name, figures, text)

    def _watch(self) -> None:
        while True:
            time.sleep(_SAMPLE_S)
            self._use.sample()

    def _circumstances(self) -> dict[str, Any]:
        during, commit = self._use.others(), commit_of(ROOT)
        reasons = list(self._reasons)
        if self._timed:
            reasons += reasons_against(self.others_before, during)
        if self._commit != commit and not same_code(self._commit, commit):
            went = f"the tree went from {shown(self._commit)} to {shown(commit)}"
            reasons.append(f"{went} during the run")
        run = {
            "commit": self._commit,
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", self._at),
            "took_s": round(time.monotonic() - self._begun_s, 1),
            "machine": machine(),
            "python": platform.python_version(),
            "command": command(sys.argv[1:]),
            "seeds": self._seeds,
            "load_before": round(self._load_before, 2),
            "load_after": round(os.getloadavg()[0], 2),
            "others_before": round(self.others_before, 3),
            "others_during": round(during, 3),
        }
        return run | ({"void": "; ".join(reasons)} if reasons else {})


def _holds(result: Path) -> bool:
    """True if there is a result which is not void."""
    return result.exists() and "void" not in json.loads(result.read_text()).get("run", {})


def _replace(path: Path, text: str) -> None:
    """Write the file whole: one that was there is replaced, or stays."""
    new = path.with_name(f".{path.name}.new")
    new.write_text(text)
    new.replace(path)


def reasons_against(before: float, during: float) -> list[str]:
    """The general void rule: shares of the CPU that other processes had."""
    shares = {"before": before, "during": during}
    busy = [when for when, share in shares.items() if share > MAX_OTHERS]
    if not busy:
        return []
    when = " and ".join(busy)
    return [f"other processes had more than {MAX_OTHERS:.0%} of the CPU {when} the run"]


def as_lines(run: dict[str, Any]) -> list[str]:
    """The circumstances for readers, as far as a result has them."""
    where = [run["machine"], f"Python {run['python']}" if "python" in run else ""]
    lines = [f"commit {shown(run['commit'])}; {run.get('at', '')}".rstrip("; ")]
    lines.append("; ".join(filter(None, where)))
    if "others_during" in run:
        before, during = (f"{run[f'others_{when}']:.0%}" for when in ("before", "during"))
        lines.append(f"other processes had {before} of the CPU before, {during} during the run")
    if "command" in run:
        lines.append(run["command"])
    return lines + ([f"VOID: {run['void']}"] if "void" in run else [])


def shown(commit: str) -> str:
    name, _, dirty = commit.partition("-")
    return name[:10] + (f"-{dirty}" if dirty else "")


def machine() -> str:
    system = f"{platform.system()} {platform.machine()}"
    return ", ".join([f"{os.cpu_count()} cores", _cpu_model(), *gpus(), system])


def gpus() -> list[str]:
    """Names of the NVIDIA GPUs of this machine."""
    try:
        pynvml.nvmlInit()
        numbers = range(pynvml.nvmlDeviceGetCount())
        return [
            str(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(n))) for n in numbers
        ]
    except pynvml.NVMLError:
        return []


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return "unknown CPU"


def command(arguments: list[str]) -> str:
    """How it was started, without the place of the results and without directories of this
    machine.
    """
    spec = sys.modules["__main__"].__spec__
    words = (
        ["python", "-m", spec.name.removesuffix(".__main__")]
        if spec
        else ["python", Path(sys.argv[0]).name]
    )
    given = iter(arguments)
    for word in given:
        if word == "--out":
            next(given, None)
        else:
            words.append(Path(word).name if word.startswith("/") else word)
    return " ".join(words)


def commit_of(root: Path) -> str:
    """The full hash, with `-dirty` behind it when a tracked file differs that a run depends on."""
    if not (root / ".git").exists():
        return os.environ.get(COMMIT_ENV, "unknown")
    commit = _git(root, "rev-parse", "HEAD").stdout.strip()
    changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", ".", *NOT_CODE)
    return f"{commit}-dirty" if changed.stdout else commit


def same_code(one: str, other: str, root: Path = ROOT) -> bool:
    """True if the two commits have the same files that a run depends on."""
    if "-dirty" in one + other:
        return False
    return _git(root, "diff", "--quiet", one, other, "--", ".", *NOT_CODE).returncode == 0


def _git(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["git", *arguments], cwd=root, capture_output=True, text=True, check=False
    )


@dataclass(frozen=True, slots=True)
class _Times:
    """CPU time of a process in clock ticks: its own, and that of ended children that it awaited."""

    own: int
    awaited: int


class CpuUse:
    """CPU time of this process and its descendants, beside that of the whole machine.

    A process is ours if it is this one, its parent is ours, or it was started with `mark` in its
    environment; the last finds those whose parent has ended. What a process used after its last
    sample is missed, unless its parent awaits it.
    """

    def __init__(self, mark: bytes, proc: Path = Path("/proc"), pid: int | None = None) -> None:
        self._mark = mark
        self._proc = proc
        self._known: set[int] = set()
        self._ours: dict[int, _Times] = {os.getpid() if pid is None else pid: _Times(0, 0)}
        self._lock = threading.Lock()
        self._spent = 0
        self.begin()

    def begin(self) -> None:
        """Count from now on."""
        self.sample()
        with self._lock:
            self._spent, self._before = 0, self._machine()

    def others(self) -> float:
        """Share of the machine's CPU time in other processes since the beginning."""
        self.sample()
        with self._lock:
            used, total = self._machine()
            used, total = used - self._before[0], total - self._before[1]
            return max(0, used - self._spent) / max(1, total)

    def sample(self) -> None:
        with self._lock:
            now = self._read()
            new = _Times(0, 0)
            grown = awaited = 0
            for pid, times in now.items():
                before = self._ours.get(pid, new)
                grown += times.own - before.own
                awaited += times.awaited - before.awaited
            # What an ended child used before the last sample is in its parent's figure as well.
            ended = sum(
                times.own + times.awaited for pid, times in self._ours.items() if pid not in now
            )
            self._spent += grown + max(0, awaited - ended)
            self._ours = now

    def _read(self) -> dict[int, _Times]:
        pids = {int(path.name) for path in self._proc.iterdir() if path.name.isdigit()}
        found: dict[int, _Times] = {}
        for pid in sorted(pids):
            if pid in self._known and pid not in self._ours:
                continue
            try:
                fields = (self._proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
                parent = int(fields[1])
                if (
                    pid in self._ours
                    or parent in found
                    or parent in self._ours
                    or self._is_marked(pid)
                ):
                    found[pid] = _Times(
                        int(fields[11]) + int(fields[12]), int(fields[13]) + int(fields[14])
                    )
            except OSError:  # It has ended, or belongs to another user.
                continue
        self._known = pids
        return found

    def _is_marked(self, pid: int) -> bool:
        return self._mark in (self._proc / str(pid) / "environ").read_bytes().split(b"\0")

    def _machine(self) -> tuple[int, int]:
        """Ticks in use by processes or by other machines of the host, and all, idle ones too."""
        first = (self._proc / "stat").read_text().splitlines()[0].split()
        user, nice, system, idle, wait, irq, softirq, steal = map(int, first[1:9])
        return user + nice + system + steal, (
            user + nice + system + idle + wait + irq + softirq + steal
        )
