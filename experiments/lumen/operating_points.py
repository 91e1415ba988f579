"""The operating points of LUMEN's simulator (B.1 to B.7) and of its two prototypes (A.1 to A.4).

Values that the paper does not have are fitted by `fit.py` to its figures of runs without a failure.
"""

from dataclasses import replace
from pathlib import Path

from experiments.lumen.clocks import slowed
from experiments.lumen.simulated import (
    DRAFT,
    FIXED,
    LLAMA,
    PROGRESSIVE,
    SCHEDULING,
    STOP,
    TARGET,
    WHOLE,
    Setup,
)
from kvrs.profiles import catalog
from kvrs_engine.scheduling.pace import Pace
from kvrs_lab.sim.recovering import SimDraftModel
from kvrs_lab.traces.presets import PRESETS

SCHEMES = (STOP, FIXED, SCHEDULING, PROGRESSIVE, WHOLE)
PER_S, SPAN_S = 1.4, 420.0  # Requests/s of a worker; the failure comes after a third.
FOUR_SPAN_S = 900.0  # Four prototypes have a queue for minutes after the load.
SATA_BYTES_PER_S, ETHERNET_BYTES_PER_S = 0.5e9, 10e9 / 8
QWEN_32B, QWEN_14B = "qwen3-32b-a100-vllm-tp2", "qwen3-14b-a100-vllm-tp1"
PUBLISHED_PROMPT_TOKENS = 161.31  # Mean of ShareGPT's first messages (the preset).
# Bytes of the weights of Qwen3-4B and Qwen3-1.7B, and their parameters per token as a share of
# those of Qwen3-14B, in whose times they compute: no profile has them.
DRAFT_OF_32B = 8_045_000_000, 0.272
DRAFT_OF_14B = 3_441_000_000, 0.107
ACCEPTANCE = 0.6  # The paper has it for the pair of Llamas alone.


def simulator(prefill: float, step_s: float, directory: Path) -> Setup:
    """Llama-3-70B on four A100, whose prefill takes so many times as long as in the profile and
    whose steps a fixed time more. The draft has its profile's times.
    """
    return replace(
        LLAMA,
        pace=slowed(TARGET, directory, prefill=prefill, step_s=step_s),
        per_s=PER_S,
        requests=0,
        span_s=SPAN_S,
        wait_s=3600.0,
        pages=30_000,  # 157 GB of the four GPUs.
        max_running=512,
        max_batch_tokens=1024,
        schemes=SCHEMES,
        draft=SimDraftModel(Pace(DRAFT), LLAMA.draft.load_s, 0.6) if LLAMA.draft else None,
    )


def prototype(size: int, prompt_tokens: float, step_s: float, directory: Path) -> Setup:
    """Four workers with Qwen3-32B on two GPUs, or eight with Qwen3-14B on one, with prompts of such
    a mean and of ShareGPT's spread.
    """
    label, per_s, pages, (draft_bytes, share) = {
        4: (QWEN_32B, 3.0, 19_000, DRAFT_OF_32B),
        8: (QWEN_14B, 1.25, 16_000, DRAFT_OF_14B),
    }[size]
    draft = slowed(QWEN_14B, directory, prefill=share, decode=share, weight_bytes=draft_bytes)
    weight_bytes = catalog.load(label).weight_bytes
    return replace(
        LLAMA,
        pace=slowed(label, directory, step_s=step_s),
        preset=sharegpt(prompt_tokens),
        most_prompt=8192,
        most_output=2048,
        per_s=per_s,
        requests=0,
        span_s=FOUR_SPAN_S if size == 4 else SPAN_S,
        reload_s=weight_bytes / SATA_BYTES_PER_S + catalog.load_s(label),
        wait_s=3600.0,
        pages=pages,
        max_running=512,
        max_batch_tokens=1024,
        link_bytes_per_s=ETHERNET_BYTES_PER_S,
        schemes=SCHEMES,
        draft=SimDraftModel(Pace(draft), draft_bytes / SATA_BYTES_PER_S, ACCEPTANCE),
    )


def sharegpt(prompt_tokens: float) -> str:
    """Add a preset with longer prompts, as of whole conversations, and return its name."""
    name, known = f"sharegpt of {prompt_tokens:.0f}", PRESETS["sharegpt"]
    scale = prompt_tokens / PUBLISHED_PROMPT_TOKENS
    PRESETS[name] = replace(
        known,
        first_message_tokens_p50=known.first_message_tokens_p50 * scale,
        max_input_tokens=16_384,
    )
    return name
