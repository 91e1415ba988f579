"""The mixed load of a soak: chats and completions, streamed and whole, short and long, greedy and
sampled; and the sums of what its clients got.
"""

import random
from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import Any

from kvrs_testkit.resuming import BARS, Had, Way, verdict

EACH = 3  # Requests of each kind.
# Prompt and output, from and to. A chat's words take about three tokens each.
TOKENS = {"short": ((8, 60), (8, 40)), "long": ((200, 440), (120, 300))}
WORDS = ("ka", "lo", "mi", "rue", "santo", "be", "quil", "dor")
# Of ten clients six resume a stream by `Last-Event-ID`, and four ask for all of it again.
WAYS = [Way.REPLAY if number % 5 in (1, 3) else Way.CONTINUE for number in range(16)]


def requests(seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    kinds = product(("completion", "chat"), (True, False), (0.0, 0.8), TOKENS)
    return [_body(rng, *kind) for kind in kinds for _ in range(EACH)]


def _body(
    rng: random.Random, api: str, streams: bool, temperature: float, length: str
) -> dict[str, Any]:
    prompt, output = (rng.randrange(*span) for span in TOKENS[length])
    words = " ".join(rng.choices(WORDS, k=max(1, prompt // 3)))
    asked: dict[str, Any] = (
        {"messages": [{"role": "user", "content": words}]}
        if api == "chat"
        else {"prompt": [rng.randrange(4, 512) for _ in range(prompt)]}
    )
    return asked | {
        "max_tokens": output,
        "temperature": temperature,
        "seed": rng.randrange(1 << 30),
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": streams,
        **({"stream_options": {"include_usage": True}} if streams else {}),
    }


class Sums:
    """The verdicts on all answers so far, which themselves are not kept."""

    def __init__(self, quiet: Sequence[Had]) -> None:
        self._quiet = quiet
        self.counts: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()

    def add(self, found: Sequence[Had]) -> list[dict[str, Any]]:
        """Count answers; return the figures of each that is not exact."""
        wrong = []
        for had in found:
            own = verdict([had], self._quiet)
            self.counts.update({key: own[key] for key in (*BARS, "streams", "tokens", "breaks")})
            self.counts["broke"] += had.breaks > 0
            self.failures.update(own["failures"])
            self.refusals.update(had.refusals)
            if any(own[bar] for bar in BARS):
                wrong.append({"request": had.request, "way": had.way.value} | own)
        return wrong

    @property
    def is_exact(self) -> bool:
        return not any(self.counts[bar] for bar in BARS)
