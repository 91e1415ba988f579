"""Generation runs: one attempt at a stream at an engine, and its outputs."""

import asyncio
import collections.abc
import math
import secrets
from dataclasses import dataclass, field

import torch
from tokenizers import Tokenizer
from torch import Tensor

from kvrs.errors import RequestError
from kvrs.protocol.instance import CheckpointTarget, FetchReport
from kvrs.protocol.openai.chunks import NOT_A_NUMBER
from kvrs.protocol.openai.requests import ChatRequest, CompletionRequest
from kvrs.text.output import OutputText, TextDelta
from kvrs_engine.engine.grammars import Grammar
from kvrs_engine.engine.sampler import (
    Penalties,
    SampledLogprobs,
    SamplingParams,
    logprobs_of,
    sample,
)
from kvrs_engine.scheduling.sequences import Sequence
from kvrs_engine.scheduling.sources import PullSource


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokenizer and the token ids of a model."""

    tokenizer: Tokenizer
    vocab_size: int
    eos_token_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class Sampled:
    """The sampled token of one step of one stream."""

    token_id: int
    logprobs: SampledLogprobs | None = None  # None: not asked for.


@dataclass(frozen=True, slots=True)
class OutputToken:
    """An output token with log probabilities."""

    token_id: int
    logprobs: SampledLogprobs
    text_offset: int  # Number of characters of the stream's output before the token.


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The output of one step of a stream. The last one has a `finish_reason`."""

    token_ids: list[int]
    delta: TextDelta
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    tokens: tuple[OutputToken, ...] = ()  # One per token id, if log probabilities are wanted.


@dataclass(slots=True, eq=False)
class GenerationRun:
    """One attempt at one stream at this engine."""

    sequence: Sequence
    params: SamplingParams
    penalties: Penalties | None
    logprobs: int | None  # Number of likeliest tokens to report; None: no log probabilities.
    text: OutputText
    max_tokens: int
    min_tokens: int
    end_token_ids: frozenset[int]  # Tokens that end the stream; not sampled before `min_tokens`.
    stop_token_ids: frozenset[int]  # The end tokens that the client named.
    sources: tuple[PullSource, ...]  # Peers of the fetch, in the order of their pages.
    checkpoints: tuple[CheckpointTarget, ...] = ()  # Destinations of newly filled pages.
    slot_token: int = 0  # The transfer slot of the fetch; 0: not granted by an agent.
    drafts: tuple[int, ...] = ()  # Drafts after the history, from the request.
    reported_pages: int = 0  # Full pages at the last report to the checkpointer.
    fetched_pages: int = 0  # Including a partial last page.
    ending: StepOutput | None = None  # The only output, if the history is complete already.
    outputs: asyncio.Queue[StepOutput | None] = field(
        default_factory=asyncio.Queue
    )  # None: aborted, or failed.
    grammar: Grammar | None = None  # Grammar of the output; None: any text.
    failure: str | None = None  # The reason of a failure in the engine.
    failure_code: str = "engine_failed"  # The code that proxies pass on to clients.

    @property
    def produced_tokens(self) -> int:
        """Number of output tokens of the whole stream, earlier attempts included."""
        return len(self.sequence.token_ids) - self.sequence.prompt_tokens

    @property
    def holds_slot(self) -> bool:
        """True until the first new token, as for the proxy, if the run has a transfer slot."""
        return self.slot_token > 0 and len(self.sequence.token_ids) == self.sequence.history_tokens

    def drafts_ahead(self, most: int) -> tuple[int, ...]:
        """Return at most `most` of the request's drafts that follow the present tokens."""
        at = len(self.sequence.token_ids) - self.sequence.history_tokens
        return self.drafts[at : at + most]

    def fetch_report(self, page_size_tokens: int) -> FetchReport:
        """Return the report of the finished fetch. The last position is always computed."""
        sequence = self.sequence
        others = sequence.history_tokens - (sequence.cached_tokens or 0)
        loaded = min(self.fetched_pages * page_size_tokens, others - 1)
        owner_epoch, attempt = sequence.attempt
        return FetchReport(sequence.stream, attempt, owner_epoch, loaded, others - loaded)

    def step(self, logits: Tensor, drafts: collections.abc.Sequence[int] = ()) -> list[StepOutput]:
        """Sample one step; return an output per token. The caller appends the tokens to the
        sequence.

        `logits` are `[1 + drafts, vocab]`, after the sequence and after each draft. A row counts if
        all drafts before it were chosen.
        """
        outputs: list[StepOutput] = []
        chosen: list[int] = []
        for row, draft in zip(logits, (*drafts, None), strict=True):
            sampled = self._choose(row, chosen)
            chosen.append(sampled.token_id)
            outputs.append(self.take(sampled, self.produced_tokens + len(chosen)))
            if (
                sampled.token_id != draft
                or outputs[-1].finish_reason is not None
                or self.failure is not None
            ):
                break
        return outputs

    def _choose(self, logits: Tensor, chosen: list[int]) -> Sampled:
        """Sample the token after the sequence and `chosen` from the logits `[vocab]`."""
        row, position = logits, len(self.sequence.token_ids) + len(chosen)
        if self.penalties is not None:
            row = self.penalties.apply(row)
        if position - self.sequence.prompt_tokens < self.min_tokens and self.end_token_ids:
            row = _without(self.end_token_ids, row)
        if self.grammar is not None:
            row = self.grammar.apply(row, logits)
        token_id = sample(row, self.params, position)
        if math.isnan(row[token_id]):
            self.failure = f"logits at position {position}: got nan; allowed: numbers"
            self.failure_code = NOT_A_NUMBER
        return Sampled(
            token_id,
            None if self.logprobs is None else logprobs_of(logits, token_id, self.logprobs),
        )

    def take(self, sampled: Sampled, produced_tokens: int) -> StepOutput:
        """Convert a token to output; `produced_tokens` is the stream's count including it."""
        token_id = sampled.token_id
        if self.penalties is not None:
            self.penalties.count(token_id)
        tokens = (
            ()
            if sampled.logprobs is None
            else (OutputToken(token_id, sampled.logprobs, self.text.characters),)
        )
        if token_id in self.end_token_ids:
            # A failed grammar allows the end only.
            if self.grammar is not None and self.grammar.failure:
                self.failure = f"response_format: {self.grammar.failure}"
            delta = self.text.finish()
            return StepOutput([token_id], delta, "stop", self._named(token_id), tokens)
        if self.grammar is not None and not self.grammar.take(token_id):
            self.failure = f"response_format: {self.grammar.failure}"
        delta = self.text.feed(token_id)
        if delta.stopped is not None:
            return StepOutput([token_id], delta, "stop", delta.stopped, tokens)
        if produced_tokens >= self.max_tokens:
            return StepOutput([token_id], delta.then(self.text.finish()), "length", None, tokens)
        return StepOutput([token_id], delta, tokens=tokens)

    def replay(self, history: list[int]) -> StepOutput | None:
        """Replay an output history into the text machine, to restore held-back bytes and partial
        stop strings; return the end of the stream if the history is complete.

        Raises:
            RequestError: the history goes on after an end, or does not fit the request.
        """
        for index, token_id in enumerate(history, 1):
            if index == len(history) and token_id in self.end_token_ids:
                delta = self.text.finish()
                return StepOutput([], delta, "stop", self._named(token_id))
            if self.grammar is not None and not self.grammar.take(token_id):
                raise RequestError(
                    f"the output so far is not in the response_format: {self.grammar.failure}",
                    param="response_format",
                )
            stopped = self.text.feed(token_id).stopped
            if stopped is not None and index < len(history):
                raise RequestError(
                    f"the output so far goes on after the stop string {stopped!r}", param="stop"
                )
            if stopped is not None:
                return StepOutput([], TextDelta(""), "stop", stopped)
        if len(history) >= self.max_tokens:
            return StepOutput([], self.text.finish(), "length")
        return None

    def _named(self, token_id: int) -> int | None:
        return token_id if token_id in self.stop_token_ids else None


def make_run(
    request: CompletionRequest | ChatRequest,
    max_tokens: int,
    sequence: Sequence,
    sources: tuple[PullSource, ...],
    model: Vocabulary,
    grammar: Grammar | None = None,
) -> GenerationRun:
    """Create a run that continues exactly where the history of `sequence` ends.

    Raises:
        RequestError: the history cannot be the beginning of an answer.
    """
    stop_token_ids = frozenset(request.stop_token_ids)
    # The end of the grammar is the end of the stream.
    ends_by_stop_only = request.ignore_eos and grammar is None
    run = GenerationRun(
        sequence=sequence,
        params=SamplingParams(
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            min_p=request.min_p,
            # Requests without a seed get a random one.
            seed=secrets.randbits(62) if request.seed is None else request.seed,
        ),
        penalties=_penalties(request, sequence, model.vocab_size),
        logprobs=request.wanted_logprobs,
        grammar=grammar,
        text=OutputText(model.tokenizer, request.stop_strings),
        max_tokens=max_tokens,
        min_tokens=request.min_tokens,
        end_token_ids=stop_token_ids if ends_by_stop_only else stop_token_ids | model.eos_token_ids,
        stop_token_ids=stop_token_ids,
        sources=sources,
        checkpoints=() if request.kvrs is None else tuple(request.kvrs.checkpoints),
        slot_token=0 if request.kvrs is None else request.kvrs.slot_token,
        drafts=_drafts(request, model.vocab_size),
    )
    if not sequence.prefill_only:
        run.ending = run.replay([*sequence.token_ids[sequence.prompt_tokens :]])
    return run


def _without(token_ids: collections.abc.Iterable[int], row: Tensor) -> Tensor:
    """Return the logits `[vocab]` with these tokens masked, or unchanged if none would be left."""
    rest = row.clone()
    rest[list(token_ids)] = -torch.inf
    return rest if bool(torch.isfinite(rest).any()) else row


def _drafts(request: CompletionRequest | ChatRequest, vocab_size: int) -> tuple[int, ...]:
    drafts = () if request.kvrs is None else tuple(request.kvrs.drafts)
    if (highest := max(drafts, default=0)) >= vocab_size:
        raise RequestError(
            f"kvrs.drafts: got the token id {highest}; allowed: ids below {vocab_size}",
            param="kvrs.drafts",
        )
    return drafts


def _penalties(
    request: CompletionRequest | ChatRequest, sequence: Sequence, vocab_size: int
) -> Penalties | None:
    if not request.has_penalties or sequence.prefill_only:
        return None
    return Penalties(
        vocab_size,
        sequence.token_ids[: sequence.prompt_tokens],
        sequence.token_ids[sequence.prompt_tokens :],
        presence=request.presence_penalty,
        frequency=request.frequency_penalty,
        repetition=request.repetition_penalty,
    )
