"""`rom`: `ROM_DECIDE` of seed KVRS. Migrate costs the prompt's KV bytes / bandwidth, recompute the
prompt's prefill time; the cheaper option is chosen, and a tie goes to migrate.

The costs leave out queues, produced tokens and checkpoints. As in the seed,
both options are compared at one target, because these costs cannot tell targets apart.
"""

from collections.abc import Iterable, Sequence

from kvrs.config.policy import PolicyName
from kvrs.core.model.estimates import Estimate, Option
from kvrs.core.model.member import Member
from kvrs.core.model.streams import Stream
from kvrs.core.options.base import (
    Case,
    Term,
    division,
    usable_pages,
)
from kvrs.core.options.migrate import cached_at, has_cached
from kvrs.core.options.recompute import prefill_for
from kvrs.core.rules.base import Rule, sources_of
from kvrs.core.state import State
from kvrs.ids import InstanceId

_MIGRATE, _RECOMPUTE = Option.MIGRATE, Option.RECOMPUTE


class Rom(Rule):
    stays = False
    predicts = False

    def weigh(
        self, state: State, stream: Stream, targets: Sequence[Member], now_s: float
    ) -> list[Estimate]:
        target, view, tokens = targets[0], state.view, stream.prompt_tokens
        estimates: list[Estimate] = []

        def migrate_from(source: InstanceId, *, by_prefill: bool) -> None:
            link = view.link(view.members[source].node, target.node)
            rate = link.bytes_per_s
            estimates.append(rom_migrate(target, tokens, rate, source, by_prefill))

        prefill = prefill_for(view, target, stream)
        if target.abilities.pulls:
            sources = sources_of(state, stream, target, usable_pages(stream, target))
            if kept := [source for source in sources if not source.is_agent and source.pages]:
                nearest = min(kept, key=lambda each: each.drain_s + each.pages * each.page_s)
                migrate_from(nearest.id, by_prefill=False)
        for holder in cached_at(stream, target):
            migrate_from(holder.member.id, by_prefill=True)
        if target.info.joins_prefill:
            if prefill is target:
                return estimates
        elif has_cached(stream, prefill) and not (
            target.abilities.pulls and prefill.abilities.retains
        ):
            prefill = target
        estimates.append(rom_recompute(prefill, target, tokens))
        return estimates

    def terms(self, case: Case, estimate: Estimate) -> Iterable[Term]:
        tokens, target = case.stream.prompt_tokens, case.target
        if estimate.option is _RECOMPUTE:
            yield Term("prefill", estimate.compute_s, f"{tokens:,} tokens")
            return
        assert estimate.source is not None, estimate
        size_bytes = tokens * target.abilities.bytes_per_token
        source = case.state.view.members[estimate.source]
        rate = case.state.view.bytes_per_s(source.node, target.node)
        yield Term(
            "transfer", estimate.transfer_s, division(f"{tokens:,} tokens", size_bytes, rate)
        )


def rom_migrate(
    target: Member,
    prompt_tokens: int,
    bytes_per_s: float,
    source: InstanceId | None = None,
    by_prefill: bool = False,
) -> Estimate:
    """`MIGRATE_COST` of seed KVRS: KV bytes of the prompt over the bandwidth."""
    transfer_s = prompt_tokens * (target.abilities.bytes_per_token / bytes_per_s)
    return Estimate(
        _MIGRATE,
        target.id,
        transfer_s,
        transfer_s=transfer_s,
        source=source,
        by_prefill=by_prefill,
    )


def rom_recompute(prefill: Member, target: Member, prompt_tokens: int) -> Estimate:
    """`RECOMPUTE_COST` of seed KVRS: the prefill table at the length of the prompt."""
    compute_s = prefill.times.table.seconds_for(prompt_tokens)
    return Estimate(
        _RECOMPUTE,
        target.id,
        compute_s,
        compute_s=compute_s,
        extrapolated=not prefill.times.table.covers(prompt_tokens),
        source=None if prefill.id == target.id else prefill.id,
    )


ROM = Rom(PolicyName.ROM, ())
