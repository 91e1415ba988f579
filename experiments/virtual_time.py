"""Common parts of experiments on a simulated cluster: prompts, models of fewer layers, times of
tokens, streams that stay, and running until something has happened.
"""

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

from kvrs.config.file import Config, parse_config
from kvrs.core import staying
from kvrs.ids import InstanceId, StreamId
from kvrs_engine.elastic.units import Units
from kvrs_lab.sim.calls import TOKEN_STRIDE, VOCABULARY, SimRun
from kvrs_lab.sim.cluster import SimCluster
from kvrs_lab.sim.process import Clock, require
from kvrs_lab.sim.rank_model import RankModel
from kvrs_lab.sim.ranks import SimRanks
from kvrs_lab.sim.steady import SteadyDecodes
from kvrs_lab.sim.streams import Arrival, SimJournal

_IDS = array("H", range(VOCABULARY)) * 2


@dataclass(frozen=True, slots=True)
class NumberedPrompt(Sequence[int]):
    """Consecutive ids, which are made when they are read. No two of 50,000 requests begin alike."""

    number: int  # Of the request.
    tokens: int

    def __len__(self) -> int:
        return self.tokens

    def __getitem__(self, at: Any) -> Any:
        return self._ids()[at]

    def __iter__(self) -> Iterator[int]:
        # The one of `Sequence` asks for each id by itself.
        return iter(self._ids())

    def _ids(self) -> "array[int]":
        first = self.number * TOKEN_STRIDE % VOCABULARY
        return _IDS[first : first + self.tokens]


@contextmanager
def token_times() -> Iterator[defaultdict[StreamId, list[float]]]:
    """By stream: when each of its tokens comes, of all simulations within, which work out each step
    by itself.
    """
    tokens_s: defaultdict[StreamId, list[float]] = defaultdict(list)
    append = SimJournal.append

    def noted(journal: SimJournal, token: int, now_s: float) -> None:
        tokens_s[journal.stream].append(now_s)
        append(journal, token, now_s)

    def by_itself(steady: SteadyDecodes, run: SimRun) -> None:
        pass

    with patch.object(SimJournal, "append", noted), patch.object(SteadyDecodes, "take", by_itself):
        yield tokens_s


def grouped(units: Units, groups: int) -> Units:
    """The model's, with so many layers, each of which stands for as many alike."""
    each = units.layers // groups
    return replace(
        units,
        layers=groups,
        attention_bytes=tuple(each * size for size in units.attention_bytes),
        mlp_bytes=tuple(each * size for size in units.mlp_bytes),
    )


@contextmanager
def patient(longest_s: float) -> Iterator[None]:
    """Streams stay at an instance that re-forms for so long, if it takes longer than was promised:
    where there is no other one.
    """
    with patch.multiple(staying, _SHORTEST_GRACE_S=longest_s, _LONGEST_GRACE_S=longest_s):
        yield


def run_until(clock: Clock, done: Callable[[], bool], step_s: float, longest_s: float) -> None:
    """In steps, at the ends of which `done` is asked."""
    until_s = begun_s = clock.now_s
    while not done():
        until_s += step_s  # The clock stands still where nothing happens.
        require(until_s < begun_s + longest_s, "it does not come to an end")
        clock.run(until_s)


HOME = InstanceId("b0")


@dataclass(frozen=True, slots=True)
class EqualStreams:
    """So many equal streams that come at once to one instance of several ranks."""

    pace: str
    ranks: int
    count: int
    context_tokens: int
    output_tokens: int

    def config(self, **backup: Any) -> Config:
        longest = self.context_tokens + self.output_tokens
        instance = {"id": HOME, "role": "both", "tp": self.ranks}
        return parse_config(
            {
                "proxy": {"token_gap_s": 300.0},
                "cluster": {
                    "engine": {
                        "pace": self.pace,
                        "pages": self.count * (longest // 16 + 2),
                        "max_model_len": longest,
                        "max_running": self.count,
                        "max_batch_tokens": 8192,
                    },
                    "nodes": [{"id": "n0", "instances": [instance]}],
                },
                "policy": {"recovery": {"wait_s": 300.0}, "admission": {"wait_s": 3600.0}},
                "slo": {"recovery_gap_s": 600.0},
                "backup": {"mode": "local"} | backup,
            }
        )

    def begin(
        self, config: Config, model: RankModel, seed: int
    ) -> tuple[SimCluster, SimRanks, list[StreamId]]:
        """A cluster to which they come after a second, with its ranks."""
        cluster = SimCluster(
            config, seed=seed, proxies=1, stay_away=0.0, keep_log=False, rank_model=model
        )
        cluster.begin()
        names = [StreamId(f"s{n}") for n in range(self.count)]
        for n, name in enumerate(names):
            arrival = Arrival(1.0, NumberedPrompt(n, self.context_tokens), self.output_tokens)
            cluster.clock.after(1.0, partial(cluster.serving[0].arrive, name, arrival))
        ranks = cluster.engines[HOME].ranks
        assert isinstance(ranks, SimRanks)
        return cluster, ranks, names
