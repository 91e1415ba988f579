"""Replay: the request begins again, and the engine generates the known output once more.

The estimate is the prompt, by recompute or by migrate from a prefix cache, + t decode steps.
Replay is the only exact option where the next token depends on more than the tokens before it: on
the state of a grammar, a parser or a random generator. Only such streams are replayed, and replay
is chosen before every other option (`core/placing.py`).

An instance with kvrs's processor is told the t tokens. Any other one generates them by itself if
its self-test is equal to that of the instance before, and its output is compared with them. It may
differ at a near-tie: with probability p the time is spent in vain, and spent again elsewhere, so
the estimate is raised by the factor 1 + p.
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
# The longest time of the known output's steps. A longer replay is not tried: clients and gateways
# give up streams that are silent for longer, and promises (`Instances.replays`) follow this bound.
REPLAY_S_MAX = 120.0


def estimate(case: Case, estimates: list[Estimate]) -> None:
    stream, target = case.stream, case.target
    decode_s = _decode_s(case)
    if decode_s > REPLAY_S_MAX or not stream.may_replay(target):
        return
    prompt, found = _prompt_of(case), list[Estimate]()
    if prompt.wanted_pages:
        MIGRATE.estimate(prompt, found)
    RECOMPUTE.estimate(prompt, found)
    factor = 1.0 + _chance(case)
    for each in found:
        if each.option is Option.MIGRATE and not each.by_prefill:
            continue  # A replay does not fetch pages.
        total_s = (each.total_s + decode_s) * factor
        estimates.append(replace(each, option=_REPLAY, total_s=total_s))


def plan(state: State, stream: Stream, estimate: Estimate) -> act.Plan:
    return act.Plan(estimate.target, estimate.source, replays=True)


def terms(case: Case, estimate: Estimate) -> Iterable[Term]:
    prompt_by = MIGRATE if estimate.by_prefill else RECOMPUTE
    yield from prompt_by.terms(_prompt_of(case), estimate)
    yield Term("replay", _decode_s(case), f"{case.stream.produced_tokens:,} tokens, one a step")
    if chance := _chance(case):
        how = f"the tokens differ with a probability of {chance:.2g}"
        yield Term("again", estimate.next_token_s * chance / (1.0 + chance), how)


def _prompt_of(case: Case) -> Case:
    """Return the case with a history that is the prompt alone."""
    tokens, table = case.stream.prompt_tokens, case.target.times.table
    return replace(
        case,
        history_tokens=tokens,
        history_s=table.seconds_for(tokens),
        extrapolated=not table.covers(tokens),
    )


def _chance(case: Case) -> float:
    """Return the probability that the target generates other tokens than the known ones."""
    if case.target.abilities.replays:
        return 0.0
    return case.state.differences.chance(case.stream.produced_tokens)


def _decode_s(case: Case) -> float:
    """Return the time to decode the known tokens, at the stream's measured pace, else at the
    overhead of a step.
    """
    stream = case.stream
    step_s = case.target.times.table.step_overhead_s if stream.token_s is None else stream.token_s
    return stream.produced_tokens * step_s


REPLAY = RecoveryOption(
    _REPLAY, estimate, plan, terms, fetches=False, needs=attrgetter("stream.needs_replay")
)
