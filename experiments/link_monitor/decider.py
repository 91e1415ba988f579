"""The product's policy as it decides on one lost stream after the other, and the rate of a link at
which migrating and recomputing cost the same.
"""

from collections.abc import Sequence
from typing import Any

from kvrs.config.policy import PolicyName, PolicySettings, RecoverySettings, SloSettings
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.estimates import Option
from kvrs.core.recovery import RecoveryPolicy
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.profiles.tables import PrefillTable
from kvrs.protocol.instance import InstanceInfo, assumed_instance

N0, N1 = NodeId("n0"), NodeId("n1")
P0, TARGET = InstanceId("p0"), InstanceId("d1")
PRODUCED_TOKENS = 16


class Decider:
    """One policy object for all takes of one policy. Each stream has a decode instance of its own
    on n0, which is lost: one that dies again and again would get no streams. A decision precedes
    the plan that it makes, so its clock goes on only by what that took, and by the time of the
    table for the first prefill, from which the policy learns how fast instances are.
    """

    def __init__(
        self, name: PolicyName, infos: Sequence[InstanceInfo], table: PrefillTable
    ) -> None:
        recovery = RecoverySettings(gather_s=0.0)
        self._policy = RecoveryPolicy(PolicySettings(name=name, recovery=recovery), SloSettings())
        self._streams, self._table, self._now_s = 0, table, 0.0
        for info in infos:
            self._tell(ev.InstanceUp(info, table))
        self._like = _target(infos)

    def lose(self, prompt_tokens: int, bytes_per_s: float) -> tuple[act.Plan, Option, StreamId]:
        """A stream of p0 and an instance beside it loses that; return the policy's plan."""
        self._streams += 1
        stream = StreamId(f"s{self._streams}")
        lost, like = InstanceId(f"d0-{self._streams}"), self._like
        info = assumed_instance(lost, N0, like.role, like.geometry, like.capabilities)
        self._tell(ev.InstanceUp(info, self._table))
        self._tell(ev.LinkMeasured(N0, N1, bytes_per_s))
        started = _only(self._tell(ev.StreamArrived(stream, prompt_tokens)), act.Start)
        assert (started.plan.prefill, started.plan.decode) == (P0, lost), started
        self._now_s += self._table.seconds_for(prompt_tokens)
        self._tell(ev.PrefillDone(stream, 1, prompt_tokens))
        self._tell(ev.StreamResumed(stream, 1))
        actions = self._tell(ev.InstanceLost(lost, 1, "killed", {stream: PRODUCED_TOKENS}))
        return _only(actions, act.Start).plan, _only(actions, act.Recovered).option, stream

    def carried_out(
        self, stream: StreamId, plan: act.Plan, history_tokens: int, seconds: float
    ) -> None:
        """The first token after the recovery: the policy learns the real cost."""
        self._now_s += seconds
        if plan.prefill is not None:
            self._tell(ev.PrefillDone(stream, 2, history_tokens))
        self._tell(ev.StreamResumed(stream, 2))
        self._tell(ev.StreamEnded(stream, 2))

    def _tell(self, event: Any) -> Sequence[act.Action]:
        return self._policy.handle(event, self._now_s)


def _only(actions: Sequence[act.Action], kind: Any) -> Any:
    (found,) = [action for action in actions if isinstance(action, kind)]
    return found


def _target(infos: Sequence[InstanceInfo]) -> InstanceInfo:
    return next(info for info in infos if info.id == TARGET)


def crossover_bytes_per_s(
    infos: Sequence[InstanceInfo], table: PrefillTable, prompt_tokens: int
) -> float:
    """The rate at which both static ways are predicted to cost the same: migrating is `fixed +
    bytes / bandwidth`.
    """
    geometry = _target(infos).geometry
    history = prompt_tokens + PRODUCED_TOKENS
    prefix = prompt_tokens // geometry.page_size_tokens * geometry.page_size_tokens
    tail_s = table.extra(prefix, history - prefix)
    return prefix * geometry.bytes_per_token / (table.seconds_for(history) - tail_s)
