"""Tables and figures of the five seeds beside ours: docs/evidence.md and docs/evidence.json.

python -m experiments.run_all --readme  # Also writes both anew.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from experiments.exhibits import SEEDS, Exhibit, How

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
- KVRS on DistServe: one call prefills and decodes. `policy.handoff` is weighed when a stream
  begins, not when its prefill is done: one that is to decode elsewhere gets two calls, and is
  weighed again between them.
- KVRS and LUMEN, each victim for itself: `auto` counts what a choice costs the other victims
  ([0059](decisions/0059-victims-of-one-event-spare-their-target.md)); `rom` and the fixed policies
  do not.
- KVRS, gossiped queue lengths: shown, not decided on. Decisions take what instances report to the
  proxy every 0.25 s, which is newer than gossip by seconds ([gossip.md](gossip.md)).
- LUMEN, queueing delay: the predicted wait of work that comes now, not the mean of past waits. For
  a decode instance with free places it is 0, so that pressure alone decides there.
- LUMEN, restore pressure: a footprint is what the request may come to, not the longest context of
  the model. Agents that are nearly as good share checkpoints out, since a mean does not grow with
  their number.
- LUMEN, holder: chosen when an attempt starts, and again when its hand-off goes elsewhere.
- LUMEN, rebalancing: then `auto` may leave the assigned target
  ([0015](decisions/0015-dispatch-before-costs.md)). The loads are the streams of this proxy with
  all its workers, and what the last load report counts beyond them: those of other proxies.
- LUMEN, three queues: it leaves their shares open; ours are 8 to 4 to 1.
- LUMEN, reload from SSD: engines of the simulator are back after seconds, or after 20 to 60 s, and
  do not read weights at a rate.
- RaidServe and AnchorTP, timings of ranks: layouts, plans and bytes are checked, seconds on GPUs
  are not.

In experiments marked `paced` the engines sleep the times of a profile. They show that overheads are
small and that decisions are carried out; only those without pace show that a prediction is right.
"""

_DISTSERVE = """
## KVRS on DistServe

These runs need a checkout of DistServe, which is not part of the project ([distserve](distserve.md)
says which and how): `export DISTSERVE_HOME=DIR`, then

- Are streams exact under every death? `distserve_kill_series.run`, 4 minutes; yes, under each
  policy: `--policy rom`, `always_migrate`, `always_recompute`, `always_restore` (with `--backup
  both`). How long their pauses are cannot be compared by one run each.
- What does host backup cost? `distserve_overhead.backup`, 13 minutes: `off`, `local` and `both` in
  turns over the same processes, CPU by kind of process. Three to four percent of CPU; its README
  says where, and what was mended.
- What do the patches cost? `distserve_overhead.run`, 19 minutes. Nothing: the patched server takes
  less CPU for a token than the plain one.
- Is a hand-off to another server worth it under skew, and from which queue on? `load_skew.run` and
  `load_skew.rates`, `hand_off_crossover.run`, each with `--distserve`.
- Migrate or recompute, decided by the tables that the stages measure themselves: `crossover.run
  --distserve`. `rom` is wrong there where a stage reads many known tokens one a step.
- All of it that is stale: `run_all --stale --only distserve_kill_series distserve_overhead
  load_skew crossover hand_off_crossover`.

What no command answers yet:

- **A GPU.** Copies of pages between device and host run there only.
"""

_MEANING = {
    How.REAL: "processes, sockets and computation of a small model, timed",
    How.PACED: "real processes and transfers; engines sleep the times of a profile",
    How.SIMULATED: "the product's decisions in virtual time",
    How.COMPUTED: "the product's code for it; no time is measured",
    How.MISSING: "nothing yet; the last column says what it needs",
}


def rows(seeds: Mapping[str, Sequence[Exhibit]] = SEEDS) -> Iterator[dict[str, str]]:
    """Every exhibit as strings."""
    for seed, exhibits in seeds.items():
        for each in exhibits:
            yield {
                "seed": seed,
                "exhibit": each.name,
                "published": each.published,
                "ours": each.ours() if each.is_filled and each.ours is not None else "-",
                "how": (each.how if each.is_filled else How.MISSING).value,
                "why": _why(each),
                "experiment": each.experiment or "-",
            }


def _why(each: Exhibit) -> str:
    if each.result is None or each.is_filled:
        return each.why
    waits = f"not run yet, needs {each.needs}" if each.needs else "not run yet"
    return f"{waits}; {each.why}"


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
    return "\n".join(lines) + "\n" + _DIFFERENCES + _DISTSERVE


def as_json() -> str:
    return json.dumps(list(rows()), indent=1) + "\n"


def renew() -> None:
    """Write both documents."""
    (DOCS / "evidence.md").write_text(as_markdown())
    (DOCS / "evidence.json").write_text(as_json())
