"""Steps of ranks while copies of experts move, beside steps in calm.

    python -m experiments.experts.moving [--tiny]

Real: four ranks as processes, a generated Mixtral with 1 GB of weights of which other experts are
popular every few seconds, so that copies move over and over, and steps of decoding one after the
other. A step counts as one in a move if one is under way at its beginning or at its end; a step
that has to wait for a new formation counts from then on. Exit status 1: their p99 is more than
1.2 times that of steps in calm, or no copies moved.
"""

import argparse
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from statistics import median, quantiles

from experiments.experts.stepping import group_of, step_of
from experiments.record import Record
from kvrs.config.engine import ExpertSettings
from kvrs.engine.random_experts import ExpertsModel
from kvrs.engine.ranks.group import RankGroup
from kvrs.errors import RanksLostError
from kvrs.scheduling.sequences import Chunk
from kvrs_testkit.turning_experts import FIRST_IDS, LAST_IDS, write_turning_model

NAME = "moving"
RANKS = 4
TURN_S, AFTER_S = 3.0, 1.0
MOST = 1.2


@dataclass(slots=True)
class Steps:
    """Milliseconds of each."""

    calm: list[float] = field(default_factory=list)
    moving: list[float] = field(default_factory=list)
    waited: int = 0
    rebalances: int = 0
    copied_bytes: int = 0
    # Medians of the parts of a change, of which the ranks compute no step from `join` on.
    phases: dict[str, float] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        return p(99, self.moving) / p(99, self.calm) if self.moving and self.calm else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--rows", type=int, default=16, help="of a step")
    parser.add_argument("--tiny", action="store_true", help="a tiny model: does it run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    record = Record(options.seed)
    model = None if options.tiny else ExpertsModel.large("mixtral", skew=2.0)
    with tempfile.TemporaryDirectory() as directory:
        write_turning_model(Path(directory), options.seed, model)
        steps = measured(Path(directory), options)
    text = as_text(steps)
    print(text)
    figures = asdict(steps) | {"ratio": steps.ratio, "most": MOST}
    record.keep(options.out, NAME, figures, text)
    return not (steps.moving and steps.calm and steps.ratio <= MOST)


def measured(directory: Path, options: argparse.Namespace) -> Steps:
    experts = ExpertSettings(after_s=AFTER_S, half_life_s=TURN_S / 3, room_share=1.0)
    group, steps = group_of(directory, RANKS, options.rows, experts), Steps()
    try:
        choose, began_s, number = Random(options.seed), time.monotonic(), 0
        while (now_s := time.monotonic() - began_s) < options.seconds:
            ids = (FIRST_IDS, LAST_IDS)[int(now_s / TURN_S) % 2]
            number += 1
            chunks = step_of(options.rows, number, partial(choose.choice, ids))
            moves = group.reforming is not None
            number = group.layout.number
            took_s = _compute(group, chunks, steps)
            moves |= group.reforming is not None or group.layout.number != number
            (steps.moving if moves else steps.calm).append(1e3 * took_s)
        loads = group.reformer.loads
        assert loads is not None, "the model has experts"
        report = loads.facts(group.layout)
        steps.rebalances, steps.copied_bytes = report.rebalances, report.copied_bytes
        done = group.reformer.done
        for part in done[-1].phases_s if done else ():
            steps.phases[part] = 1e3 * median(each.phases_s[part] for each in done)
        return steps
    finally:
        group.close()


def _compute(group: RankGroup, chunks: list[Chunk], steps: Steps) -> float:
    began_s = time.monotonic()
    while True:
        try:
            group.execute(chunks)
        except RanksLostError:
            steps.waited += 1
            group.on_lost()
        else:
            return time.monotonic() - began_s


def p(share: int, values: list[float]) -> float:
    return quantiles(values, n=100, method="inclusive")[share - 1] if len(values) > 1 else values[0]


def as_text(steps: Steps) -> str:
    lines = ["steps       number     p50 ms     p99 ms"]
    for name, values in (("in calm", steps.calm), ("in a move", steps.moving)):
        if values:
            lines.append(f"{name:10} {len(values):7} {p(50, values):10.1f} {p(99, values):10.1f}")
    lines += [
        "",
        f"{steps.rebalances} changes of copies, {steps.copied_bytes / 1e6:.0f} MB; "
        f"{steps.waited} steps waited for the ranks",
        "median of a change: "
        + ", ".join(f"{part} {took_ms:.0f} ms" for part, took_ms in steps.phases.items()),
        f"p99 in a move over calm: {steps.ratio:.2f}; bar {MOST}",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
