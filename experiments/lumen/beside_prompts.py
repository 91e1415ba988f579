"""Arithmetic of drafts at one survivor: their worth to its streams, and their cost to its prompts.

    python -m experiments.lumen.beside_prompts

Streams decode while prompts wait without end. Ways to share the steps are compared by prompt tokens
per second, which the wait of new requests depends on, and by tokens per second of a stream:

- beside: each step has the decode steps and prompts for the rest of its tokens, and no drafts;
- one draft: the same, and a draft for each stream in place of a token of a prompt;
- alternating: steps of prompts alone, then one that decodes and verifies drafts.

Then the gain where no prompt waits: a step that decodes, with drafts and without. A helper that
drafts beside the steps has none behind a wrong draft, so drafts are there in a share of
a / (1 + a - a^(depth + 1)) of the steps, with acceptance a.
"""

import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from experiments.command_line import parser_of
from experiments.lumen.operating_points import ACCEPTANCE, simulator
from experiments.lumen.paper import PREFILL_FACTOR, STEP_S
from experiments.record import Record
from kvrs_engine.scheduling.drafts import MOST_ROWS
from kvrs_engine.scheduling.pace import Pace
from kvrs_engine.scheduling.sequences import Chunk

DEPTH = 4
BATCH_TOKENS = 1024
STREAMS = (25, 50, 75)
CONTEXT_TOKENS = 1200  # Mean of a stream of Splitwise's conversations, half of its output done.


@dataclass(frozen=True, slots=True)
class Row:
    """Rates of one way with a number of streams."""

    clock: str
    streams: int
    way: str
    step_ms: float  # Mean.
    prompt_tokens_per_s: float
    stream_tokens_per_s: float


def accepted(drafts: float, depth: int = DEPTH) -> float:
    """Return the mean accepted drafts of a stream, with so many drafts per stream on average, dealt
    evenly.
    """
    each = min(drafts, depth)
    whole = int(each)
    return sum(ACCEPTANCE**k for k in range(1, whole + 1)) + (each - whole) * ACCEPTANCE ** (
        whole + 1
    )


def rows_of(clock: str, pace: Pace, streams: int) -> list[Row]:
    context = streams * CONTEXT_TOKENS

    def step_s(prompt_tokens: int, decode_rows: int) -> float:
        chunks = [Chunk([0] * prompt_tokens, 0, [], logits=1)] if prompt_tokens else []
        return pace.batch_s(chunks, decode_rows, context if decode_rows else 0)

    def row(way: str, steps_s: list[float], prompt_tokens: int, tokens: float) -> Row:
        total_s = sum(steps_s)
        mean_ms = total_s / len(steps_s) * 1e3
        return Row(clock, streams, way, mean_ms, prompt_tokens / total_s, tokens / total_s)

    left = BATCH_TOKENS - streams
    drafts = min(DEPTH * streams, MOST_ROWS - streams)
    alone_s, verify_s = step_s(BATCH_TOKENS, 0), step_s(0, streams + drafts)
    yields, share = 1 + accepted(drafts / streams), presence()
    rows = [
        row("beside", [step_s(left, streams)], left, 1),
        row("one draft", [step_s(left - streams, 2 * streams)], left - streams, 1 + accepted(1)),
    ]
    rows += [
        row(f"alternating {count}:1", [alone_s] * count + [verify_s], count * BATCH_TOKENS, yields)
        for count in (1, 2, 3)
    ]
    plain_s = step_s(0, streams)
    mixed_s = share * verify_s + (1 - share) * plain_s
    rows += [
        row("no prompts", [plain_s], 0, 1),
        row("no prompts, drafts", [mixed_s], 0, 1 + share * (yields - 1)),
        row("no prompts, drafts always", [verify_s], 0, yields),
    ]
    return rows


def presence() -> float:
    """Return the share of steps that find drafts of a helper which drafts beside them."""
    return ACCEPTANCE / (1 + ACCEPTANCE - ACCEPTANCE ** (DEPTH + 1))


def as_text(rows: list[Row]) -> str:
    lines = [
        f"{DEPTH} drafts right with probability {ACCEPTANCE:g}, {BATCH_TOKENS} tokens a batch, "
        f"{MOST_ROWS} rows with drafts; in brackets against the row without drafts",
        f"{'clock':18}{'streams':>8}  {'way':27}{'step ms':>8}{'prompt tokens/s':>22}"
        f"{'tokens/s of a stream':>24}",
    ]
    base = rows[0]
    for row in rows:
        if row.way in ("beside", "no prompts"):
            base = row
        prompts, tokens = (
            f"{own:.{digits}f} ({own / of - 1:+.0%})" if row is not base else f"{own:.{digits}f}"
            for own, of, digits in (
                (row.prompt_tokens_per_s, base.prompt_tokens_per_s or 1, 0),
                (row.stream_tokens_per_s, base.stream_tokens_per_s, 2),
            )
        )
        shown = prompts if row.prompt_tokens_per_s else "-"
        lines.append(
            f"{row.clock:18}{row.streams:>8}  {row.way:27}{row.step_ms:>8.0f}{shown:>22}"
            f"{tokens:>24}"
        )
    lines.append(f"drafts are there in {presence():.0%} of the steps without prompts")
    return "\n".join(lines) + "\n"


def main() -> int:
    options = parser_of(__doc__, __file__).parse_args()
    record, rows = Record(timed=False), list[Row]()
    with tempfile.TemporaryDirectory() as name:
        for clock, factor, step_s in (
            ("profile", 1.0, 0.0),
            ("fitted", PREFILL_FACTOR, STEP_S),
            ("40 ms a step", 1.0, 0.04),
        ):
            pace = Pace(simulator(factor, step_s, Path(name)).pace)
            for streams in STREAMS:
                rows += rows_of(clock, pace, streams)
    text = as_text(rows)
    print(text, end="")
    return record.keep(options.out, "beside_prompts", {"rows": [asdict(row) for row in rows]}, text)


if __name__ == "__main__":
    sys.exit(main())
