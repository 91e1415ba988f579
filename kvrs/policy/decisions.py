"""What a stream that has no attempt should do next, and what that is predicted to cost. Decides, and books nothing."""

from collections.abc import Sequence
from math import inf

from kvrs.policy.actions import Plan, Settled
from kvrs.policy.cluster_view import ClusterView, Member
from kvrs.policy.config import PolicyName, PolicySettings, SloSettings
from kvrs.policy.costs import Estimate, Option, decide
from kvrs.policy.deadlines import due_s
from kvrs.policy.learning import Corrections
from kvrs.policy.options import Options
from kvrs.policy.routing import pair_for, targets_for
from kvrs.policy.slots import SlotBook
from kvrs.policy.streams import Decision, Stage, Stream
from kvrs.policy.timers import is_past


class Decisions:
    def __init__(self, view: ClusterView, slots: SlotBook, settings: PolicySettings, slo: SloSettings) -> None:
        self.corrections = Corrections(settings.correction_max)
        self._view = view
        self._settings = settings
        self._slo = slo
        self._factors: dict[Option, float] = {}
        self._options = Options(view, slots, settings, self._factors)

    def begin(self, now_s: float) -> None:
        """Predictions from here on are multiplied by what has been learned until now."""
        self._factors.clear()
        for option in self.corrections.snapshot():
            self._factors[Option(option)] = self.corrections.factor(Option(option), now_s)

    def start(self, stream: Stream, now_s: float) -> Decision | None:
        """From the beginning; None: there is no pair."""
        pair = pair_for(self._view, stream, barred_too=False)
        if pair is None and is_past(stream.retry_at_s, now_s):
            pair = pair_for(self._view, stream, barred_too=True)
        if pair is None:
            return None
        prefill, decode = pair
        compute_s, transfer_s = prefill.instance.prefill.seconds_for(stream.prompt_tokens), 0.0
        if prefill is not decode:
            size_bytes = stream.prompt_tokens * prefill.instance.geometry.bytes_per_token
            bytes_per_s = self._view.bytes_per_s(prefill.instance.node, decode.instance.node)
            transfer_s = self._settings.handshake_s + size_bytes / bytes_per_s
        total_s = prefill.queue_s + compute_s + transfer_s
        extrapolated = not prefill.instance.prefill.covers(stream.prompt_tokens)
        source = None if prefill is decode else prefill.instance.id
        estimate = Estimate(
            Option.START,
            decode.instance.id,
            total_s,
            prefill.queue_s,
            transfer_s,
            compute_s,
            extrapolated,
            raw_s=total_s,
            source=source,
        )
        budget_s = self.budget_s(stream, now_s)
        in_time = budget_s is None or total_s <= budget_s
        return Decision(estimate, (estimate,), Plan(decode.instance.id, source) if in_time else None)

    def recover(self, stream: Stream, assigned: Member, limit: int, now_s: float) -> Decision:
        """From its history, at the assigned target or at another one that has fewer than `limit` streams."""
        targets = targets_for(self._view, stream, assigned, limit, self._settings)
        estimates = self._options.weigh(stream, targets, now_s)
        chosen = decide(self._settings.name, self._eligible(stream, estimates, now_s), self.budget_s(stream, now_s))
        plan = None if chosen.option is Option.ABORT else self._options.plan(stream, chosen)
        return Decision(chosen, tuple(estimates), plan)

    def budget_s(self, stream: Stream, now_s: float) -> float | None:
        """How long the next token may take; None: as long as it takes."""
        if not self._slo.abort:
            return None
        due = due_s(stream)
        return due - now_s if due < inf else None

    def settle(self, stream: Stream, now_s: float) -> Settled | None:
        """The attempt has brought a token: what its recovery has cost, from which predictions learn. None: it was none."""
        decision, stream.decision = stream.decision, None
        if decision is None:
            return None
        chosen, real_s = decision.chosen, now_s - stream.decided_s
        best_other_s = min((each.total_s for each in decision.estimates if each is not chosen), default=real_s)
        # A start was predicted from a guess at the prompt's length, what was handed off elsewhere for another target; and the
        # seed's rule is left as the seed has it.
        as_predicted = chosen.option is not Option.START and stream.plan is not None and stream.plan.decode == chosen.target
        if as_predicted and self._settings.name is not PolicyName.ROM:
            self.corrections.observe(chosen.option, chosen.raw_s, real_s, now_s)
        return Settled(
            stream.id, stream.attempt, chosen.option, chosen.raw_s, chosen.total_s, real_s, regret_s=real_s - best_other_s
        )

    def _eligible(self, stream: Stream, estimates: Sequence[Estimate], now_s: float) -> Sequence[Estimate]:
        """What has not just failed. Never empty, and never only what failed last: then nothing would replace that attempt."""
        waited_s = self._settings.recovery.wait_s
        is_tired = stream.stage is Stage.QUEUED and is_past(stream.waiting_since_s + waited_s, now_s)
        if stream.slot_expired or is_tired:
            # Whose slot has expired may still be fetching, and is replaced at once only by what needs none. Who has queued
            # for as long as anybody waits takes the other way, so that no policy queues for ever.
            return [estimate for estimate in estimates if not estimate.fetches]
        if not stream.removed:
            return estimates
        allowed = [estimate for estimate in estimates if estimate.option not in stream.removed]
        return allowed or [estimate for estimate in estimates if estimate.option is not stream.option] or estimates
