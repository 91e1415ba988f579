"""Synthetic conversations in Mooncake form, from a seed, with real prefix sharing.

Requests arrive as a Poisson process. A request opens a conversation or is the next turn of the
conversation that has waited longest. Its prompt is a shared system prompt, the conversation so far
(answers included), and a new message.
"""

import math
import random
from dataclasses import dataclass, field

from kvrs_lab.traces.mooncake import MOONCAKE_BLOCK_TOKENS, Trace, TraceRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorSettings:
    """Settings of a generator. The defaults approximate the statistics of Mooncake's conversation
    trace; see `tests/traces/test_generator.py`.
    """

    requests: int = 64
    requests_per_s: float = 3.4
    turns_mean: float = 1.6  # Per conversation.
    system_tokens: int = 512
    first_message_tokens_p50: float = 4800.0  # Lognormal, like the next two.
    first_message_sigma: float = 1.2
    next_message_tokens_p50: float = 1500.0
    next_message_sigma: float = 1.1
    output_tokens_p50: float = 320.0
    output_sigma: float = 0.4
    max_input_tokens: int = 126_000  # A conversation ends before a longer turn.
    max_output_tokens: int = 2000


@dataclass(slots=True)
class _Conversation:
    tokens: int = 0
    full_block_ids: list[int] = field(default_factory=list)


class _Generator:
    def __init__(self, settings: GeneratorSettings, seed: int) -> None:
        self._settings = settings
        self._rng = random.Random(seed)
        self._system_ids = list(range(settings.system_tokens // MOONCAKE_BLOCK_TOKENS))
        self._next_id = len(self._system_ids)
        self._waiting: list[_Conversation] = []  # Longest wait first.

    def request(self, arrival_s: float) -> TraceRequest:
        conversation = self._next_turn() or self._opening()
        output = self._length(
            self._settings.output_tokens_p50,
            self._settings.output_sigma,
            self._settings.max_output_tokens,
        )
        request = TraceRequest(arrival_s, conversation.tokens, output, self._ids_of(conversation))
        conversation.tokens += output
        self._waiting.append(conversation)
        return request

    def _opening(self) -> _Conversation:
        s = self._settings
        room = s.max_input_tokens - s.system_tokens
        message = self._length(s.first_message_tokens_p50, s.first_message_sigma, room)
        return _Conversation(s.system_tokens + message, list(self._system_ids))

    def _next_turn(self) -> _Conversation | None:
        s = self._settings
        if not self._waiting or self._rng.random() < 1 / s.turns_mean:
            return None
        conversation = self._waiting.pop(0)
        message = self._length(s.next_message_tokens_p50, s.next_message_sigma, s.max_input_tokens)
        conversation.tokens += message
        return conversation if conversation.tokens <= s.max_input_tokens else None

    def _ids_of(self, conversation: _Conversation) -> tuple[int, ...]:
        full, rest = divmod(conversation.tokens, MOONCAKE_BLOCK_TOKENS)
        while len(conversation.full_block_ids) < full:
            conversation.full_block_ids.append(self._fresh_id())
        # A partial block is not shared: the next turn has more tokens in its place.
        partial = (self._fresh_id(),) if rest else ()
        return (*conversation.full_block_ids, *partial)

    def _fresh_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    def _length(self, p50: float, sigma: float, highest: int) -> int:
        return max(1, min(highest, round(self._rng.lognormvariate(math.log(p50), sigma))))

    def gap_s(self) -> float:
        return self._rng.expovariate(self._settings.requests_per_s)


def generate(settings: GeneratorSettings, seed: int) -> Trace:
    """Generate a trace as a function of settings and seed alone. The first request arrives at 0;
    times are whole milliseconds.
    """
    generator = _Generator(settings, seed)
    requests, now_s = [], 0.0
    for _ in range(settings.requests):
        requests.append(generator.request(round(now_s * 1000) / 1000))
        now_s += generator.gap_s()
    return Trace(tuple(requests))
