"""The time of one rank's layer of Llama-3.1-70B on one GPU, by the KV heads that it has: those of
RaidServe's hybrid attention, beside those of the fullest rank where heads fall as they come
(Figures 11 and 12).

    python -m experiments.gpu.attention          # one GPU, under 5 minutes; imports torch alone
    python -m experiments.gpu.attention --check  # anywhere: the ranks together compute all heads

Eight KV heads on seven ranks: with hybrid attention each has one of them, and the eighth for a
seventh of the sequences; else the fullest rank has two. Ranks of one node are measured in turn on
one GPU, since each waits for the slowest. Decode: 56 sequences of 16,384 tokens, the paper's
example. Prefill: 2,048 tokens, in one prompt and in 64, behind Mooncake's mean context, without a
causal mask within these. Projections and the MLP of the rank are measured beside attention, sums
over ranks are left out. Without a GPU it says so and measures nothing.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

HIDDEN, HEAD_DIM, KV_HEADS, GROUP, INTERMEDIATE = 8192, 128, 8, 8, 28_672
DECODE_SEQUENCES, DECODE_CONTEXT = 56, 16_384
PREFILL_TOKENS, PREFILL_CONTEXT, PREFILL_PROMPTS = 2048, 13_516, (1, 64)
DEGREES = (7, 6, 5)
# Published throughput over that of heads as they come, of which balanced memory is a part.
PUBLISHED = {
    "decode": {7: 1.78, 6: 1.51, 5: 1.16},
    "prefill": {7: 1.25, 6: 1.16, 5: 1.0},
}
_ROUNDS, _WARM = 30, 5
_CUDA: Any = torch.cuda  # Parts of it have no types.


@dataclass(frozen=True, slots=True)
class Part:
    """KV heads of a rank that it computes for so many sequences, each with `tokens` queries."""

    heads: int
    sequences: int
    tokens: int
    context: int


@dataclass(frozen=True, slots=True)
class Load:
    """The work of one rank in a layer."""

    stage: str
    ranks: int
    layout: str
    parts: tuple[Part, ...]
    mlp_columns: int


@dataclass(frozen=True, slots=True)
class Row:
    stage: str
    prompts: int
    ranks: int
    layout: str
    heads: float  # KV heads, a spread one by the share of its sequences.
    attention_ms: float
    layer_ms: float


def shares(ranks: int, sequences: int, tokens: int, context: int) -> dict[str, tuple[Part, ...]]:
    """The work of the fullest rank, with heads as they come and with hybrid attention. A prompt
    that is alone has its spread heads on one rank.
    """
    own, spread = divmod(KV_HEADS, ranks)
    fullest = Part(own + bool(spread), sequences, tokens, context)
    hybrid = [Part(own, sequences, tokens, context)]
    if spread:
        hybrid.append(Part(spread, -(-sequences // ranks), tokens, context))
    return {"as they come": (fullest,), "hybrid": tuple(hybrid)}


def loads() -> list[tuple[int, Load]]:
    """With the number of prompts, or of sequences that decode."""
    cases = [("decode", DECODE_SEQUENCES, 1, DECODE_CONTEXT)]
    cases += [
        ("prefill", prompts, PREFILL_TOKENS // prompts, PREFILL_CONTEXT)
        for prompts in PREFILL_PROMPTS
    ]
    return [
        (sequences, Load(stage, ranks, layout, parts, INTERMEDIATE // ranks))
        for stage, sequences, tokens, context in cases
        for ranks in DEGREES
        for layout, parts in shares(ranks, sequences, tokens, context).items()
    ]


def by_kernel(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention without a mask by torch's own kernels. The queries of a group are rows of their KV
    head, so that it is read once: queries [sequences, heads, group x tokens, dim], keys and values
    [sequences, heads, context and own tokens, dim].
    """
    found: Tensor = functional.scaled_dot_product_attention(queries, keys, values)
    return found


def by_products(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The same by two products, which fill a GPU also where there are few queries."""
    scores: Tensor = queries @ keys.transpose(2, 3) / queries.shape[-1] ** 0.5
    found: Tensor = scores.softmax(-1) @ values
    return found


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
# Scores of many queries would be written to memory and read again.
WAYS: dict[str, tuple[Attend, ...]] = {
    "decode": (by_kernel, by_products),
    "prefill": (by_kernel,),
}


class Layer:
    """The weights and the KV of one rank's layer, random."""

    def __init__(self, load: Load, device: str, kind: torch.dtype) -> None:
        def made(*shape: int) -> Tensor:
            return torch.randn(shape, device=device, dtype=kind).div_(shape[-1] ** 0.5)

        self.load = load
        self.kv = [
            [made(part.sequences, part.heads, part.context + part.tokens, HEAD_DIM) for _ in "kv"]
            for part in load.parts
        ]
        self.qkv = [made(part.heads * (GROUP + 2) * HEAD_DIM, HIDDEN) for part in load.parts]
        self.output = [made(HIDDEN, part.heads * GROUP * HEAD_DIM) for part in load.parts]
        self.gate_up = made(2 * load.mlp_columns, HIDDEN)
        self.down = made(HIDDEN, load.mlp_columns)
        tokens = load.parts[0].sequences * load.parts[0].tokens
        self.hidden = made(tokens, HIDDEN)
        self.queries = [
            made(part.sequences, part.heads, GROUP * part.tokens, HEAD_DIM) for part in load.parts
        ]

    def attention(self, attend: Attend) -> None:
        for queries, (keys, values) in zip(self.queries, self.kv, strict=True):
            attend(queries, keys, values)

    def whole(self, attend: Attend) -> None:
        """With projections and MLP, by the rows that each part has."""
        for part, qkv, output in zip(self.load.parts, self.qkv, self.output, strict=True):
            rows = self.hidden[: part.sequences * part.tokens]
            functional.linear(rows, qkv)
            functional.linear(rows[:, : output.shape[1]].contiguous(), output)
        self.attention(attend)
        gate, up = functional.linear(self.hidden, self.gate_up).chunk(2, -1)
        functional.linear(functional.silu(gate) * up, self.down)


def timed_ms(work: Callable[[], None]) -> float:
    """The median of several calls on the GPU."""
    found: list[float] = []
    for number in range(_WARM + _ROUNDS):
        begin, end = _CUDA.Event(enable_timing=True), _CUDA.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        if number >= _WARM:
            found.append(begin.elapsed_time(end))
    return statistics.median(found)


def measured(prompts: int, load: Load) -> Row:
    layer = Layer(load, "cuda", torch.bfloat16)
    sequences = load.parts[0].sequences
    heads = sum(part.heads * part.sequences / sequences for part in load.parts)
    with torch.inference_mode():
        ways = WAYS[load.stage]
        attention_ms = min(timed_ms(partial(layer.attention, attend)) for attend in ways)
        layer_ms = min(timed_ms(partial(layer.whole, attend)) for attend in ways)
    del layer
    _CUDA.empty_cache()
    return Row(load.stage, prompts, load.ranks, load.layout, heads, attention_ms, layer_ms)


def ratios(rows: list[Row]) -> list[dict[str, Any]]:
    """The fullest rank as heads come over hybrid attention: by heads, attention, whole layer."""
    found = {(row.stage, row.prompts, row.ranks, row.layout): row for row in rows}
    result = []
    for (stage, prompts, ranks, layout), hybrid in found.items():
        if layout == "hybrid":
            other = found[stage, prompts, ranks, "as they come"]
            result.append(
                {
                    "stage": stage,
                    "prompts": prompts,
                    "ranks": ranks,
                    "heads": other.heads / hybrid.heads,
                    "attention": other.attention_ms / hybrid.attention_ms,
                    "layer": other.layer_ms / hybrid.layer_ms,
                    "published": PUBLISHED[stage][ranks],
                }
            )
    return result


def as_text(rows: list[Row], found: list[dict[str, Any]], gpu: str) -> str:
    lines = [
        f"one rank's layer of Llama-3.1-70B on {gpu}, bfloat16; ms, medians of {_ROUNDS}",
        f"{'stage':9}{'prompts':>8}{'ranks':>7}  {'heads':14}{'KV heads':>9}{'attention':>11}"
        f"{'layer':>9}",
    ]
    lines += [
        f"{row.stage:9}{row.prompts:>8}{row.ranks:>7}  {row.layout:14}{row.heads:>9.2f}"
        f"{row.attention_ms:>11.3f}{row.layer_ms:>9.3f}"
        for row in rows
    ]
    lines += ["", "as they come over hybrid; published: throughput, balanced memory included"]
    lines += [
        f"{row['stage']:9}{row['prompts']:>8}{row['ranks']:>7}  heads {row['heads']:.2f}, "
        f"attention {row['attention']:.2f}, layer {row['layer']:.2f}; published "
        f"{row['published']:.2f}"
        for row in found
    ]
    return "\n".join(lines)


def check() -> None:
    """On a CPU: for each degree the ranks' heads and sequences together are all, once; and both
    ways of attention agree with the plain one.
    """
    for ranks in DEGREES:
        sequences = 3 * ranks
        own, spread = divmod(KV_HEADS, ranks)
        parts = shares(ranks, sequences, 1, 1)["hybrid"]
        assert parts[0].heads * ranks + spread == KV_HEADS, "each head is of one rank or spread"
        assert own == parts[0].heads, "a rank's own heads"
        assert parts[1].sequences * ranks == sequences, "each sequence has one base"
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(2, 3, 16, 4, generator=generator) for _ in "kv")
    queries = torch.randn(2, 3, GROUP, 4, generator=generator)
    for attend in (by_kernel, by_products):
        for at in range(GROUP):  # Each query beside the others as alone.
            alone = (keys @ queries[:, :, at, :, None] / 2).softmax(2)
            expected = (alone * values).sum(2)
            found = attend(queries, keys, values)[:, :, at]
            assert torch.allclose(found, expected, atol=1e-5), attend
    small = Load("decode", 7, "hybrid", (Part(1, 7, 1, 9), Part(1, 1, 1, 9)), 16)
    Layer(small, "cpu", torch.float32).whole(by_kernel)
    assert len(loads()) == 2 * len(DEGREES) * (1 + len(PREFILL_PROMPTS))
    print("the check passed: the ranks together compute all heads of all sequences, once")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compute small cases on a CPU")
    parser.add_argument("--out", type=Path, help="directory of the result; prints it anyway")
    options = parser.parse_args()
    if options.check:
        check()
        return 0
    if not torch.cuda.is_available():
        print("nothing is measured: torch finds no GPU here (--check computes small cases)")
        return 0
    rows = [measured(prompts, load) for prompts, load in loads()]
    found = ratios(rows)
    text = as_text(rows, found, torch.cuda.get_device_name())
    figures = {"rows": [asdict(row) for row in rows], "ratios": found}
    print(text, json.dumps(figures), sep="\n")
    if options.out is not None:
        # Only here, since a machine that is lent for minutes may have torch alone.
        from experiments.record import Record

        Record(timed=False).keep(options.out, "attention", figures, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
