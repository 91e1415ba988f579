"""Tables and figures of the five seeds beside ours: docs/evidence.md and docs/evidence.json.

python -m experiments.run_all --readme  # Also writes both anew.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from experiments.exhibits import SEEDS, How

DOCS = Path(__file__).parent.parent / "docs"

_HEADER = """# Evidence: what was published, and ours beside it

kvrs unites five systems, the seeds. This page lists every table and figure of their papers with the
published figures, ours, how ours came about, and why the two differ. `evidence.json` beside it has
the same rows. Both are made from the kept results by `python -m experiments.run_all --readme`; a
test compares them. What a run needs and whether its result is stale: `python -m
experiments.run_all`. No paper's hardware was at hand, so ratios and orders can be compared, seconds
cannot.

"""


_MEANING = {
    How.REAL: "processes, sockets and computation of a small model, timed",
    How.PACED: "real processes and transfers; engines sleep the times of a profile",
    How.SIMULATED: "the product's decisions in virtual time",
    How.COMPUTED: "the product's code for it; no time is measured",
    How.MISSING: "nothing yet; the last column says what it needs",
}


def rows() -> Iterator[dict[str, str]]:
    """Every exhibit as strings."""
    for seed, exhibits in SEEDS.items():
        for each in exhibits:
            yield {
                "seed": seed,
                "exhibit": each.name,
                "published": each.published,
                "ours": each.ours() if each.ours is not None else "-",
                "how": each.how.value,
                "why": each.why,
                "experiment": each.experiment or "-",
            }


def as_markdown() -> str:
    found = list(rows())
    filled = sum(row["how"] != How.MISSING for row in found)
    lines = [_HEADER + f"{filled} of {len(found)} rows have a figure of ours.", ""]
    lines += ["| how | |", "| --- | --- |"]
    lines += [f"| {how.value} | {text} |" for how, text in _MEANING.items()]
    for seed in SEEDS:
        lines += ["", f"## {seed}", ""]
        lines += [
            "| exhibit | published | ours | how | why they differ, or what is missing | "
            "experiment |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        for row in found:
            if row["seed"] == seed:
                folder = row["experiment"]
                link = folder if folder == "-" else f"[{folder}](../experiments/{folder})"
                cells = (row[key] for key in ("exhibit", "published", "ours", "how", "why"))
                lines.append(f"| {' | '.join(cells)} | {link} |")
    return "\n".join(lines) + "\n"


def as_json() -> str:
    return json.dumps(list(rows()), indent=1) + "\n"


def renew() -> None:
    """Write both documents."""
    (DOCS / "evidence.md").write_text(as_markdown())
    (DOCS / "evidence.json").write_text(as_json())
