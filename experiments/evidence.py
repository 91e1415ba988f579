"""Tables and figures of the five seeds beside ours, with a verdict each: docs/evidence.md and
docs/evidence.json.

python -m experiments.run_all --readme  # Also writes both anew, and marked figures in other pages.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from experiments import kept
from experiments.exhibits import SEEDS, Exhibit, How
from experiments.verdicts import MEANING

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"

_HEADER = """# Evidence: what was published, and ours beside it

kvrs unites five systems, the seeds. This page lists every table and figure of their papers with the
published figures, ours, a verdict on the two, how ours came about, and why the two differ.
`evidence.json` beside it has the same rows. Both are made from the kept results by `python -m
experiments.run_all --readme`; a test compares them. What a run needs, and how old its result is:
`python -m experiments.run_all`. No paper's hardware was at hand, so ratios and orders can be
compared, seconds cannot. Mechanisms that differ, and what is missing or weaker:
[papers](research/papers.md).
"""

_VERDICTS = """
Of several comparisons the middle one is the verdict of the row, the weaker one of two; one that
contradicts the publication decides. A change counts as near to a published one if the ratio and the
change are both within a fifth.
"""

_READING = """
In LUMEN's rows 8x2 means that two of eight instances fail, at 6.5 requests a second for each of
them; 4x1:7.5 is another rate. An interval is that of a mean over runs (95 %, Student).
"""


_HOWS = {
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
                "note": each.note,
                "verdict": each.verdict.value,
                "grounds": each.grounds,
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
    parts = [_HEADER, _verdicts(found), _VERDICTS, _hows(found), _READING]
    for seed in SEEDS:
        parts += [f"## {seed}", _table([row for row in found if row["seed"] == seed])]
    parts += [
        _missed_bars(),
    ]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _missed_bars() -> str:
    """Every kept result whose text says that it misses a bar, shown above or not."""
    lines = ["| result | misses |", "| --- | --- |"]
    for text in sorted(kept.EXPERIMENTS.glob("*/results/**/*.txt")):
        path = text.relative_to(kept.EXPERIMENTS)
        if found := kept.misses(str(path)):
            name = f"{path.parts[0]}/{'/'.join(path.with_suffix('').parts[2:])}"
            link = f"[{name}](../experiments/{path.parts[0]})"
            lines.append(f"| {link} | {'; '.join(found)} |")
    return "\n\n".join(
        [
            "## Kept results that miss a bar",
            f"{len(lines) - 2} of them. Bars that were missed by scripts that are gone: [measured "
            "once](research/measured.md).",
            "\n".join(lines),
        ]
    )


def _verdicts(found: Sequence[Mapping[str, str]]) -> str:
    count = Counter(row["verdict"] for row in found)
    return "\n".join(
        [
            f"| verdict | of {len(found)} rows | |",
            "| --- | --- | --- |",
            *(f"| {verdict} | {count[verdict]} | {text} |" for verdict, text in MEANING.items()),
        ]
    )


def _hows(found: Sequence[Mapping[str, str]]) -> str:
    count = Counter(row["how"] for row in found)
    return "\n".join(
        [
            "| how | rows | |",
            "| --- | --- | --- |",
            *(f"| {how} | {count[how]} | {text} |" for how, text in _HOWS.items()),
            "| on a GPU | 0 | what was measured on one is no figure of a paper: "
            "[the connector in vLLM](research/measured.md#the-connector-on-a-gpu) |",
        ]
    )


def _table(found: Sequence[Mapping[str, str]]) -> str:
    lines = [
        "| exhibit | published | ours | verdict | how | why they differ, or what is missing | "
        "experiment |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in found:
        folder = row["experiment"]
        cells = (
            row["exhibit"],
            row["published"],
            row["ours"] + (f" ({row['note']})" if row["note"] else ""),
            f"**{row['verdict']}**" + (f": {row['grounds']}" if row["grounds"] else ""),
            row["how"],
            row["why"],
            folder if folder == "-" else f"[{folder}](../experiments/{folder})",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def as_json() -> str:
    return json.dumps(list(rows()), indent=1) + "\n"


def pages() -> list[Path]:
    """Pages whose marked figures come from kept results."""
    return [ROOT / "README.md", *sorted(DOCS.glob("**/*.md"))]


def renew() -> None:
    """Write both documents, and the marked figures of all pages."""
    (DOCS / "evidence.md").write_text(as_markdown())
    (DOCS / "evidence.json").write_text(as_json())
    for path in pages():
        before = path.read_text()
        after = kept.renewed(before)
        if after != before:
            path.write_text(after)
