"""Pairs of tiny models, a target and a draft with a known acceptance rate.

The target is the draft with additional layers, two by default, whose contribution is scaled by a
factor: 0 makes both models equal, and a larger factor lowers the acceptance. The factor is found by
bisection.
"""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from kvrs.config.cluster import EngineSettings
from kvrs.errors import ConfigError
from kvrs_engine.engine.random_model import LAYERS, random_tokenizer, random_weights, write_model
from kvrs_engine.engine.worker import Worker
from kvrs_engine.scheduling.sequences import Chunk

DRAFT_LAYERS = LAYERS // 2
LEAST, MOST = 0.3, 0.95  # Range of acceptance rates that a factor can reach.
WITHIN = 0.005

_PROMPTS, _PROMPT_TOKENS, _OUTPUT_TOKENS = 16, 12, 96
_TRIES = 12
_SETTINGS = EngineSettings(pages=_PROMPTS * 8)


def write_pair(directory: Path, acceptance: float, seed: int, layers: int = LAYERS) -> float:
    """Write `target`, with `layers` layers, and `draft` below the directory; return the acceptance
    rate by `agreement`.

    Raises:
        ConfigError: the acceptance rate cannot be reached.
    """
    if not LEAST <= acceptance <= MOST:
        raise ConfigError(f"--acceptance: got {acceptance}; allowed: from {LEAST} to {MOST}")
    tokenizer = random_tokenizer(seed)
    weights = random_weights(seed, tokenizer, layers)
    with TemporaryDirectory() as scratch:
        small = Path(scratch) / "draft"
        write_model(small, tokenizer, _without_layers(weights))
        draft = Worker(small, _SETTINGS)
        low, high, best = 0.0, 1.0, (1.0, 0.0)
        for number in range(_TRIES):
            factor = (low + high) / 2
            large = Path(scratch) / f"target-{number}"
            write_model(large, tokenizer, _scaled(weights, factor))
            found = agreement(Worker(large, _SETTINGS), draft, seed)
            best = min(best, (abs(found - acceptance), factor))
            if best[0] < WITHIN:
                break
            low, high = (factor, high) if found > acceptance else (low, factor)
    factor = best[1]
    write_model(directory / "draft", tokenizer, _without_layers(weights))
    write_model(directory / "target", tokenizer, _scaled(weights, factor))
    return agreement(
        Worker(directory / "target", _SETTINGS), Worker(directory / "draft", _SETTINGS), seed
    )


def agreement(target: Worker, draft: Worker, seed: int) -> float:
    """Return the share of the target's greedy tokens after random prompts that the draft also
    chooses.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = _PROMPTS, _PROMPT_TOKENS
    prompts = torch.randint(2, target.vocab_size, shape, generator=generator)
    histories: list[list[int]] = prompts.tolist()
    computed = 0
    for _ in range(_OUTPUT_TOKENS):
        logits = target.execute(_chunks(histories, computed, 1))
        computed = len(histories[0])
        for history, row in zip(histories, logits, strict=True):
            history.append(int(row.argmax()))
    chosen = torch.tensor([history[_PROMPT_TOKENS:] for history in histories])
    known = [history[:-1] for history in histories]
    logits = draft.execute(_chunks(known, 0, _OUTPUT_TOKENS))
    return float((logits.argmax(-1).view(chosen.shape) == chosen).float().mean())


def _chunks(histories: Sequence[Sequence[int]], first: int, logits: int) -> list[Chunk]:
    per_history = _SETTINGS.pages // _PROMPTS
    return [
        Chunk(history[first:], first, range(at * per_history, (at + 1) * per_history), logits)
        for at, history in enumerate(histories)
    ]


def _without_layers(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    own = tuple(f"model.layers.{layer}." for layer in range(DRAFT_LAYERS))
    return {
        name: each
        for name, each in weights.items()
        if name.startswith(own) or not name.startswith("model.layers.")
    }


def _scaled(weights: dict[str, Tensor], factor: float) -> dict[str, Tensor]:
    first = tuple(f"model.layers.{layer}." for layer in range(DRAFT_LAYERS))
    added = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
    return {
        name: each * factor if name.endswith(added) and not name.startswith(first) else each
        for name, each in weights.items()
    }
