"""Replay: the request begins again, and the engine generates the known output once more.

The estimate is the prompt, by recompute or by migrate from a prefix cache, + t decode steps.
Replay is the only exact option where the next token depends on more than the tokens before it: on
the state of a grammar, a parser or a random generator. Only such streams are replayed, and replay
is chosen before every other option (`core/decisions.py`).
"""

from collections.abc import Iterable
from operator import attrgetter

from msgspec.structs import replace

from kvrs.core.model import actions as act
from kvrs.core.model.estimates import Estimate, Option
from kvrs.core.model.streams import Stream
from kvrs.core.options.base import Case, RecoveryOption, Term
from kvrs.core.options.migrate import MIGRATE
from kvrs.core.options.recompute import RECOMPUTE
from kvrs.core.state import State

_REPLAY = Option.REPLAY
# The longest output that is replayed, one token a step. A longer output is continued inexactly if
# no other option is exact.
REPLAY_TOKENS_MAX = 1024


def estimate(case: Case, estimates: list[Estimate]) -> None:
    stream, target = case.stream, case.target
    if not (target.replays and stream.produced_tokens <= REPLAY_TOKENS_MAX):
        return
    prompt, found = _prompt_of(case), list[Estimate]()
    if prompt.wanted_pages:
        MIGRATE.estimate(prompt, found)
    RECOMPUTE.estimate(prompt, found)
    decode_s = _decode_s(case)
    for each in found:
        if each.option is Option.MIGRATE and not each.by_prefill:
            continue  # A replay does not fetch pages.
        raw_s = each.raw_s + decode_s
        total_s = raw_s * case.factor(_REPLAY)
        estimates.append(replace(each, option=_REPLAY, raw_s=raw_s, total_s=total_s))


def plan(state: State, stream: Stream, estimate: Estimate) -> act.Plan:
    return act.Plan(estimate.target, estimate.source, replays=True)


def terms(case: Case, estimate: Estimate) -> Iterable[Term]:
    prompt_by = MIGRATE if estimate.by_prefill else RECOMPUTE
    yield from prompt_by.terms(_prompt_of(case), estimate)
    yield Term("replay", _decode_s(case), f"{case.stream.produced_tokens:,} tokens, one a step")


def _prompt_of(case: Case) -> Case:
    """Return the case with a history that is the prompt alone."""
    tokens, table = case.stream.prompt_tokens, case.target.prefill
    return replace(
        case,
        history_tokens=tokens,
        history_s=table.seconds_for(tokens),
        extrapolated=not table.covers(tokens),
    )


def _decode_s(case: Case) -> float:
    """Return the time to decode the known tokens, at the stream's measured pace, else at the
    overhead of a step.
    """
    stream = case.stream
    step_s = case.target.prefill.step_overhead_s if stream.token_s is None else stream.token_s
    return stream.produced_tokens * step_s


REPLAY = RecoveryOption(
    _REPLAY, estimate, plan, terms, fetches=False, needs=attrgetter("stream.needs_replay")
)
