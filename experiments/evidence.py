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


_DIFFERENCES = """
## Mechanisms that differ from the papers

By intention, or not built; everything else of the five mechanisms is as published.

- KVRS, bandwidth: decisions take the lower bound of the estimate, not the moving average itself
  ([0024](decisions/0024-link-estimates-are-lower-bounds.md)).
- KVRS, target: its best remote node is the one that `policy.dispatch` names, by streams, because
  the costs of `rom` cannot tell targets apart.
- KVRS, 32 slots: for recoveries. A hand-off takes none, so that no new request waits for one.
- KVRS, ABORT: off unless `slo.abort` is set, as in `kvrs up --preset kvrs`.
- KVRS on DistServe: one call prefills and decodes, so that a hand-off stays in its server and
  `policy.handoff` changes nothing there. Missing: load skew and crossover on it, and policies
  other than `auto` under kills.
- KVRS and LUMEN, each victim for itself: `auto` counts what a choice costs the other victims
  ([0059](decisions/0059-victims-of-one-event-spare-their-target.md)); `rom` and the fixed policies
  do not.
- LUMEN, rebalancing: then `auto` may leave the assigned target
  ([0015](decisions/0015-dispatch-before-costs.md)). The loads are the streams of this proxy with
  all its workers; those of other proxies are not counted yet.
- LUMEN, three queues: it leaves their shares open; ours are 8 to 4 to 1.
- LUMEN, reload from SSD: engines of the simulator are back after seconds, not tens of seconds.
- RaidServe and AnchorTP, timings of ranks: layouts, plans and bytes are checked, seconds on GPUs
  are not.

Experiments whose engines sleep a profile's times (`paced`) show that overheads are small and
decisions are carried out; that a prediction is right is shown only where nothing is paced.
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
    return "\n".join(lines) + "\n" + _DIFFERENCES


def as_json() -> str:
    return json.dumps(list(rows()), indent=1) + "\n"


def renew() -> None:
    """Write both documents."""
    (DOCS / "evidence.md").write_text(as_markdown())
    (DOCS / "evidence.json").write_text(as_json())
