"""How often a draft draws the token that its target draws, by the way in which both draw.

    python -m experiments.speculation.draws [--streams 24] [--tokens 120]

- by token: the engine's own way (`kvrs/engine/sampler.py`), the largest of logits and Gumbel noise
  of the seed, the position and the token;
- by likelihood: the place of one number of the seed and position among the tokens in order of
  likelihood.

Both are exact draws of the model's distribution. The pairs of models are tiny, and nothing is
timed.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.record import Record
from experiments.rig import interval
from experiments.speculation.acceptance import (
    CASES,
    PAGES,
    PROMPT_TOKENS,
    continued,
    expected,
    prompts_of,
    settings_for,
)
from kvrs.engine.sampler import SamplingParams, sample
from kvrs.engine.speculation.pairs import write_pair
from kvrs.engine.worker import Worker
from kvrs.scheduling.sequences import Chunk

TEMPERATURES = (0.2, 0.8)


def by_likelihood(logits: Tensor, temperature: float, seed: int, position: int) -> int:
    scaled = logits.numpy().astype(np.float64) / temperature
    ids = np.argsort(-scaled, kind="stable")
    cumulative = np.cumsum(np.exp(scaled[ids] - scaled[ids[0]]))
    number = np.random.Generator(np.random.Philox(key=[seed, position])).random()
    return int(ids[np.searchsorted(cumulative[:-1], number * cumulative[-1], side="right")])


def rows_of(worker: Worker, histories: list[list[int]]) -> list[Tensor]:
    """Logits behind each token from the prompt's last one on, but for the stream's last one."""
    found = []
    for number, ids in enumerate(histories):
        pages = range(number * PAGES, (number + 1) * PAGES)
        known = ids[:-1]
        wanted = len(known) - PROMPT_TOKENS + 1
        found.append(worker.execute([Chunk(known, 0, pages, logits=wanted)]))
    return found


def measure(directory: Path, streams: int, tokens: int, seed: int) -> list[dict[str, Any]]:
    settings, prompts, rows = settings_for(streams), prompts_of(streams, seed), []
    for acceptance, depth in CASES:
        pair = directory / f"{acceptance}"
        write_pair(pair, acceptance, seed)
        target, draft = Worker(pair / "target", settings), Worker(pair / "draft", settings)
        for heat in TEMPERATURES:
            histories = continued(target, prompts, tokens, heat)
            shares: dict[str, list[float]] = {"likelihood": [], "token": []}
            for number, (right, proposed) in enumerate(
                zip(rows_of(target, histories), rows_of(draft, histories), strict=True)
            ):
                params = SamplingParams(temperature=heat, seed=number)
                same = dict.fromkeys(shares, 0)
                for at, (one, other) in enumerate(zip(right, proposed, strict=True)):
                    position = PROMPT_TOKENS + at
                    same["token"] += sample(one, params, position) == sample(
                        other, params, position
                    )
                    same["likelihood"] += by_likelihood(
                        one, heat, number, position
                    ) == by_likelihood(other, heat, number, position)
                for name, count in same.items():
                    shares[name].append(count / len(right))
            for name, found in shares.items():
                share = sum(found) / len(found)
                rows.append(
                    {
                        "pair": acceptance,
                        "depth": depth,
                        "temperature": heat,
                        "draw": name,
                        "same": share,
                        "interval": interval(found),
                        "expected_a_step": expected(min(share, 0.999), depth),
                    }
                )
    return rows


def as_text(rows: list[dict[str, Any]]) -> str:
    lines = [
        "tokens that target and draft draw alike behind the same history; what that would accept",
        "  pair depth temperature  draw by         alike  accepted a step",
    ]
    lines += [
        f"  {row['pair']:.2f} {row['depth']:5} {row['temperature']:11.1f}  {row['draw']:10} "
        f"{row['same']:10.2f} ± {row['interval']:.2f} {row['expected_a_step']:10.2f}"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    record = Record(options.seed, timed=False)
    with tempfile.TemporaryDirectory() as directory, torch.inference_mode():
        rows = measure(Path(directory), options.streams, options.tokens, options.seed)
    text = as_text(rows)
    print(text, end="")
    record.keep(options.out, "draws", {"rows": rows}, text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
