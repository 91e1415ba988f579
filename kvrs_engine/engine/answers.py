"""The translation of a run's output to the formats of OpenAI's two endpoints."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import msgspec

from kvrs.protocol.instance import KvTransferParams
from kvrs.protocol.openai.chunks import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    Choice,
    Completion,
    Logprobs,
    TokenLogprob,
    TopLogprob,
    Usage,
    usage_of,
)
from kvrs.protocol.openai.requests import ChatRequest, CompletionRequest
from kvrs.text.output import TextDelta, TokenPieces
from kvrs_engine.engine.requests import GenerationRun, OutputToken, StepOutput
from kvrs_engine.engine.sampler import SampledLogprobs


class Answer(ABC):
    """The answer of one run, as a sequence of events or as a whole."""

    prefix: str  # Prefix of the answer's id.

    def __init__(
        self,
        asked: CompletionRequest | ChatRequest,
        run: GenerationRun,
        model: str,
        created: int,
        pieces: TokenPieces,
        *,
        names_prompt: bool = False,
    ) -> None:
        """`names_prompt`: the first event includes the prompt's token ids."""
        self._asked = asked
        self._run = run
        self._pieces = pieces
        self._names_prompt = names_prompt
        self._head = (f"{self.prefix}-{run.sequence.stream}", created, model)
        # Number of output tokens up to the current event.
        self._produced = run.sequence.history_tokens - run.sequence.prompt_tokens

    @abstractmethod
    def opening(self) -> msgspec.Struct | None:
        """Return the event before the first output of a stream, if the format has one."""

    @abstractmethod
    def event(self, step: StepOutput) -> msgspec.Struct: ...

    @abstractmethod
    def usage_event(self) -> msgspec.Struct: ...

    @abstractmethod
    def whole(
        self, steps: Sequence[StepOutput], hand_off: KvTransferParams | None
    ) -> msgspec.Struct: ...

    def _usage_after(self, token_ids: Sequence[int]) -> Usage | msgspec.UnsetType:
        """Return the usage up to an event with these tokens; later tokens may exist already."""
        self._produced += len(token_ids)
        if not self._asked.wants_each_usage:
            return msgspec.UNSET
        return usage_of(self._run.sequence.prompt_tokens, self._produced, None)

    def _ids_of(self, step: StepOutput) -> list[int] | msgspec.UnsetType:
        return step.token_ids if self._asked.return_token_ids else msgspec.UNSET


class CompletionAnswer(Answer):
    prefix = "cmpl"

    def opening(self) -> None:
        return None

    def event(self, step: StepOutput) -> Completion:
        choice = self._choice(step)
        if self._names_prompt:
            choice.prompt_token_ids, self._names_prompt = prompt_ids_of(self._run), False
        return Completion(*self._head, [choice], usage=self._usage_after(step.token_ids))

    def usage_event(self) -> Completion:
        return Completion(*self._head, [], usage=_usage(self._run))

    def whole(self, steps: Sequence[StepOutput], hand_off: KvTransferParams | None) -> Completion:
        choice = self._choice(joined(steps))
        if self._asked.return_token_ids:
            choice.prompt_token_ids = prompt_ids_of(self._run)
        answer = Completion(*self._head, [choice], usage=_usage(self._run))
        if hand_off is not None:
            answer.kv_transfer_params = hand_off
        return answer

    def _choice(self, step: StepOutput) -> Choice:
        return Choice(
            text=step.delta.text,
            logprobs=self._logprobs(step.tokens) if step.tokens else None,
            finish_reason=step.finish_reason,
            stop_reason=step.stop_reason,
            token_ids=self._ids_of(step),
        )

    def _logprobs(self, tokens: Sequence[OutputToken]) -> Logprobs:
        return Logprobs(
            tokens=[self._pieces.text(token.token_id) for token in tokens],
            token_logprobs=[token.logprobs.logprob for token in tokens],
            top_logprobs=[self._top(token.token_id, token.logprobs) for token in tokens],
            text_offset=[token.text_offset for token in tokens],
        )

    def _top(self, token_id: int, logprobs: SampledLogprobs) -> dict[str, float]:
        """Return the log probabilities of the likeliest tokens and of the sampled token. Of tokens
        with equal text the likelier counts.
        """
        top: dict[str, float] = {}
        for other, logprob in (*logprobs.top, (token_id, logprobs.logprob)):
            top.setdefault(self._pieces.text(other), logprob)
        return top


class ChatAnswer(Answer):
    prefix = "chatcmpl"

    def opening(self) -> ChatChunk | None:
        sequence = self._run.sequence
        # The message of a continued stream was opened by an earlier attempt.
        if sequence.history_tokens > sequence.prompt_tokens:
            return None
        opened = ChatChunkChoice(delta=ChatDelta(role="assistant", content=""))
        chunk = ChatChunk(*self._head, [opened], usage=self._usage_after([]))
        if self._names_prompt:
            chunk.prompt_token_ids = prompt_ids_of(self._run)
        return chunk

    def event(self, step: StepOutput) -> ChatChunk:
        choice = ChatChunkChoice(
            delta=ChatDelta(content=step.delta.text),
            logprobs=self._logprobs(step.tokens) if step.tokens else None,
            finish_reason=step.finish_reason,
            stop_reason=step.stop_reason,
            token_ids=self._ids_of(step),
        )
        return ChatChunk(*self._head, [choice], usage=self._usage_after(step.token_ids))

    def usage_event(self) -> ChatChunk:
        return ChatChunk(*self._head, [], usage=_usage(self._run))

    def whole(
        self, steps: Sequence[StepOutput], hand_off: KvTransferParams | None
    ) -> ChatCompletion:
        step = joined(steps)
        choice = ChatChoice(
            message=ChatMessage(content=step.delta.text),
            logprobs=self._logprobs(step.tokens) if step.tokens else None,
            finish_reason=step.finish_reason,
            stop_reason=step.stop_reason,
        )
        answer = ChatCompletion(*self._head, [choice], usage=_usage(self._run))
        if self._asked.return_token_ids:
            choice.token_ids, answer.prompt_token_ids = step.token_ids, prompt_ids_of(self._run)
        if hand_off is not None:
            answer.kv_transfer_params = hand_off
        return answer

    def _logprobs(self, tokens: Sequence[OutputToken]) -> ChatLogprobs:
        return ChatLogprobs(
            [
                TokenLogprob(
                    *self._named(token.token_id, token.logprobs.logprob),
                    [TopLogprob(*self._named(*candidate)) for candidate in token.logprobs.top],
                )
                for token in tokens
            ]
        )

    def _named(self, token_id: int, logprob: float) -> tuple[str, float, list[int]]:
        return self._pieces.text(token_id), logprob, list(self._pieces.raw(token_id))


def joined(steps: Sequence[StepOutput]) -> StepOutput:
    """Join all outputs of a run."""
    deltas = [step.delta for step in steps]
    return StepOutput(
        [token_id for step in steps for token_id in step.token_ids],
        TextDelta("".join(delta.text for delta in deltas), deltas[-1].stopped),
        steps[-1].finish_reason,
        steps[-1].stop_reason,
        tuple(token for step in steps for token in step.tokens),
    )


def _usage(run: GenerationRun) -> Usage:
    """Return the usage of the whole stream, earlier attempts included. The cached tokens are those
    of this attempt, and not reported for a continued stream.
    """
    sequence = run.sequence
    prompt, cached = sequence.prompt_tokens, sequence.cached_tokens
    if cached is not None:
        cached = None if sequence.history_tokens > prompt else min(cached, prompt)
    return usage_of(prompt, run.produced_tokens, cached)


def prompt_ids_of(run: GenerationRun) -> list[int]:
    return [*run.sequence.token_ids[: run.sequence.prompt_tokens]]
