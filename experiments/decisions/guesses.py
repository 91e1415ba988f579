"""Guessed prefill tables beside the tables of 31 profiles of vLLM.

    python -m experiments.decisions.guesses

A guess over the table's time, for 200 to 8,000 tokens, by what is known of the GPUs; "learned" is
one factor from prefills of 1,000 and 2,000 tokens, as a proxy learns one. 24 of the tables are
estimates, seven are fits of measurements.
"""

from collections.abc import Sequence
from functools import cache
from itertools import chain
from math import exp, log
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from experiments.command_line import parser_of
from experiments.record import Record
from kvrs.profiles import catalog
from kvrs.profiles.guess import guessed_table, size_of
from kvrs.profiles.tables import PrefillTable

LENGTHS = (200, 500, 1000, 2000, 4000, 8000)
UNKNOWN, NO_MODEL, NAME = "nothing", "not even the model", "their name"
_NUMBER, _LEARNED, _NAME_LEARNED = "name and number", "learned", "name, and learned"
_LEARNS_FROM = (1000, 2000)  # Tokens.


def _config(*shape: int, **more: Any) -> dict[str, Any]:
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    return dict(zip((*names, "intermediate_size", "vocab_size"), shape, strict=True)) | more


def _opt(width: int, layers: int, heads: int) -> dict[str, Any]:
    shape = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    return shape | {"ffn_dim": 4 * width, "vocab_size": 50_272, "tie_word_embeddings": True}


# Fields of `config.json` by the beginning of a profile's name.
_CONFIGS = {
    "opt-13b": _opt(5120, 40, 40),
    "opt-66b": _opt(9216, 64, 72),
    "llama-3.1-8b": _config(4096, 32, 32, 8, 14_336, 128_256),
    "llama-3.1-70b": _config(8192, 80, 64, 8, 28_672, 128_256),
    "qwen3-14b": _config(5120, 40, 40, 8, 17_408, 151_936, head_dim=128),
    "qwen3-32b": _config(5120, 64, 64, 8, 25_600, 151_936, head_dim=128),
    "mixtral-8x22b": _config(
        6144, 56, 48, 8, 16_384, 32_768, num_local_experts=8, num_experts_per_tok=2
    ),
}


@cache
def profiles() -> tuple[str, ...]:
    return tuple(sorted(name for name in catalog.names() if "-vllm-" in name))


def _tables(name: str) -> dict[str, PrefillTable]:
    """Return the guesses for a profile, by what is known."""
    profile = catalog.profile(name)
    size = size_of(next(of for model, of in _CONFIGS.items() if name.startswith(model)))
    gpu = profile.gpu or ""  # As people name it: `H100-80G SXM`.
    known = {
        UNKNOWN: guessed_table(size),
        NO_MODEL: guessed_table(None),
        NAME: guessed_table(size, gpu),
        _NUMBER: guessed_table(size, gpu, profile.tp or 0),
    }
    table = catalog.prefill_table(name)
    for learned, of in ((_LEARNED, UNKNOWN), (_NAME_LEARNED, NAME)):
        ratios = [table.seconds_for(n) / known[of].seconds_for(n) for n in _LEARNS_FROM]
        known[learned] = known[of].scaled(median(ratios))
    return known


@cache
def ratios() -> dict[str, dict[str, list[float]]]:
    """Return guess over table, by what is known, by profile, for each of `LENGTHS`."""
    found: dict[str, dict[str, list[float]]] = {}
    for name in profiles():
        table = catalog.prefill_table(name)
        for known, guess in _tables(name).items():
            found.setdefault(known, {})[name] = [
                guess.seconds_for(tokens) / table.seconds_for(tokens) for tokens in LENGTHS
            ]
    return found


def factors_off(known: str) -> list[float]:
    """Return by which factors the guess is off, above 1 also where it is too short."""
    return [exp(abs(log(each))) for row in ratios()[known].values() for each in row]


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]


def main() -> int:
    options = parser_of(__doc__, __file__).parse_args()
    record, console = Record(timed=False), Console(record=True, width=120)
    estimated = sum(catalog.profile(name).kind == "estimated" for name in profiles())
    title = (
        f"Guess over table: {len(profiles())} profiles, of which {estimated} are estimates, "
        f"{LENGTHS[0]} to {LENGTHS[-1]:,} tokens"
    )
    columns = ("known of the GPUs", "off, median", "p95", "worst", "of", "median ratio")
    table = Table(*columns, *(f"{tokens:,}" for tokens in LENGTHS), title=title)
    for known, rows in ratios().items():
        off = factors_off(known)
        worst = max(rows, key=lambda name: max(abs(log(each)) for each in rows[name]))
        by_length = zip(*rows.values(), strict=True)
        table.add_row(
            known,
            *(f"x{each:.2f}" for each in (median(off), _quantile(off, 0.95), max(off))),
            worst,
            *(f"{median(found):.2f}" for found in (chain(*rows.values()), *by_length)),
        )
    console.print(table)
    record.keep(options.out, "guesses", {"ratios": ratios()}, console.export_text())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
