"""One instance of RaidServe's section 4.2 in virtual time, which prefills or decodes: a model under
a layout of the product, with batches of a trace.

Step times come from profiles of vLLM on H100 through `experiments/step_times.py`, not from a
GPU. Where heads are spread, the busiest rank is that of the batch at hand: a sequence's cells of
these heads are on one rank in each layer, and how many tokens and cells that rank has is counted.
"""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from experiments.sentinels.rates import Model, room_tokens
from kvrs.profiles import catalog
from kvrs.profiles.catalog import PrefillPoints
from kvrs_engine.elastic.layouts import Layout, Stage, hybrid, staged, uneven
from kvrs_engine.elastic.placing import least_loaded
from kvrs_engine.elastic.speed import Shares, shares
from kvrs_engine.scheduling.shares import (
    PrefillCost,
    Waiting,
    in_line,
    prefill_cost,
    shared_out,
)
from kvrs_lab.traces.mooncake import TraceRequest
from kvrs_testkit.layouts import even, rotated

BUDGET_TOKENS = 2048  # Of a prefill batch, as of vLLM.
LINE = 64  # Prompts that have room at a time, of which a prefill batch may have tokens.
# Experts that a token goes through, of those of a layer.
ACTIVE = {"Mixtral-8x22B": 2 / 8}


@dataclass(frozen=True)
class Instance:
    """`shares_out`: batches and bases are chosen for even loads, where heads are spread."""

    model: Model
    profile: str
    layout: Layout
    shares_out: bool = True

    @cached_property
    def bases(self) -> int:
        return self.layout.bases if self.layout.turns else 1

    @cached_property
    def own(self) -> Shares:
        return shares(self.layout, self.model.units)

    @cached_property
    def room_tokens(self) -> float:
        return room_tokens(self.model, self.layout)

    @cached_property
    def cost(self) -> PrefillCost | None:
        """By which tokens are shared out; None where they are taken in line."""
        near = self.model.speed.near.ranks
        table = catalog.prefill_table(self.profile).scaled(near / len(self.layout.ranks))
        return prefill_cost(self.layout, self.model.units, table) if self.shares_out else None

    @cached_property
    def _heads(self) -> tuple[int, int, int]:
        """KV heads of a layer: of the busiest rank alone, spread ones, and all."""
        own = max(len(self.layout.heads(rank, 0)) for rank in self.layout.ranks)
        return own, len(self.layout.spread(0)), len(self.model.units.attention_bytes)

    def of_heads(self, largest: float) -> float:
        """The busiest rank's share of a layer's attention, if it has that share of the work of the
        spread heads.
        """
        own, spread, heads = self._heads
        return (own + spread * largest) / heads

    @cached_property
    def _of_rows(self) -> tuple[float, float]:
        """Attention's share of the products of a row, and the busiest rank's share of the rest. A
        row goes through some of the experts.
        """
        units = self.model.units
        attention, mlp = sum(units.attention_bytes), sum(units.mlp_bytes)
        busiest = max(
            sum(units.mlp_bytes[tile] for tile in self.layout.tiles(rank, 0))
            for rank in self.layout.ranks
        )
        active = mlp * ACTIVE.get(self.model.name, 1.0)
        return attention / (attention + active), busiest / mlp

    @cached_property
    def _pair_s(self) -> float:
        """Seconds of a new token with one before its chunk, on one rank."""
        prefill = catalog.profile(self.profile).prefill
        assert isinstance(prefill, PrefillPoints)
        assert prefill.cached is not None
        return prefill.cached.seconds_per_token_pair * self.model.speed.near.ranks

    def prefill_s(self, tokens: Sequence[int], pairs: Sequence[int]) -> float:
        """A batch of so many new tokens, by base, with so many pairs of one of them and a token
        before its chunk.
        """
        attention, mlp = self._of_rows
        batch, all_pairs = sum(tokens), sum(pairs)
        rows = attention * self.of_heads(max(tokens) / batch) + (1 - attention) * mlp
        dense_s = self.model.speed.prefill_s(replace(self.own, rows=rows), batch)
        if not all_pairs:
            return dense_s
        return dense_s + all_pairs * self._pair_s * self.of_heads(max(pairs) / all_pairs)

    def decode_s(self, batch: int, contexts: Sequence[int]) -> float:
        """A step of so many sequences, with so many tokens of context by base."""
        all_tokens = sum(contexts)
        own = replace(self.own, cells=self.of_heads(max(contexts) / all_tokens))
        return self.model.speed.decode_s(own, batch, all_tokens)


def standard(model: Model, profile: str, gpus: int) -> Instance:
    return Instance(model, profile, even(model.units, gpus))


def naive(model: Model, profile: str, gpus: int) -> Instance:
    return Instance(model, profile, uneven(model.units, _one_stage(model, gpus)))


def cyclic(model: Model, profile: str, gpus: int) -> Instance:
    """RaidServe's balanced memory alone."""
    return Instance(model, profile, rotated(model.units, _one_stage(model, gpus)))


def spread(model: Model, profile: str, gpus: int) -> Instance:
    """Hybrid attention, without the choice of bases and batches."""
    return Instance(model, profile, hybrid(model.units, _one_stage(model, gpus)), shares_out=False)


def ours(model: Model, profile: str, gpus: int) -> Instance:
    """Everything of RaidServe."""
    return Instance(model, profile, hybrid(model.units, _one_stage(model, gpus)))


def _one_stage(model: Model, gpus: int) -> tuple[Stage, ...]:
    return staged(model.units.layers, [range(gpus)])


@dataclass(frozen=True, slots=True)
class Played:
    """A trace at an instance. `full_per_s`: tokens per second as long as requests waited
    for room, of a trace that arrives at once the peak.
    """

    tokens: int
    seconds: float  # Until the last request was done.
    full_per_s: float
    waits_s: list[float]  # Of each request: to its first token, or of a token in the mean.

    @property
    def per_s(self) -> float:
        return self.tokens / self.seconds


@dataclass(slots=True)
class _Prompt:
    arrival_s: float
    tokens: int
    base: int
    done: int = 0


class _Bases:
    """Gives requests their bases: by what is pending there, or in turns."""

    def __init__(self, instance: Instance) -> None:
        self.pending = dict.fromkeys(range(instance.bases), 0)
        self._by_load, self._next = instance.shares_out, 0

    def take(self, tokens: int) -> int:
        base = least_loaded(self.pending) if self._by_load else self._next
        self._next = (self._next + 1) % len(self.pending)
        self.pending[base] += tokens
        return base


def prefill(instance: Instance, requests: Sequence[TraceRequest]) -> Played:
    """Prompts, in the order of their arrival; each has room for all its tokens, or waits, and
    leaves with its last token.
    """
    share = _share_of(instance)
    bases, arriving = _Bases(instance), deque(requests)
    waiting: deque[_Prompt] = deque()
    line: list[_Prompt] = []
    now_s, free = 0.0, instance.room_tokens
    waits_s: list[float] = []
    full_s = full_tokens = 0.0
    while arriving or waiting or line:
        if not waiting and not line:
            now_s = max(now_s, arriving[0].arrival_s)
        while arriving and arriving[0].arrival_s <= now_s:
            new = arriving.popleft()
            base = bases.take(new.input_tokens)
            waiting.append(_Prompt(new.arrival_s, new.input_tokens, base))
        while waiting and len(line) < LINE and waiting[0].tokens <= free:
            free -= waiting[0].tokens
            line.append(waiting.popleft())
        assert line, "a prompt for which there is no room"
        taken = share(
            [Waiting(each.base, each.done, each.tokens - each.done) for each in line], BUDGET_TOKENS
        )
        tokens, pairs = [0] * instance.bases, [0] * instance.bases
        for each, count in zip(line, taken, strict=True):
            tokens[each.base] += count
            pairs[each.base] += count * each.done
            each.done += count
            bases.pending[each.base] -= count
        took_s = instance.prefill_s(tokens, pairs)
        now_s += took_s
        if waiting:
            full_s, full_tokens = full_s + took_s, full_tokens + sum(tokens)
        done = [each for each in line if each.done == each.tokens]
        waits_s += [now_s - each.arrival_s for each in done]
        free += sum(each.tokens for each in done)
        line = [each for each in line if each.done < each.tokens]
    whole = sum(each.input_tokens for each in requests)
    return Played(whole, now_s, full_tokens / full_s if full_s else 0.0, waits_s)


def _share_of(instance: Instance) -> Callable[[Sequence[Waiting], int], list[int]]:
    cost = instance.cost
    return in_line if cost is None else lambda waiting, budget: shared_out(waiting, budget, cost)


def decode(instance: Instance, requests: Sequence[TraceRequest]) -> Played:
    """Streams whose prompts are computed elsewhere, in the order of their arrival; each has room
    for all its tokens, or waits. A stream's wait is the mean of its tokens, the first one's wait
    for room included.
    """
    bases, arriving = _Bases(instance), deque(requests)
    # The step after which a stream ends, and its number, which tells equal ones apart.
    running: list[tuple[int, int, TraceRequest, int]] = []
    contexts, counts = [0] * instance.bases, [0] * instance.bases
    now_s, free, step = 0.0, instance.room_tokens, 0
    waits_s: list[float] = []
    full_s = full_tokens = 0.0
    while arriving or running:
        if not running:
            now_s = max(now_s, arriving[0].arrival_s)
        while arriving and arriving[0].arrival_s <= now_s and _room(arriving[0]) <= free:
            new = arriving.popleft()
            base = bases.take(_room(new))
            heapq.heappush(running, (step + new.output_tokens, len(arriving), new, base))
            free -= _room(new)
            contexts[base] += new.input_tokens
            counts[base] += 1
        assert running, "a stream for which there is no room"
        took_s = instance.decode_s(len(running), contexts)
        now_s, step = now_s + took_s, step + 1
        if arriving and arriving[0].arrival_s <= now_s:
            full_s, full_tokens = full_s + took_s, full_tokens + len(running)
        for base, count in enumerate(counts):
            contexts[base] += count
        while running and running[0][0] == step:
            _, _, ended, base = heapq.heappop(running)
            waits_s.append((now_s - ended.arrival_s) / ended.output_tokens)
            free += _room(ended)
            contexts[base] -= ended.input_tokens + ended.output_tokens
            counts[base] -= 1
            bases.pending[base] -= _room(ended)
    whole = sum(each.output_tokens for each in requests)
    return Played(whole, now_s, full_tokens / full_s if full_s else 0.0, waits_s)


def _room(request: TraceRequest) -> int:
    return request.input_tokens + request.output_tokens
