"""Time per token of a dense model with the code of experts, beside the commit before there was any.

    python -m experiments.experts.dense [--before REV]

Real: decode steps of a generated Llama by one process and by two ranks, in processes of both trees
in turns, each on the same files. A checkout of the older commit lies in a temporary directory, and
goes. Exit status 1: the median over the turns differs by more than half a percent.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from experiments.command_line import parser_of
from experiments.record import ROOT, Record
from kvrs.engine.random_model import write_tiny_model

NAME = "dense"
BEFORE = "e39a66adc9"  # The parent of the commit that added the families with experts.
MOST = 0.005
KINDS = ("one process", "two ranks")

# Runs in either tree, so it uses only what both have. Prints milliseconds of steps by kind.
_MEASURE = """
import json, sys, time
from pathlib import Path
from kvrs.config.cluster import InstanceSettings
from kvrs.config.engine import EngineSettings
from kvrs.engine.model_config import ModelConfig
from kvrs.engine.ranks.group import RankGroup
from kvrs.engine.ranks.settings import layout_of
from kvrs.engine.worker import Worker
from kvrs.protocol.instance import Role
from kvrs.scheduling.sequences import Chunk

model, steps, rows = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
settings = EngineSettings(pages=rows * 4)
instance = InstanceSettings(id="e0", role=Role.BOTH, tp=2)
layout = layout_of(instance, ModelConfig.from_directory(model).units)

def measured(worker):
    found = []
    for position in range(steps + 8):
        at = position % 64
        pages = [range(4 * row, 4 * row + 4) for row in range(rows)]
        chunks = [Chunk([5 + row], at, own, logits=1) for row, own in enumerate(pages)]
        began_s = time.perf_counter()
        worker.execute(chunks)
        found.append(1e3 * (time.perf_counter() - began_s))
    return found[8:]

group = RankGroup(model, settings, layout)
try:
    of_ranks = measured(group)
finally:
    group.close()
print(json.dumps({"one process": measured(Worker(model, settings)), "two ranks": of_ranks}))
"""


def main() -> int:
    parser = parser_of(__doc__, __file__)
    parser.add_argument("--before", default=BEFORE, help="the commit without experts")
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--steps", type=int, default=400, help="of each kind and turn")
    parser.add_argument("--rows", type=int, default=8, help="of a step")
    options = parser.parse_args()
    record = Record(0)
    found: dict[str, dict[str, list[float]]] = {
        which: {kind: [] for kind in KINDS} for which in ("before", "now")
    }
    with tempfile.TemporaryDirectory() as directory, _checkout(options.before) as older:
        model = Path(directory)
        write_tiny_model(model, seed=0)
        for turn in range(options.turns):
            trees = [("before", older), ("now", ROOT)]
            for which, tree in trees if turn % 2 else reversed(trees):
                steps = _measure(tree, model, options)
                for kind in KINDS:
                    found[which][kind].append(median(steps[kind]))
    changes = {
        kind: median(found["now"][kind]) / median(found["before"][kind]) - 1 for kind in KINDS
    }
    text = as_text(found, changes, options.before)
    print(text)
    figures = {"ms": found, "changes": changes, "most": MOST, "before": options.before}
    record.keep(options.out, NAME, figures, text)
    return any(abs(change) > MOST for change in changes.values())


@contextmanager
def _checkout(revision: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as directory:
        tree = Path(directory) / "before"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), revision], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def _measure(tree: Path, model: Path, options: argparse.Namespace) -> dict[str, list[float]]:
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(model), str(options.steps), str(options.rows)],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        check=True,
    )
    found: dict[str, list[float]] = json.loads(done.stdout)
    return found


def as_text(
    found: dict[str, dict[str, list[float]]], changes: dict[str, float], before: str
) -> str:
    lines = [f"Decode step of a dense model, ms, median of the turns; before: {before}", ""]
    lines += [
        f"{kind:12} before {median(found['before'][kind]):7.3f}, now "
        f"{median(found['now'][kind]):7.3f}, {changes[kind]:+.2%}"
        for kind in KINDS
    ]
    return "\n".join([*lines, "", f"bar: {MOST:.1%} either way"])


if __name__ == "__main__":
    sys.exit(main())
