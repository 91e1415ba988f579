"""A proxy's last 15 minutes in steps of 5 s, for the curves of the live page. Pure."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

INTERVAL_S = 5.0
_KEPT = 180


class Counts(NamedTuple):
    """A proxy's counters at one time."""

    tokens: int  # Output tokens written to clients.
    ttfts: int  # Streams that have ended after a first token,
    ttft_sum_s: float  # and the sum of their times to the first token.
    prompt_tokens: int  # Prompt tokens at instances that report what their prefix cache had,
    cached_tokens: int  # and those of them that were cached.


class Sample(NamedTuple):
    """None: there is no value, because no stream ended, ran or was placed."""

    at_s: float  # Unix time of the sample's end.
    tokens_per_s: float
    # Mean of the open streams that got their first token, else of the streams that ended.
    ttft_s: float | None
    streams: int
    pause_s: float | None  # Longest pause of a stream.
    hit_share: float | None  # Share of new prompts' tokens that instances had cached.


class History:
    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=_KEPT)
        self._last: tuple[float, Counts] | None = None

    def sample(
        self,
        counts: Counts,
        streams: int,
        pause_s: float | None,
        now_s: float,
        wall_s: float,
        *,
        ttfts_s: Sequence[float] = (),
    ) -> None:
        """Add what has happened since the last call; the first call only sets the beginning.
        `ttfts_s`: of the open streams that got their first token.
        """
        last, self._last = self._last, (now_s, counts)
        if last is None or now_s <= last[0]:
            return
        seconds, before = now_s - last[0], last[1]
        ttfts, ttft_sum_s = len(ttfts_s), sum(ttfts_s)
        if not ttfts:
            ttfts = counts.ttfts - before.ttfts
            ttft_sum_s = counts.ttft_sum_s - before.ttft_sum_s
        prompt = counts.prompt_tokens - before.prompt_tokens
        cached = counts.cached_tokens - before.cached_tokens
        self._samples.append(
            Sample(
                round(wall_s),
                round((counts.tokens - before.tokens) / seconds, 1),
                round(ttft_sum_s / ttfts, 4) if ttfts else None,
                streams,
                None if pause_s is None else round(pause_s, 3),
                # Counts of an instance that has restarted begin at 0 again.
                round(cached / prompt, 3) if prompt > 0 and 0 <= cached <= prompt else None,
            )
        )

    def columns(self) -> dict[str, list[float | None]]:
        """Return the samples by name of their values, oldest first."""
        found = zip(*self._samples, strict=True) if self._samples else [()] * len(Sample._fields)
        return {name: [*values] for name, values in zip(Sample._fields, found, strict=True)}
