"""How well step times of a layout follow from the tables of other degrees: OPT-66B on A100, whose
four degrees were measured, the uneven one (3) among them.
"""

import argparse
from itertools import permutations
from pathlib import Path

from experiments.record import Record
from kvrs.elastic.layouts import staged, uneven
from kvrs.elastic.shapes import SHAPES
from kvrs.elastic.speed import Degree, Speed, shares
from kvrs.profiles import catalog

ENGINES = ("distserve", "vllm")
DEGREES = (2, 3, 4, 8)
# Batch, and context of all together.
STEPS = ((1, 500), (16, 16_000), (64, 32_000))
PROMPTS = (512, 2048)
# Its degree of two has no room for these batches: the table has preemption in it.
_CROWDED = ("vllm", 2)


def degree(engine: str, tp: int) -> Degree:
    name = f"opt-66b-a100-{engine}-tp{tp}"
    return Degree(tp, catalog.decode_table(name), catalog.prefill_table(name))


def measure() -> list[dict[str, object]]:
    units = SHAPES["facebook/opt-66b"].units()
    own = {tp: shares(uneven(units, staged(units.layers, [range(tp)])), units) for tp in DEGREES}
    rows: list[dict[str, object]] = []
    for engine in ENGINES:
        tables = {tp: degree(engine, tp) for tp in DEGREES if (engine, tp) != _CROWDED}
        known: list[tuple[int, int | None]] = [(tp, None) for tp in tables]
        known += [(near, far) for near, far in permutations(tables, 2)]
        for near, far in known:
            speed = Speed(tables[near], None if far is None else tables[far])
            for tp in tables:
                if tp in (near, far):
                    continue
                decode = [
                    speed.decode_s(own[tp], *step) / tables[tp].decode.seconds_for(*step) - 1
                    for step in STEPS
                ]
                prefill = [
                    speed.prefill_s(own[tp], tokens) / tables[tp].prefill.seconds_for(tokens) - 1
                    for tokens in PROMPTS
                ]
                rows.append(
                    {
                        "engine": engine,
                        "near": near,
                        "far": far,
                        "predicted": tp,
                        "decode_errors": decode,
                        "prefill_errors": prefill,
                    }
                )
    return rows


def as_text(rows: list[dict[str, object]]) -> str:
    steps = " ".join(f"{f'{batch} x {tokens // batch}':>9}" for batch, tokens in STEPS)
    prompts = " ".join(f"{tokens:>8}" for tokens in PROMPTS)
    lines = [
        "OPT-66B on A100: error of a predicted step; decode by batch x context, prefill by tokens",
        "",
        f"{'tables':14} {'from tp':9} {'for tp':>6}   {steps}   {prompts}",
    ]
    for row in rows:
        tables = str(row["near"]) if row["far"] is None else f"{row['near']} and {row['far']}"
        decode, prefill = row["decode_errors"], row["prefill_errors"]
        assert isinstance(decode, list)
        assert isinstance(prefill, list)
        lines.append(
            f"{row['engine']!s:14} {tables:9} {row['predicted']!s:>6}   "
            + " ".join(f"{error:>+9.1%}" for error in decode)
            + "   "
            + " ".join(f"{error:>+8.1%}" for error in prefill)
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    record = Record(timed=False)
    rows = measure()
    text = as_text(rows)
    print(text)
    record.keep(options.out, "layout_speed", {"rows": rows}, text)


if __name__ == "__main__":
    main()
