"""The part of Mooncake's conversation trace that both clients replay: a sampled window, in the size
of the tiny model.
"""

from pathlib import Path

from kvrs.traces.formats import load_trace
from kvrs.traces.mooncake import Trace, at_rate, jitter, sample, scale, window

# Beside the repository, outside of it.
DEFAULT_TRACE = (
    Path(__file__).parents[2].parent / "shared" / "data" / "traces" / "conversation_trace.jsonl"
)
MAX_INPUT_TOKENS = 480
MAX_OUTPUT_TOKENS = 240
WINDOW_REQUESTS = 3000
BATCH_S = 3.0  # Mooncake's arrivals were logged in batches of so many seconds.


def sampled(path: Path, requests: int, requests_per_s: float, seed: int) -> Trace:
    """`requests` of the first 3,000, at their own distances stretched to a rate, with lengths
    scaled and prefixes kept.
    """
    trace = jitter(sample(window(load_trace(path), WINDOW_REQUESTS), requests, seed), BATCH_S, seed)
    # The few longest prompts are cut; otherwise all others would shrink to a handful of tokens.
    longest = sorted(request.input_tokens for request in trace.requests)[int(0.9 * (requests - 1))]
    return at_rate(
        scale(trace, MAX_INPUT_TOKENS, MAX_OUTPUT_TOKENS, longest_input_tokens=longest),
        requests_per_s,
    )


def is_there(path: Path) -> bool:
    """Without it nothing is run, which is said."""
    if not path.is_file():
        print(
            f"skipped: no trace at {path}; it is Mooncake's FAST'25 conversation_trace.jsonl "
            f"(--trace FILE)"
        )
    return path.is_file()
