"""CPU time of the embedded engine's batches: a piece of a prompt, decode steps, and both in one.

    python -m experiments.simulator.mixed_batch          # A minute.

A mixed batch is one pass over the weights: it is to take less than its parts one after the other,
by about what a second reading of the weights takes.
"""

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from experiments.command_line import parser_of
from experiments.random_model import write_random_llama
from experiments.record import Record
from kvrs.config.cluster import EngineSettings
from kvrs_engine.engine.worker import Worker
from kvrs_engine.scheduling.sequences import Chunk

LAYERS, KV_HEADS = 6, 4
CONTEXT_TOKENS = 256
PAGE_SIZE, PAGES = 16, 1024
CASES = ((16, 8), (64, 8), (64, 32), (256, 8), (256, 32))  # Tokens of the prompt, decode steps.
REPEATS = 7


def chunks_of(prompt_tokens: int, decodes: int) -> list[Chunk]:
    """The piece of a prompt, if it has tokens, and decode steps with contexts of their own."""
    each = -(-CONTEXT_TOKENS // PAGE_SIZE)
    found = [
        Chunk([7], CONTEXT_TOKENS - 1, list(range(n * each, (n + 1) * each)), logits=1)
        for n in range(decodes)
    ]
    if prompt_tokens:
        first = decodes * each
        pages = list(range(first, first + -(-prompt_tokens // PAGE_SIZE)))
        found.append(Chunk(list(range(prompt_tokens)), 0, pages, logits=1))
    return found


def seconds(worker: Worker, chunks: Sequence[Chunk]) -> float:
    began_s = time.thread_time()
    worker.execute(chunks)
    return time.thread_time() - began_s


def measure(worker: Worker, prompt_tokens: int, decodes: int) -> dict[str, Any]:
    """Medians of rounds in which the three batches are computed in turn."""
    batches = [
        chunks_of(prompt_tokens, 0),
        chunks_of(0, decodes),
        chunks_of(prompt_tokens, decodes),
    ]
    rounds = [[seconds(worker, each) for each in batches] for _ in range(REPEATS + 1)][1:]
    prompt_s, decode_s, mixed_s = (median(column) for column in zip(*rounds, strict=True))
    return {
        "prompt_tokens": prompt_tokens,
        "decodes": decodes,
        "prompt_s": prompt_s,
        "decode_s": decode_s,
        "mixed_s": mixed_s,
        "of_both": mixed_s / (prompt_s + decode_s),
        "added_of_decode": (mixed_s - prompt_s) / decode_s,
    }


def as_text(rows: Sequence[dict[str, Any]], weight_bytes: int) -> str:
    lines = [
        f"a random Llama with {weight_bytes / 1e6:.0f} MB of weights, contexts of "
        f"{CONTEXT_TOKENS} tokens, medians of {REPEATS} rounds; CPU time of one thread",
        f"{'prompt tokens':>13}{'decodes':>9}{'prompt ms':>11}{'decode ms':>11}{'mixed ms':>10}"
        f"{'mixed of both':>15}{'added of decode':>17}",
    ]
    lines += [
        f"{row['prompt_tokens']:>13}{row['decodes']:>9}{row['prompt_s'] * 1e3:>11.1f}"
        f"{row['decode_s'] * 1e3:>11.1f}{row['mixed_s'] * 1e3:>10.1f}{row['of_both']:>15.0%}"
        f"{row['added_of_decode']:>17.0%}"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    options = parser_of(__doc__, __file__).parse_args()
    record = Record(0)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_random_llama(directory, 0, layers=LAYERS, kv_heads=KV_HEADS)
        weight_bytes = sum(each.stat().st_size for each in directory.glob("*.safetensors")) * 2
        settings = EngineSettings(pages=PAGES, page_size_tokens=PAGE_SIZE, max_batch_tokens=1024)
        worker = Worker(directory, settings)
        worker.take_memory(0)
        rows = [measure(worker, *case) for case in CASES]
    text = as_text(rows, weight_bytes)
    print(text, end="")
    return record.keep(options.out, "mixed_batch", {"rows": rows}, text)


if __name__ == "__main__":
    sys.exit(main())
