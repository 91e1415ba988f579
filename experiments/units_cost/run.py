"""CPU time of whole steps in this tree and in another checkout, interleaved."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from experiments.record import Record

ROOT = Path(__file__).parent.parent.parent
# Name of a step: sequences in the batch, tokens of each, positions before them, repeats in a turn.
STEPS = {
    "decode 1": (1, 1, 200, 40),
    "decode 16": (16, 1, 200, 20),
    "decode 64": (64, 1, 200, 10),
    "prefill 512": (1, 512, 0, 5),
}
LARGE_STEPS = {
    "decode 1": (1, 1, 200, 4),
    "decode 16": (16, 1, 200, 3),
    "decode 64": (64, 1, 200, 2),
    "prefill 512": (1, 512, 0, 1),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--before", type=Path, help="the other checkout")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0, help="of the models' weights")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument(
        "--serve", type=Path, default=None, help="a model: compute steps from stdin"
    )
    options = parser.parse_args()
    if options.serve is not None:
        serve(options.serve)
        return
    if options.before is None:
        parser.error("--before: missing; allowed: a checkout of kvrs")
    record, rows = Record(options.seed), []
    with tempfile.TemporaryDirectory() as scratch:
        for name, steps, write in (
            ("tiny", STEPS, write_tiny),
            ("110 million parameters", LARGE_STEPS, write_large),
        ):
            model = Path(scratch) / name.replace(" ", "-")
            write(model, options.seed)
            for row in compare(model, steps, options.before.resolve(), options.rounds):
                rows.append({"model": name, **row})
                print(rows[-1], flush=True)
    record.keep(options.out, "units_cost", {"rows": rows}, as_text(rows))


def as_text(rows: list[dict[str, Any]]) -> str:
    return "".join(
        f"{row['model']}, {row['step']}: {row['ratio_p50']} of the CPU time before "
        f"({row['after_ms']} ms against {row['before_ms']} ms)\n"
        for row in rows
    )


def compare(
    model: Path, steps: dict[str, tuple[int, int, int, int]], before: Path, rounds: int
) -> list[dict[str, Any]]:
    processes = [_start(model, tree) for tree in (before, ROOT)]
    rows = []
    for name, step in steps.items():
        times: tuple[list[float], list[float]] = ([], [])
        for number in range(rounds):
            for index in ((0, 1), (1, 0))[number % 2]:
                times[index].extend(_ask(processes[index], step))
        old, new = (statistics.median(each) for each in times)
        ratio = round(new / old, 3)
        rows.append(
            {
                "step": name,
                "before_ms": round(old * 1e3, 2),
                "after_ms": round(new * 1e3, 2),
                "ratio_p50": ratio,
            }
        )
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
    return rows


def _start(model: Path, tree: Path) -> "subprocess.Popen[str]":
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, str(Path(__file__)), "--serve", str(model)],
        cwd=tree,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _ask(process: "subprocess.Popen[str]", step: tuple[int, int, int, int]) -> list[float]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(step) + "\n")
    process.stdin.flush()
    times: list[float] = json.loads(process.stdout.readline())
    return times


def serve(model: Path) -> None:
    from kvrs.config.engine import EngineSettings
    from kvrs.engine.worker import Worker
    from kvrs.scheduling.sequences import Chunk

    worker = Worker(model, EngineSettings(pages=2048))
    size = worker.geometry.page_size_tokens
    for line in sys.stdin:
        sequences, tokens, context, repeats = json.loads(line)
        each = -(-(context + tokens) // size)
        chunks = [
            Chunk(
                [1 + (number + at) % 500 for at in range(tokens)],
                context,
                range(number * each, (number + 1) * each),
                wants_logits=True,
            )
            for number in range(sequences)
        ]
        worker.execute(chunks)
        times_s = []
        for _ in range(repeats):
            started_s = time.thread_time()
            worker.execute(chunks)
            times_s.append(time.thread_time() - started_s)
        print(json.dumps(times_s), flush=True)


def write_tiny(directory: Path, seed: int) -> None:
    from kvrs.engine.tiny import write_tiny_model

    write_tiny_model(directory, seed)


def write_large(directory: Path, seed: int) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=12,
        intermediate_size=3072,
        vocab_size=32000,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(directory)


if __name__ == "__main__":
    main()
