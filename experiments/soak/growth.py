"""Memory and open descriptors of the processes of a run, and by how much they grew.

A life is one process of a name. A life that is never ended is compared with itself: its windows
after the first ten minutes with the first one, which begins when the records of finished answers
are dropped as fast as they come. Lives that are ended are compared with each other, by kind: those
that began after the first ten minutes with those of before, each from its second minute on. Of a
window or life count the median of its memory and the fewest of its descriptors.
"""

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

MOST_GROWTH = 0.05
MOST_DESCRIPTORS = 5  # Connections are pooled: a few more or less are no leak.
FIRST_S = 600.0
WARM_S = 300.0  # Finished answers are kept so long (docs/guide/proxies.md).
WARM_LIFE_S = 60.0
FEWEST_SAMPLES = 10
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Sample(NamedTuple):
    at_s: float  # Since the start of the load.
    name: str
    pid: int
    rss_bytes: int
    descriptors: int


class Size(NamedTuple):
    rss_bytes: float
    descriptors: int


@dataclass(frozen=True, slots=True)
class Growth:
    """The first size, and the largest one after it."""

    lives: int
    first: Size
    later: Size

    @property
    def is_flat(self) -> bool:
        return (
            self.later.rss_bytes <= (1 + MOST_GROWTH) * self.first.rss_bytes
            and self.later.descriptors <= self.first.descriptors + MOST_DESCRIPTORS
        )

    def as_figures(self) -> dict[str, Any]:
        sizes = {
            name: {"rss_mib": round(size.rss_bytes / 2**20, 1), "descriptors": size.descriptors}
            for name, size in (("first", self.first), ("later", self.later))
        }
        share = self.later.rss_bytes / self.first.rss_bytes - 1
        return {"lives": self.lives} | sizes | {"rss_growth": round(share, 4)}


def read(pids: Mapping[str, int], at_s: float) -> list[Sample]:
    """A sample of each process that is there."""
    found = []
    for name, pid in pids.items():
        process = Path("/proc") / str(pid)
        try:
            pages = int((process / "statm").read_text().split()[1])
            descriptors = len(os.listdir(process / "fd"))
        except OSError:
            continue
        found.append(Sample(at_s, name, pid, pages * _PAGE_BYTES, descriptors))
    return found


def growths(samples: Iterable[Sample], kept: Iterable[str]) -> dict[str, Growth]:
    """The growth of each process of `kept`, which nobody ended, and of each kind of the others.
    Processes that have nothing to be compared with are left out.
    """
    lives: dict[tuple[str, int], list[Sample]] = defaultdict(list)
    for sample in samples:
        lives[sample.name, sample.pid].append(sample)
    found = {}
    before: dict[str, list[Size]] = defaultdict(list)
    after: dict[str, list[Size]] = defaultdict(list)
    kept = {*kept}
    for (name, _), life in lives.items():
        if name in kept:
            windows: dict[int, list[Sample]] = defaultdict(list)
            for sample in life:
                if sample.at_s >= WARM_S:
                    windows[int((sample.at_s - WARM_S) / (FIRST_S - WARM_S))].append(sample)
            # The last window may have begun at the end of the run.
            whole = [each for _, each in sorted(windows.items()) if len(each) >= FEWEST_SAMPLES]
            sizes = [_size(each) for each in whole]
            if len(sizes) > 1:
                found[name] = Growth(1, sizes[0], _largest(sizes[1:]))
            continue
        began_s = life[0].at_s
        if warm := [sample for sample in life if sample.at_s >= began_s + WARM_LIFE_S]:
            (before if began_s < FIRST_S else after)[kind_of(name)].append(_size(warm))
    for kind in sorted(before.keys() & after.keys()):
        lives_of = len(before[kind]) + len(after[kind])
        found[kind] = Growth(lives_of, _largest(before[kind]), _largest(after[kind]))
    return found


def kind_of(name: str) -> str:
    """`proxies` of `proxy-0`, `agents` of `agent-n0`, and so on."""
    kinds = {"proxy": "proxies", "agent": "agents", "p": "prefill", "d": "decode"}
    return kinds[name.partition("-")[0].rstrip("0123456789")]


def _size(samples: Sequence[Sample]) -> Size:
    memory = median(sample.rss_bytes for sample in samples)
    return Size(memory, min(sample.descriptors for sample in samples))


def _largest(sizes: Sequence[Size]) -> Size:
    memory, descriptors = zip(*sizes, strict=True)
    return Size(max(memory), max(descriptors))
