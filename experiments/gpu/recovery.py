"""How long 32 long requests take to come back on a GPU: recomputed, restored from host memory, and
split between both.

python -m experiments.gpu.recovery [--shape 8b] [--requests 32] [--least 8192] [--most 16384]
[--repeats 3]
"""

import argparse
import time
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.gpu.model import PAGE_TOKENS, SHAPES, RandomModel
from experiments.gpu.rig import Place, make_pool, parse, place, report, synchronize
from kvrs.engine.staging import Staged

CHUNK_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Request:
    # The history, whose last position is always computed: its logits choose the next token.
    tokens: int
    pages: Tensor
    numbers: list[int]  # The same, on the host.

    @property
    def full_pages(self) -> int:
        return (self.tokens - 1) // PAGE_TOKENS


class Recovery:
    def __init__(self, options: argparse.Namespace, where: Place) -> None:
        self.where = where
        shape = SHAPES[options.shape]
        lengths = (
            torch.linspace(options.least, options.most, options.requests).round().to(torch.int64)
        )
        # Long and short ones come mixed, in the same order on every machine.
        order = torch.randperm(options.requests, generator=torch.Generator().manual_seed(7))
        tokens = [int(lengths[index]) for index in order]
        counts = [-(-length // PAGE_TOKENS) for length in tokens]
        self.pool = make_pool(shape.geometry, sum(counts), where)
        self.model = RandomModel(shape, self.pool)
        self.token_ids = torch.randint(0, shape.vocab, (max(tokens),), device=where.device)
        starts = [sum(counts[:index]) for index in range(len(counts))]
        self.requests = [
            Request(
                length,
                torch.arange(start, start + count, device=where.device),
                list(range(start, start + count)),
            )
            for length, start, count in zip(tokens, starts, counts, strict=True)
        ]

    def calibrate(self) -> None:
        """Measure the inputs of the split: seconds to compute so many leading tokens, and seconds
        per page from the host.
        """
        longest = max(self.requests, key=lambda request: request.tokens)
        self.compute(longest, longest.full_pages)  # Warms up.
        synchronize(self.where)
        self.prefilled = [(0, 0.0)]  # Tokens, and seconds that they took.
        end = longest.full_pages * PAGE_TOKENS
        for first in range(0, end, CHUNK_TOKENS):
            started_s = time.perf_counter()
            self.compute_chunk(longest, first, end)
            synchronize(self.where)
            so_far_s = self.prefilled[-1][1] + time.perf_counter() - started_s
            self.prefilled.append((min(first + CHUNK_TOKENS, end), so_far_s))
        for _ in range(2):  # The first time pins the buffers.
            started_s = time.perf_counter()
            staged = self.fetch(longest, 0)
            staged.wait()
            staged.free()
            self.page_s = (time.perf_counter() - started_s) / longest.full_pages

    def split_at(self, request: Request) -> int:
        """The page up to which computing takes as long as fetching the rest."""
        return bisect_right(
            range(request.full_pages),
            0.0,
            key=lambda page: self._computed_s(page) - (request.full_pages - page) * self.page_s,
        )

    def _computed_s(self, pages: int) -> float:
        tokens, seconds = zip(*self.prefilled, strict=True)
        return float(np.interp(pages * PAGE_TOKENS, tokens, seconds))

    def compute(self, request: Request, pages: int) -> None:
        for first in range(0, pages * PAGE_TOKENS, CHUNK_TOKENS):
            self.compute_chunk(request, first, pages * PAGE_TOKENS)

    def compute_chunk(self, request: Request, first: int, end: int) -> None:
        ids = self.token_ids[first : min(first + CHUNK_TOKENS, end)]
        self.model.prefill(ids, first, request.pages)

    def fetch(self, request: Request, first_page: int) -> Staged:
        """Begin to bring the pages from there on; whatever lies in the buffers is as good as a
        checkpoint for a clock.
        """
        pages = request.numbers[first_page : request.full_pages]
        staged = self.pool.stage(pages)
        staged.begin_restore(len(pages))
        return staged

    def next_token(self, request: Request) -> None:
        """Compute what is left behind the full pages, and choose; the stream goes on now."""
        first = request.full_pages * PAGE_TOKENS
        if first < request.tokens - 1:
            self.model.prefill(self.token_ids[first : request.tokens - 1], first, request.pages)
        self.model.decode(
            self.token_ids[request.tokens - 1 : request.tokens],
            request.tokens - 1,
            request.pages[None],
        ).cpu()

    def recover(self, split_at: Callable[[Request], int]) -> list[float]:
        """Bring all back, in their order, each computed up to a page and fetched from there on;
        returns when each goes on.

        The next one's pages are on their way while one is computed.
        """
        synchronize(self.where)
        started_s, times = time.perf_counter(), []
        coming = self.fetch(self.requests[0], split_at(self.requests[0]))
        for index, request in enumerate(self.requests):
            staged = coming
            if index + 1 < len(self.requests):
                coming = self.fetch(self.requests[index + 1], split_at(self.requests[index + 1]))
            self.compute(request, split_at(request))
            staged.wait()
            staged.free()
            self.next_token(request)
            times.append(time.perf_counter() - started_s)
        return times


def main() -> None:
    options = parse(
        __doc__,
        ("shape", "8b", "of the model: 8b or 14b"),
        ("requests", 32, "that are lost at once"),
        ("least", 8192, "tokens of the shortest"),
        ("most", 16384, "tokens of the longest"),
        ("repeats", 3, "of each way, in turns"),
    )
    where = place(options)
    if where.rehearsal:
        options.shape, options.requests, options.least, options.most = "toy", 5, 100, 300
    recovery = Recovery(options, where)
    recovery.calibrate()
    ways: dict[str, Callable[[Request], int]] = {
        "recompute": lambda request: request.full_pages,
        "restore": lambda request: 0,
        "split": recovery.split_at,
    }
    times: dict[str, list[list[float]]] = {name: [] for name in ways}
    for _ in range(options.repeats):
        for name, split_at in ways.items():
            times[name].append(recovery.recover(split_at))
    rows: list[list[Any]] = [
        [
            name,
            median(run[-1] for run in runs),
            median(mean(run) for run in runs),
            median(run[0] for run in runs),
        ]
        for name, runs in times.items()
    ]
    by_name = {name: seconds for name, seconds, *_ in rows}
    share = mean(recovery.split_at(request) / request.full_pages for request in recovery.requests)
    report(
        "recovery",
        options,
        where,
        ["way", "all back s", "mean s", "first s"],
        rows,
        contexts=[request.tokens for request in recovery.requests],
        prefill_tokens_per_s=recovery.prefilled[-1][0] / recovery.prefilled[-1][1],
        restore_gb_per_s=recovery.pool.geometry.page_bytes / recovery.page_s / 1e9,
        computed_share_of_split=share,
        split_against_better=min(by_name["recompute"], by_name["restore"]) / by_name["split"],
    )


if __name__ == "__main__":
    main()
