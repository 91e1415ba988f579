"""The policy as experiments ask it about one lost stream after the other."""

from experiments.link_monitor.decider import PRODUCED_TOKENS, Decider
from kvrs.config.policy import PolicyName
from kvrs.core.model import actions as act
from kvrs.core.model.estimates import Option
from kvrs.ids import InstanceId, NodeId
from kvrs.profiles.tables import PrefillTable
from kvrs.protocol.geometry import KvGeometry
from kvrs.protocol.instance import InstanceInfo, Role, assumed_instance

TOKENS, BYTES_PER_S = 1024, 1e7
TABLE = PrefillTable("one", "test", 64, [0.06 + 0.2 * step for step in range(40)])


def instance(name: str, node: str, role: Role) -> InstanceInfo:
    geometry = KvGeometry(12, 12, 64, 4, 16)
    return assumed_instance(InstanceId(name), NodeId(node), role, geometry)


def test_a_loss_is_decided_alike_after_others() -> None:
    """No instance is another for it: the first prefills took the time of the table."""
    roles = [("p0", "n0", Role.PREFILL), ("p1", "n1", Role.PREFILL), ("d1", "n1", Role.DECODE)]
    decider = Decider(PolicyName.AUTO, [instance(*each) for each in roles], TABLE)
    found: list[tuple[Option, tuple[act.PageRange, ...]]] = []

    for _ in range(20):
        plan, option, stream = decider.lose(TOKENS, BYTES_PER_S)
        found.append((option, plan.runs))
        decider.carried_out(stream, plan, TOKENS + PRODUCED_TOKENS, 3.0)

    assert set(found) == {found[0]}
    assert found[0][0] is Option.SPLIT
