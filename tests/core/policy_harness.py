"""Builders for the tests of the policy."""

from typing import Any, TypeVar

import msgspec

from kvrs.config.backup import BackupSettings
from kvrs.config.file import Config, parse_config
from kvrs.config.policy import PolicyName, PolicySettings, RecoverySettings, SloSettings
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.agent import Agent
from kvrs.core.model.cluster_view import ClusterView
from kvrs.core.model.member import Member
from kvrs.core.recovery import RecoveryPolicy
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.profiles.tables import PrefillTable
from kvrs.protocol.geometry import KvGeometry
from kvrs.protocol.instance import LoadReport, MeasuredPrefill, ModelNames, Role, assumed_instance

GEOMETRY = KvGeometry(
    layers=4, kv_heads=2, head_dim=32, dtype_bytes=4, page_size_tokens=16
)  # 2,048 bytes per token
TABLE = PrefillTable("test", "made up", 100, [0.0, 0.1, 0.2, 0.3, 0.4])  # 1 ms per token
PREFILL = MeasuredPrefill("test", 100, [0.0, 0.1, 0.2, 0.3, 0.4])  # The same.
ROLES = {"p": Role.PREFILL, "d": Role.DECODE, "b": Role.BOTH}

OF_LOAD = ("token_s", "produced_tokens")
OF_EVENT = ("moves_kv", "tokens", "lives_on", "had_not_ended", "generates")

ActionT = TypeVar("ActionT")


def make_config(
    names: list[str], policy: PolicySettings, slo: SloSettings, backup: BackupSettings
) -> Config:
    nodes = sorted({name[1] for name in names})
    document = {
        "cluster": {
            "engine": {"page_size_tokens": GEOMETRY.page_size_tokens},
            "nodes": [
                {
                    "id": f"n{digit}",
                    "instances": [
                        {"id": name, "role": ROLES[name[0]].value}
                        for name in names
                        if name[1] == digit
                    ],
                }
                for digit in nodes
            ],
        }
    }
    sections = {"policy": policy, "slo": slo, "backup": backup}
    return parse_config(document).model_copy(update=sections)


def instance_up(
    name: str, epoch: int = 1, *, prefill: PrefillTable | None = TABLE, **changes: Any
) -> ev.InstanceUp:
    """`p0` is a prefill instance on node `n0`, `d1` a decode instance on `n1`, `b2` both on `n2`.
    `changes` are of the event, or else of what the instance says of itself.
    """
    node, role = NodeId("n" + name[1:2]), ROLES[name[0]]
    info = assumed_instance(InstanceId(name), node, role, GEOMETRY, epoch=epoch)
    if "names" in changes:
        changes["names"] = ModelNames(changes["names"])
    of_event = {key: changes.pop(key) for key in OF_EVENT if key in changes}
    info = msgspec.structs.replace(info, prefill=PREFILL, **changes)
    return ev.InstanceUp(info, prefill, **of_event)


def member(name: str, **changes: Any) -> Member:
    """The member of a view that `instance_up` makes."""
    event = instance_up(name, **changes)
    return ClusterView(1e9).add(Member.of(event.info, event.prefill))


def load(
    name: str, queue_s: float = 0.0, streams: int = 0, epoch: int = 1, **report: Any
) -> ev.LoadReported:
    """Other proxies use the instance as well if it has any `streams`."""
    of_event = {key: report.pop(key) for key in OF_LOAD if key in report}
    reported = LoadReport(epoch, 0, streams, 0, queue_s, [], **report)
    return ev.LoadReported(InstanceId(name), reported, streams > 0, **of_event)


class PolicyHarness:
    """A policy, a clock that is set by hand, and all actions that were returned so far."""

    def __init__(
        self,
        *names: str,
        name: PolicyName = PolicyName.AUTO,
        slo: SloSettings | None = None,
        wait_s: float = 30.0,
        max_attempts: int = 8,
        gather_s: float = 0.0,
        poison_deaths: int = 3,
        backup: BackupSettings | None = None,
        **settings: Any,
    ) -> None:
        recovery = RecoverySettings(
            wait_s=wait_s,
            max_attempts=max_attempts,
            gather_s=gather_s,
            poison_deaths=poison_deaths,
        )
        policy = PolicySettings(name=name, recovery=recovery, **settings)
        agents: dict[InstanceId, Agent] = {}  # One record each, as in a proxy.
        self.policy = RecoveryPolicy(
            policy,
            slo or SloSettings(),
            backup or BackupSettings(),
            agent_of=lambda up: agents.setdefault(up.holder, Agent(up.holder, up.node)),
        )
        self.now_s = 0.0
        self.actions: list[act.Action] = []
        self.add(*names)

    def add(self, *names: str) -> None:
        for each in names:
            self.handle(instance_up(each))

    def handle(self, event: ev.Event, at_s: float | None = None) -> list[act.Action]:
        """One event; the actions it led to."""
        self.now_s = self.now_s if at_s is None else at_s
        actions = self.policy.handle(event, self.now_s)
        self.actions += actions
        return actions

    def look_until(self, at_s: float) -> list[act.Action]:
        """Timers fire every 0.05 s until then; the actions they led to."""
        actions: list[act.Action] = []
        while self.now_s < at_s:
            actions += self.handle(ev.TimerFired(), min(at_s, self.now_s + 0.05))
        return actions

    def decoding(self, name: str, prompt_tokens: int = 100, *, resumed: bool = True) -> act.Start:
        """A stream that has arrived, was prefilled, and (if resumed) has brought its first
        token.
        """
        start = only(self.handle(ev.StreamArrived(StreamId(name), prompt_tokens)), act.Start)
        self.handle(ev.PrefillDone(StreamId(name), 1, prompt_tokens))
        if resumed:
            self.handle(ev.StreamResumed(StreamId(name), 1))
        return start

    def agents(
        self,
        *nodes: str,
        epoch: int = 1,
        capacity_bytes: int = 1 << 30,
        host_to_device_bytes_per_s: float = 26e9,
    ) -> None:
        """The agents of these nodes come up: `agent-n0` on `n0`."""
        for node in nodes:
            agent = InstanceId(f"agent-{node}")
            self.handle(
                ev.HolderUp(agent, NodeId(node), epoch, capacity_bytes, host_to_device_bytes_per_s)
            )

    def kept(self, agent: str, epoch: int = 1, **pages: int) -> list[act.Action]:
        """The agent reports how many leading pages it has of some streams."""
        return self.handle(
            ev.CheckpointsReported(
                InstanceId(agent), epoch, 0, len(pages), {StreamId(s): n for s, n in pages.items()}
            )
        )

    def lose(
        self, name: str, epoch: int = 1, at_s: float | None = None, **produced: int
    ) -> list[act.Action]:
        """The instance is lost; `produced` are the tokens that clients had by then."""
        return self.handle(
            ev.InstanceLost(
                InstanceId(name), epoch, "killed", {StreamId(s): n for s, n in produced.items()}
            ),
            at_s,
        )


def of(actions: list[act.Action], kind: type[ActionT]) -> list[ActionT]:
    return [action for action in actions if isinstance(action, kind)]


def only(actions: list[act.Action], kind: type[ActionT]) -> ActionT:
    found = of(actions, kind)
    assert len(found) == 1, actions
    return found[0]
