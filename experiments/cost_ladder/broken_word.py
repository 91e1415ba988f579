"""The loss to streams that stay with an instance whose re-forming takes five times as long as it
has announced.

The cells of `run.py` in virtual time, with twice as many streams, which all run to their
ends. A stream's delay is by how much its longest pause after the loss is longer than the wait that
was announced to it. Exit status 1: a stream is lost or wrong, or delayed by more than the limit of
silence between two of its tokens.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

from experiments.cost_ladder.run import HOME, LONGEST_S, STEP_S, Cell, grid, loaded
from experiments.record import Record
from experiments.virtual_time import run_until, token_times
from kvrs.core.model import actions as act
from kvrs.core.model.estimates import Option
from kvrs.ids import StreamId
from kvrs.report.metrics import percentile
from kvrs.sim.calls import token_at
from kvrs.sim.proxy import SimShell
from kvrs.sim.streams import SimStream

STREAMS = 24
TOKENS = 240  # Of each stream.
FACTORS = (1.0, 5.0)  # The seconds of a re-forming over those that were said.
BROKEN = 5.0


@dataclass(frozen=True, slots=True)
class Waited:
    """One stream that was to stay."""

    announced_s: float
    pause_s: float  # The longest between two of its tokens, from the loss on.
    limit_s: float  # Silence between two tokens that is taken for a failure.
    left: bool  # In the end it went elsewhere.

    @property
    def delay_s(self) -> float:
        return self.pause_s - self.announced_s


@dataclass(frozen=True, slots=True)
class Played:
    """A cell under one seed."""

    cell: Cell
    factor: float
    streams: int  # All of the cluster.
    hit: int  # At the instance when it lost the rank.
    incomplete: int
    tokens: int
    lost: int
    repeated: int
    different: int
    waited: tuple[Waited, ...]


@contextmanager
def _noting(recovered: list[tuple[float, act.Recovered]]) -> Iterator[None]:
    """Note the decisions and their times."""
    note = SimShell.note

    def noted(shell: SimShell, record: act.Record) -> None:
        if isinstance(record, act.Recovered):
            recovered.append((shell.proxy.now_s, record))
        note(shell, record)

    with patch.object(SimShell, "note", noted):
        yield


def play(cell: Cell, factor: float, seed: int) -> Played:
    """Raises AssertionError where an invariant of the simulator is violated."""
    recovered: list[tuple[float, act.Recovered]] = []
    draw = Random(seed)
    with token_times() as tokens_s, _noting(recovered):
        cluster, names = loaded(cell, seed, tokens_s, STREAMS, TOKENS)
        clock, proxy = cluster.clock, cluster.serving[0]
        clock.run(clock.now_s + draw.uniform(0.0, STEP_S))
        lost_s = clock.now_s
        hit = {
            name: proxy.control.progress.token_gap_s(proxy.streams[name], HOME, lost_s, lost_s)
            for name in names
            if proxy.streams[name].instance == HOME and not proxy.streams[name].outcome
        }
        recovered.clear()
        ranks = cluster.engines[HOME].ranks
        assert ranks is not None
        ranks.late_factor = factor
        ranks.lose([draw.choice(ranks.running)], memory_kept=cell.lost == "rank")
        run_until(
            clock,
            lambda: all(stream.outcome for stream in proxy.streams.values()),
            STEP_S,
            LONGEST_S,
        )
    announced, left = _decided(recovered, hit)
    counts = [_wrong(stream) for stream in proxy.streams.values()]
    lost, repeated, different = (sum(each) for each in zip(*counts, strict=True))
    return Played(
        cell,
        factor,
        len(proxy.streams),
        len(hit),
        sum(stream.outcome != "complete" for stream in proxy.streams.values()),
        sum(len(stream.output) for stream in proxy.streams.values()),
        lost,
        repeated,
        different,
        tuple(
            Waited(announced_s, _pause_s(tokens_s[name], lost_s), hit[name], name in left)
            for name, announced_s in announced.items()
        ),
    )


def _decided(
    recovered: Iterable[tuple[float, act.Recovered]], hit: Iterable[StreamId]
) -> tuple[dict[StreamId, float], set[StreamId]]:
    """The wait that was announced to each stream that was to stay, and those that left later."""
    announced: dict[StreamId, float] = {}
    left = set()
    for _, action in recovered:
        if action.stream in announced and action.option is not Option.IN_PLACE:
            left.add(action.stream)
        elif action.option is Option.IN_PLACE and action.stream in hit:
            announced.setdefault(action.stream, action.predicted_s)
    return announced, left


def _pause_s(times_s: Sequence[float], lost_s: float) -> float:
    return max(after - before for before, after in pairwise(times_s) if after > lost_s)


def _wrong(stream: SimStream) -> tuple[int, int, int]:
    """Tokens that are missing, too many, and others than the right ones."""
    first, output = len(stream.arrival.prompt_ids), stream.output
    right = [token_at(stream.id, first + at) for at in range(stream.arrival.max_tokens)]
    return (
        max(0, len(right) - len(output)),
        max(0, len(output) - len(right)),
        sum(one != other for one, other in zip(output, right, strict=False)),
    )


def figures_of(played: Sequence[Played]) -> dict[str, Any]:
    waited = [each for one in played for each in one.waited]
    counts = {
        key: sum(getattr(one, key) for one in played)
        for key in ("streams", "hit", "incomplete", "tokens", "lost", "repeated", "different")
    }
    return counts | {
        "stayed": len(waited),
        "left_later": sum(each.left for each in waited),
        "limit_s": [f([each.limit_s for each in waited]) for f in (min, max)],
        "over": sum(each.delay_s > each.limit_s for each in waited),
        **{
            key: {
                "p50": percentile(values, 50),
                "p99": percentile(values, 99),
                "most": max(values),
            }
            for key, values in (
                ("announced_s", [each.announced_s for each in waited]),
                ("pause_s", [each.pause_s for each in waited]),
                ("delay_s", [each.delay_s for each in waited]),
            )
        },
    }


def passed(figures: dict[str, Any]) -> bool:
    wrong = ("incomplete", "lost", "repeated", "different", "over")
    return figures["stayed"] > 0 and not any(figures[key] for key in wrong)


def as_text(played: Sequence[Played], seeds: int) -> str:
    cells = len({one.cell for one in played})
    lines = [
        f"SIMULATED, virtual time: {cells} cells x {seeds} seeds, {STREAMS} streams each and those "
        f"that arrive besides; an instance of several ranks loses one",
        "delay: a stream's longest pause, less the wait that was announced to it; limit: silence "
        "between two tokens that is taken for a failure",
        "",
        f"{'re-forming takes':26}{'streams':>9}{'stay':>6}{'leave':>7}"
        f"{'announced, s':>21}{'pause, s':>21}{'delay, s':>21}{'limit':>7}{'over':>6}"
        f"  lost/repeated/different/incomplete",
        f"{'':26}{'hit':>9}{'':>6}{'later':>7}" + f"{'p50':>7}{'p99':>7}{'most':>7}" * 3,
    ]
    groups: list[tuple[str, list[Played]]] = [
        (f"{factor:g} x what was said", [one for one in played if one.factor == factor])
        for factor in FACTORS
    ]
    broken = [one for one in played if one.factor == BROKEN]
    for axis in ("lost", "backup", "context", "degree", "load"):
        for value in dict.fromkeys(getattr(one.cell, axis) for one in broken):
            mine = [one for one in broken if getattr(one.cell, axis) == value]
            groups.append((f"  {axis} {value}", mine))
    for name, mine in groups:
        if not any(one.waited for one in mine):
            lines.append(f"{name:26}{sum(one.hit for one in mine):>9}{0:>6}")
            continue
        found = figures_of(mine)
        lines.append(
            f"{name:26}{found['hit']:>9}{found['stayed']:>6}{found['left_later']:>7}"
            + "".join(
                f"{found[key][of]:7.2f}"
                for key in ("announced_s", "pause_s", "delay_s")
                for of in ("p50", "p99", "most")
            )
            + f"{found['limit_s'][0]:>7.2f}{found['over']:>6}  "
            + "/".join(str(found[key]) for key in ("lost", "repeated", "different", "incomplete"))
        )
    found = figures_of(broken)
    said = f"{found['tokens']:,} tokens of {found['streams']:,} streams compared"
    return "\n".join([*lines, "", said, "PASSED" if passed(found) else "MISSED"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, help="processes at a time")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    seeds = range(chosen.seed, chosen.seed + chosen.seeds)
    record = Record(*seeds, timed=False)
    cases = [(cell, factor, seed) for factor in FACTORS for seed in seeds for cell in grid()]
    with ProcessPoolExecutor(chosen.jobs, mp_context=get_context("spawn")) as pool:
        played = list(pool.map(play, *zip(*cases, strict=True), chunksize=8))
    text = as_text(played, len(seeds))
    print(text)
    figures = {
        f"{factor:g}": figures_of([one for one in played if one.factor == factor])
        for factor in FACTORS
    }
    over = [
        asdict(one.cell) | asdict(each)
        for one in played
        for each in one.waited
        if one.factor == BROKEN and each.delay_s > each.limit_s
    ]
    record.keep(chosen.out, "broken_word", {"by_factor": figures, "over": over}, text)
    return 0 if passed(figures[f"{BROKEN:g}"]) else 1


if __name__ == "__main__":
    sys.exit(main())
