"""What one stream asks of an engine, and what it gets back."""

import asyncio
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from kvrs.engine.sampler import SamplingParams
from kvrs.engine.text import OutputText
from kvrs.ids import InstanceId
from kvrs.protocol.openai import CompletionRequest
from kvrs.scheduling.sequences import Sequence


@dataclass(frozen=True, slots=True)
class Source:
    """Who is believed to hold the leading pages of the history."""

    instance: InstanceId
    epoch: int | None  # Pages of another epoch are not asked for; None: whichever is running.
    handoff: str | None  # Names the retained run whose partial last page may be pulled too.


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step adds to a stream. `finish_reason` is set on the last one."""

    token_ids: list[int]
    text: str
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True, eq=False)
class Run:
    """One attempt at one stream, while this engine works on it."""

    sequence: Sequence
    params: SamplingParams
    text: OutputText
    max_tokens: int
    min_tokens: int
    end_token_ids: frozenset[int]  # Tokens that end the stream; not sampled before `min_tokens`.
    stop_token_ids: frozenset[int]  # Those among them that the client named.
    source: Source | None
    outputs: asyncio.Queue[StepOutput | None] = field(default_factory=asyncio.Queue)  # None: aborted.

    @property
    def produced_tokens(self) -> int:
        """Output tokens of the whole stream, those of earlier attempts included."""
        return len(self.sequence.token_ids) - self.sequence.prompt_tokens

    def take(self, token_id: int) -> StepOutput:
        """Turn the token that was just appended to the sequence into output."""
        if token_id in self.end_token_ids:
            named = token_id if token_id in self.stop_token_ids else None
            return StepOutput([token_id], self.text.finish(), "stop", named)
        delta = self.text.feed(token_id)
        if delta.stopped is not None:
            return StepOutput([token_id], delta.text, "stop", delta.stopped)
        if self.produced_tokens >= self.max_tokens:
            return StepOutput([token_id], delta.text + self.text.finish(), "length")
        return StepOutput([token_id], delta.text)


def make_run(
    request: CompletionRequest, sequence: Sequence, source: Source | None, tokenizer: Tokenizer, eos_token_ids: frozenset[int]
) -> Run:
    """A run that continues exactly where the history of `sequence` ends.

    The output part of the history is fed through the text machine again, so that held-back bytes and half-seen stop
    strings are as they were when the history was written.
    """
    text = OutputText(tokenizer, request.stop_strings)
    for token_id in sequence.token_ids[sequence.prompt_tokens :]:
        text.feed(token_id)
    stop_token_ids = frozenset(request.stop_token_ids)
    return Run(
        sequence=sequence,
        params=SamplingParams(temperature=request.temperature, top_p=request.top_p, top_k=request.top_k, seed=request.seed or 0),
        text=text,
        max_tokens=request.max_tokens,
        min_tokens=request.min_tokens,
        end_token_ids=stop_token_ids if request.ignore_eos else stop_token_ids | eos_token_ids,
        stop_token_ids=stop_token_ids,
        source=source,
    )
