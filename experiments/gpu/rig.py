"""The common parts of the three scripts: devices, times, reports."""

import argparse
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch

from experiments.record import Record
from kvrs.engine.kv_pool import KvPool
from kvrs.engine.staging import StagingArea
from kvrs.protocol.geometry import KvGeometry


class Place(NamedTuple):
    device: torch.device
    rehearsal: bool
    record: Record


def parse(doc: str | None, *options: tuple[str, Any, str]) -> argparse.Namespace:
    """Options with their defaults, and those that all scripts have."""
    parser = argparse.ArgumentParser(description=(doc or "").split("\n")[0])
    for name, default, text in options:
        parser.add_argument(
            f"--{name}", type=type(default), default=default, help=f"{text} (default {default})"
        )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(__file__).parent / "results",
        help="directory for the results; default: results/ beside the script",
    )
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="a toy on the CPU: the code runs, its numbers mean nothing",
    )
    return parser.parse_args()


def place(options: argparse.Namespace) -> Place:
    """The GPU; or the end of the script, with status 0 and the reason."""
    if options.rehearse:
        torch.set_num_threads(1)
        return Place(torch.device("cpu"), True, Record())
    if not torch.cuda.is_available():
        print(f"skipped: torch {torch.__version__} finds no CUDA device on this machine")
        sys.exit(0)
    return Place(torch.device("cuda"), False, Record())


def make_pool(geometry: KvGeometry, pages: int, where: Place) -> KvPool:
    """In a rehearsal pages travel through buffers too, as they do beside a GPU."""
    pool = KvPool(geometry, pages, where.device)
    if where.rehearsal:
        pool._area = StagingArea(pool._bytes)
    return pool


def synchronize(where: Place) -> None:
    if not where.rehearsal:
        torch.cuda.synchronize(where.device)


def report(
    name: str,
    options: argparse.Namespace,
    where: Place,
    columns: list[str],
    rows: list[list[Any]],
    **more: Any,
) -> None:
    """Print a table and what else was found; keep both, unless it was a rehearsal."""
    shown = [
        columns,
        *(
            [f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row]
            for row in rows
        ),
    ]
    widths = [max(len(row[index]) for row in shown) for index in range(len(columns))]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in shown
    ]
    lines += [
        f"{key}: {value:.4g}" if isinstance(value, float) else f"{key}: {value}"
        for key, value in more.items()
    ]
    print(*lines, sep="\n")
    if where.rehearsal:
        print("a rehearsal: these numbers mean nothing")
        return
    result = {
        "device": torch.cuda.get_device_name(where.device),
        "torch": str(torch.__version__),
        "options": {key: str(value) for key, value in vars(options).items() if key != "out"},
        "rows": [dict(zip(columns, row, strict=True)) for row in rows],
        **more,
    }
    lines.append(f"{result['device']}, torch {result['torch']}")
    where.record.keep(options.out, name, result, "\n".join(lines))
