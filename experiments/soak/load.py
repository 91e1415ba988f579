"""The mixed load of a soak: chats and completions, streamed and whole, short and long, greedy and
sampled; and the sums of what its clients got.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from itertools import count, product
from typing import Any

from kvrs_testkit.resuming import BARS, Clients, Had, Way, verdict

EACH = 3  # Requests of each kind.
# Prompt and output, from and to. A chat's words take about three tokens each.
TOKENS = {"short": ((8, 60), (8, 40)), "long": ((200, 440), (120, 300))}
WORDS = ("ka", "lo", "mi", "rue", "santo", "be", "quil", "dor")
EVERY_S = 10.0  # Longer than any stream on a machine that is not overloaded.
# Of ten clients six resume a stream by `Last-Event-ID`, and four ask for all of it again.
WAYS = [Way.REPLAY if number % 5 in (1, 3) else Way.CONTINUE for number in range(32)]


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


def until_turn_s(first_s: float, now_s: float) -> float:
    """The time to a client's next turn; turns that passed during its last stream are left out."""
    return max(first_s - now_s, 0.0) or EVERY_S - (now_s - first_s) % EVERY_S


class Load:
    """Clients that begin a stream every `EVERY_S`, until stopped. One whose stream takes longer
    leaves turns out, so that no five minutes have more streams than others. Requests and proxies
    take turns.
    """

    def __init__(self, clients: Clients, requests: int, seed: int) -> None:
        self._clients = clients
        self._rng = random.Random(seed)
        self._order = self._rng.sample(range(requests), requests)
        self._turns = count()
        self._stop = False
        self.found: list[Had] = []

    async def run(self) -> None:
        await asyncio.gather(*(self._client(number, way) for number, way in enumerate(WAYS)))

    def stop(self) -> None:
        self._stop = True

    async def _client(self, number: int, way: Way) -> None:
        first_s = time.monotonic() + EVERY_S * number / len(WAYS)
        while True:
            await asyncio.sleep(until_turn_s(first_s, time.monotonic()))
            if self._stop:
                return
            round_, turn = divmod(next(self._turns), len(self._order))
            key = f"key-{self._rng.getrandbits(128):032x}"
            had = await self._clients.read(self._order[turn], way, key, turn + round_)
            self.found.append(had)


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
