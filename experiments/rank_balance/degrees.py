"""How even the work of ranks is: the busiest one's CPU time over the mean, at degrees 2 to 4.

A model of 8 KV heads, which 3 ranks cannot share evenly. The layouts are those that `tp` alone
gives; beside it, for 3 ranks, the one with heads that are left over spread by sequences.
"""

import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.random_model import write_random_llama
from experiments.rank_balance.run import FULL, LAYERS, Sizes, measured, read_options
from experiments.record import Record
from kvrs.config.cluster import InstanceSettings
from kvrs.engine.model_config import ModelConfig
from kvrs.engine.ranks.settings import layout_of
from kvrs.protocol.instance import Role

DEGREES = ((2, False), (3, False), (3, True), (4, False))  # Whether left-over heads are spread.
BAR = 1.10
PHASES = ("prefill", "decode")


def main() -> None:
    options, sizes = read_options(__doc__ or "")
    record = Record(options.seed)
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "random"
        write_random_llama(model, options.seed, layers=LAYERS, kv_heads=FULL)
        rows = [row_of(model, degree, sizes, spread=spread) for degree, spread in DEGREES]
    text = as_text(rows, sizes)
    print(text)
    void = record.keep(options.out, "rank_balance_degrees", {"rows": rows}, text)
    raise SystemExit(1 if void or not all(map(is_even, rows)) else 0)


def row_of(model: Path, degree: int, sizes: Sizes, *, spread: bool) -> dict[str, Any]:
    """CPU seconds of each rank, and of the instance's own process, its start included."""
    settings = InstanceSettings.model_validate({"id": "d0", "role": Role.DECODE, "tp": degree})
    layout = layout_of(settings, ModelConfig.from_directory(model).units, spread=spread)
    assert layout is not None
    began_s = time.process_time()
    found = measured(model, layout, sizes)
    own_s = time.process_time() - began_s
    row: dict[str, Any] = {"ranks": degree, "spread": spread, "own_process_s": own_s}
    for phase in PHASES:
        each_s = found[f"{phase}_s"]
        row |= {f"{phase}_s": each_s, f"{phase}_over_mean": max(each_s) / statistics.mean(each_s)}
    return row


def is_even(row: dict[str, Any]) -> bool:
    return all(row[f"{phase}_over_mean"] <= BAR for phase in PHASES)


def as_text(rows: Sequence[dict[str, Any]], sizes: Sizes) -> str:
    lines = [
        f"{sizes.sequences} sequences of {sizes.context_tokens} tokens, {sizes.steps} decode "
        f"steps; a model of {FULL} KV heads",
        "CPU seconds of each rank, and the busiest one's over their mean",
        "",
    ]
    for row in rows:
        name = f"{row['ranks']} ranks" + (", heads spread" if row["spread"] else "")
        for phase in PHASES:
            each_s = " ".join(f"{each:.2f}" for each in row[f"{phase}_s"])
            lines.append(f"{name:<22}{phase:<9}{row[f'{phase}_over_mean']:>6.3f}   {each_s}")
        lines.append(
            f"{'':<22}the instance's own process, with its start: {row['own_process_s']:.2f}"
        )
    verdict = "met" if all(map(is_even, rows)) else "missed"
    lines += ["", f"bar: at most {BAR:.2f} times the mean at each of them: {verdict}"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
