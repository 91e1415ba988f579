"""Times of a first try: a clone, its installation with what pip has in its cache, and the demo
until the streams of its killed instance have ended elsewhere.

    python -m experiments.first_minutes   # Of the commit that is checked out; `make time-demo`.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parent.parent
BAR_S = 180.0
_RECOVERED = "all instances are up"  # In a line of the demo, when the run with the kill is over.


class Phases:
    """Prints each phase with its seconds, and at last all of them."""

    def __init__(self) -> None:
        self.whole_s = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begun_s = time.monotonic()
        yield
        self.end(name, begun_s)

    def end(self, name: str, begun_s: float) -> None:
        lasted_s = time.monotonic() - begun_s
        self.whole_s += lasted_s
        print(f"{name:<44}{lasted_s:7.1f} s", flush=True)


def main() -> int:
    environ = os.environ | {"PYTHONUNBUFFERED": "1"}
    for name in ("PYTHONPATH", "VIRTUAL_ENV"):
        environ.pop(name, None)
    phases = Phases()
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "kvrs"
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
        recovered = False
        for line in demo.stdout:
            if _RECOVERED in line:
                recovered = True
                phases.end("demo, until its streams are recovered", begun_s)
        status = demo.wait()
    print(
        f"{'from the clone to recovered streams':<44}{phases.whole_s:7.1f} s (bar: {BAR_S:.0f} s)"
    )
    return 0 if recovered and status == 0 and phases.whole_s <= BAR_S else 1


if __name__ == "__main__":
    sys.exit(main())
