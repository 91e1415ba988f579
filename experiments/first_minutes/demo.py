"""Times of a first try: a clone, its installation with what pip has in its cache, and the demo
until the streams of its killed instance have ended elsewhere.

    python -m experiments.first_minutes.demo   # `make time-demo`; of the commit that is checked out
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from experiments.command_line import parser_of
from experiments.record import ROOT, Record

BAR_S = 180.0
_RECOVERED = "all instances are up"  # In a line of the demo, when the run with the kill is over.


class Phases:
    """Seconds of phases that follow each other, told as they end."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @property
    def whole_s(self) -> float:
        return sum(self.seconds.values())

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begun_s = time.monotonic()
        yield
        self.end(name, begun_s)

    def end(self, name: str, begun_s: float) -> None:
        self.seconds[name] = lasted_s = time.monotonic() - begun_s
        print(_line(name, lasted_s), flush=True)

    def as_text(self, bar_s: float, after_s: float | None = None) -> str:
        """A line for each, and the bar: for all of them, or for those that took `after_s` behind
        the installation.
        """
        lines = [_line(name, lasted_s) for name, lasted_s in self.seconds.items()]
        bar = f" (bar: {bar_s:.0f} s)"
        if after_s is None:
            return "\n".join([*lines, _line("together", self.whole_s) + bar])
        together = _line("together", self.whole_s)
        return "\n".join([*lines, _line("behind the installation", after_s) + bar, together])


def _line(name: str, lasted_s: float) -> str:
    return f"{name:<44}{lasted_s:7.1f} s"


def main() -> int:
    options = parser_of(__doc__, __file__).parse_args()
    record = Record()
    phases = Phases()
    with tempfile.TemporaryDirectory() as folder:
        is_recovered = measure(phases, Path(folder) / "kvrs")
    text = phases.as_text(BAR_S)
    print(text)
    figures = {"seconds": phases.seconds, "whole_s": phases.whole_s, "is_recovered": is_recovered}
    is_void = record.keep(options.out, "demo", figures, text)
    return 0 if is_recovered and not is_void and phases.whole_s <= BAR_S else 1


def measure(phases: Phases, clone: Path) -> bool:
    """True if the demo's streams were recovered, and it ended well."""
    environ = os.environ | {"PYTHONUNBUFFERED": "1"}
    for name in ("PYTHONPATH", "VIRTUAL_ENV"):
        environ.pop(name, None)
    with phases.phase("clone"):
        subprocess.run(["git", "clone", "-q", ROOT, clone], check=True)
    make = ["make", f"PYTHON={sys.executable}"]
    with phases.phase("installation"), (clone / "install.log").open("wb") as log:
        command = [*make, ".venv/.demo"]
        subprocess.run(
            command, cwd=clone, env=environ, stdout=log, stderr=subprocess.STDOUT, check=True
        )
    begun_s = time.monotonic()
    demo = subprocess.Popen(
        [*make, "demo"], cwd=clone, env=environ, stdout=subprocess.PIPE, text=True
    )
    assert demo.stdout is not None
    is_recovered = False
    for line in demo.stdout:
        if _RECOVERED in line and not is_recovered:
            is_recovered = True
            phases.end("demo, until its streams are recovered", begun_s)
    return demo.wait() == 0 and is_recovered


if __name__ == "__main__":
    sys.exit(main())
