"""Drafts that a step accepts where the whole depth is always there, by pairs of tiny models with a
chosen acceptance, beside what independent drafts would give: a (1 - a^s) / (1 - a) (LUMEN, B.6).

    python -m experiments.speculation.acceptance [--streams 48] [--tokens 200]

Both models run in one process and nothing is timed. Every chosen token is compared with that of
single steps, which the target alone has made before.
"""

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from experiments.command_line import parser_of
from experiments.record import Record
from experiments.rig import interval
from kvrs.config.cluster import EngineSettings
from kvrs.protocol.instance import DraftChoice, MirrorUpdate
from kvrs_engine.engine.sampler import SamplingParams, sample
from kvrs_engine.engine.speculation.drafting import Drafting
from kvrs_engine.engine.speculation.pairs import write_pair
from kvrs_engine.engine.worker import Worker
from kvrs_engine.scheduling.alignment import Bursts
from kvrs_engine.scheduling.sequences import Chunk

CASES = ((0.72, 2), (0.60, 4), (0.50, 8))  # Acceptance and depth, as in the paper's Table 5.
TEMPERATURES = (0.0, 0.2, 0.8)
WITHIN = 0.05
PROMPT_TOKENS = 24
PAGES = 32  # Of a stream.


def expected(acceptance: float, depth: int) -> float:
    """Drafts that a step accepts if each is right with that probability."""
    return acceptance * (1 - acceptance**depth) / (1 - acceptance)


@dataclass
class Stream:
    number: int
    ids: list[int]
    params: SamplingParams
    computed: int = 0

    def chunk(self, drafts: list[int]) -> Chunk:
        pages = range(self.number * PAGES, (self.number + 1) * PAGES)
        ids = [*self.ids[self.computed :], *drafts]
        return Chunk(ids, self.computed, pages, logits=1 + len(drafts))


def continued(
    worker: Worker, prompts: list[list[int]], tokens: int, heat: float
) -> list[list[int]]:
    """The streams token by token."""
    streams = [
        Stream(at, list(ids), SamplingParams(temperature=heat, seed=at))
        for at, ids in enumerate(prompts)
    ]
    for _ in range(tokens):
        logits = worker.execute([stream.chunk([]) for stream in streams])
        for stream, row in zip(streams, logits, strict=True):
            stream.computed = len(stream.ids)
            stream.ids.append(sample(row, stream.params, len(stream.ids)))
    return [stream.ids for stream in streams]


def accepted(
    target: Worker,
    draft: Worker,
    settings: EngineSettings,
    calm: list[list[int]],
    depth: int,
    heat: float,
) -> tuple[list[tuple[int, int]], int, int]:
    """Accepted drafts and steps of each stream; steps whose first draft was right; tokens that
    differ.
    """
    drafting = Drafting(draft, settings, depth)
    means, first_right, different = list[tuple[int, int]](), 0, 0
    for number, right_ids in enumerate(calm):
        stream = Stream(
            number, right_ids[:PROMPT_TOKENS], SamplingParams(temperature=heat, seed=number)
        )
        bursts, steps, total = Bursts(), 0, 0
        drafting.batches.update(
            [MirrorUpdate(number, stream.ids[:], DraftChoice(heat, 1.0, 0, 0.0, number))]
        )
        while len(stream.ids) + depth < len(right_ids):
            while drafting.batches.has_work:
                for burst in drafting.step():
                    bursts.came(burst.position, burst.token_ids, burst.begins_anew)
            drafts = bursts.proposal(stream.ids, depth)
            assert len(drafts) == depth
            rows = target.execute([stream.chunk(drafts)])
            chosen: list[int] = []
            for row, proposed in zip(rows, [*drafts, None], strict=True):
                chosen.append(sample(row, stream.params, len(stream.ids) + len(chosen)))
                if chosen[-1] != proposed:
                    break
            stream.computed = len(stream.ids) + len(chosen) - 1
            stream.ids += chosen
            drafting.batches.update([MirrorUpdate(number, chosen)])
            steps, total = steps + 1, total + len(chosen) - 1
            first_right += len(chosen) > 1
        drafting.batches.update([MirrorUpdate(number)])
        means.append((total, steps))
        different += sum(one != other for one, other in zip(stream.ids, right_ids, strict=False))
    return means, first_right, different


def settings_for(streams: int) -> EngineSettings:
    return EngineSettings(pages=streams * PAGES, max_batch_tokens=1024, max_model_len=PAGES * 16)


def prompts_of(streams: int, seed: int) -> list[list[int]]:
    random = Random(seed)
    return [[random.randrange(2, 512) for _ in range(PROMPT_TOKENS)] for _ in range(streams)]


def measure(directory: Path, streams: int, tokens: int, seed: int) -> list[dict[str, Any]]:
    settings, prompts, rows = settings_for(streams), prompts_of(streams, seed), []
    for acceptance, depth in CASES:
        pair = directory / f"{acceptance}"
        agreed = write_pair(pair, acceptance, seed)
        target, draft = Worker(pair / "target", settings), Worker(pair / "draft", settings)
        for heat in TEMPERATURES:
            calm = continued(target, prompts, tokens, heat)
            means, first_right, different = accepted(target, draft, settings, calm, depth, heat)
            steps = sum(count for _, count in means)
            rows.append(
                {
                    "pair": acceptance,
                    "agreed": agreed,
                    "depth": depth,
                    "temperature": heat,
                    "steps": steps,
                    "accepted": sum(total for total, _ in means) / steps,
                    "interval": interval([total / count for total, count in means]),
                    "first_right": first_right / steps,
                    "expected": expected(acceptance, depth),
                    "different": different,
                }
            )
            print(f"  {rows[-1]}", file=sys.stderr, flush=True)
    return rows


def as_text(rows: list[dict[str, Any]]) -> str:
    lines = [
        "accepted drafts a step, the whole depth always there; expected: of independent drafts",
        "  pair depth temperature   steps  first right   accepted          expected  different",
    ]
    lines += [
        f"  {row['pair']:.2f} {row['depth']:5} {row['temperature']:11.1f} {row['steps']:7} "
        f"{row['first_right']:12.2f} {row['accepted']:10.2f} ± {row['interval']:.2f} "
        f"{row['expected']:12.2f} {row['different']:10}"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def faults_of(rows: list[dict[str, Any]]) -> list[str]:
    """The parts of the claim that the result does not bear out."""
    faults = [f"{row['different']} tokens differ" for row in rows if row["different"]]
    for row in rows:
        off = row["accepted"] / row["expected"] - 1
        if row["temperature"] == 0 and abs(off) > WITHIN:
            faults.append(f"depth {row['depth']}: {off:+.0%} of what independent drafts would give")
    return faults


def main() -> int:
    parser = parser_of(__doc__, __file__, seed=0)
    parser.add_argument("--streams", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=200)
    options = parser.parse_args()
    record = Record(options.seed, timed=False)
    with tempfile.TemporaryDirectory() as directory:
        rows = measure(Path(directory), options.streams, options.tokens, options.seed)
    faults = faults_of(rows)
    text = as_text(rows) + "\n".join(faults or ["PASSED"]) + "\n"
    print(text, end="")
    record.keep(options.out, "acceptance", {"rows": rows}, text)
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
