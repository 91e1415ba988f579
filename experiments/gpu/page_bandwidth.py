"""How fast pages leave a GPU and come back, against one plain copy of as many bytes in the same
run.

python -m experiments.gpu.page_bandwidth [--megabytes 2048] [--repeats 9]
"""

import time
from collections.abc import Callable
from statistics import median

import torch
from xxhash import xxh3_64_intdigest

from experiments.gpu.model import PAGE_TOKENS, SHAPES
from experiments.gpu.rig import Place, make_pool, parse, place, report, synchronize
from kvrs.engine.kv_pool import KvPool
from kvrs.protocol.geometry import KvGeometry

TARGET = 0.9
# By the bytes of a page: of a small model, and of the two shapes that the other scripts use.
GEOMETRIES = {
    "256 KiB": KvGeometry(
        layers=16, kv_heads=2, head_dim=128, dtype_bytes=2, page_size_tokens=PAGE_TOKENS
    ),
    "8b": SHAPES["8b"].geometry,
    "14b": SHAPES["14b"].geometry,
}


def plain(
    pages: int, page_bytes: int, where: Place
) -> tuple[Callable[[], None], Callable[[], None]]:
    """One copy of everything, out and in: what the bus gives."""
    host = torch.empty(pages * page_bytes, dtype=torch.uint8, pin_memory=not where.rehearsal)
    device = torch.empty(pages * page_bytes, dtype=torch.uint8, device=where.device)
    return lambda: _ignore(host.copy_(device, non_blocking=True)), lambda: _ignore(
        device.copy_(host, non_blocking=True)
    )


def _ignore(result: object) -> None:
    """A copy returns its target."""


def paged(pool: KvPool, pages: range, *, to_host: bool) -> Callable[[], None]:
    """A copy of pages as the engine makes it, waiting included."""

    def run() -> None:
        staged = pool.stage(pages)
        staged.begin_save() if to_host else staged.begin_restore(len(pages))
        staged.wait()
        staged.free()

    return run


def is_exact(pool: KvPool, pages: range) -> bool:
    """Saved, lost and restored pages are the same bits."""
    pool.tensor.view(torch.int16).random_()
    staged = pool.stage(pages)
    staged.begin_save()
    staged.wait()
    before = [xxh3_64_intdigest(view) for view in staged.views]
    pool.tensor.zero_()
    staged.begin_restore(len(pages))
    staged.wait()
    staged.free()
    again = pool.stage(pages)
    for view in again.views:
        view[:] = bytes(len(view))
    again.begin_save()
    again.wait()
    after = [xxh3_64_intdigest(view) for view in again.views]
    again.free()
    return before == after and len(set(before)) == len(before)


def main() -> None:
    options = parse(
        __doc__, ("megabytes", 2048, "in each copy"), ("repeats", 9, "of each way, in turns")
    )
    where = place(options)
    rows = []
    for name, geometry in GEOMETRIES.items():
        count = (
            max(4, (options.megabytes << 20) // geometry.page_bytes) if not where.rehearsal else 4
        )
        # Twice as many: the pages that travel lie apart from each other.
        pool, pages = make_pool(geometry, 2 * count, where), range(0, 2 * count, 2)
        exact = is_exact(pool, pages)
        ways = [
            *plain(count, geometry.page_bytes, where),
            paged(pool, pages, to_host=True),
            paged(pool, pages, to_host=False),
        ]
        times: list[list[float]] = [[] for _ in ways]
        for repeat in range(options.repeats + 1):
            for way, measured in zip(ways, times, strict=True):
                synchronize(where)
                started_s = time.perf_counter()
                way()
                synchronize(where)
                if repeat:  # The first one pins the buffers.
                    measured.append(time.perf_counter() - started_s)
        rates = [count * geometry.page_bytes / median(measured) / 1e9 for measured in times]
        for direction, limit, rate in (
            ("save", rates[0], rates[2]),
            ("restore", rates[1], rates[3]),
        ):
            rows.append(
                [
                    name,
                    geometry.page_bytes,
                    direction,
                    rate,
                    limit,
                    rate / limit,
                    rate / limit >= TARGET,
                    exact,
                ]
            )
        del pool, ways
    report(
        "page_bandwidth",
        options,
        where,
        [
            "pages",
            "page bytes",
            "direction",
            "GB/s",
            "plain copy GB/s",
            "ratio",
            f"at least {TARGET}",
            "exact",
        ],
        rows,
    )


if __name__ == "__main__":
    main()
