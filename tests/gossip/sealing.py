"""Two ends that have heard each other, for the tests of sealing and of its transport."""

from kvrs.gossip.seal import Keyring, Opened, Seal, Unproven
from kvrs.ids import NodeId

OLD_SECRET = b"the secret of yesterday"
NEW_SECRET = b"the secret of tomorrow!"
A, B, C = NodeId("n0"), NodeId("n1"), NodeId("n2")


def seal_of(node: NodeId, epoch: int = 1, run: int | None = None, secrets: tuple[bytes, ...] = (OLD_SECRET,)) -> Seal:
    """`run` differs by node and epoch when it is not given."""
    number = run if run is not None else hash((node, epoch)) & 0xFFFF_FFFF | 1
    return Seal("test", node, epoch, number.to_bytes(8, "big"), Keyring(secrets))


def acquaint(one: Seal, one_node: NodeId, other: Seal, other_node: NodeId) -> None:
    """Afterwards each knows what to echo to the other."""
    assert other.open(one.seal(other_node, b"")) == Unproven(one_node)
    assert one.open(other.seal(one_node, b"")) == Opened(other_node, b"")
    assert other.open(one.seal(other_node, b"")) == Opened(one_node, b"")


def pair() -> tuple[Seal, Seal]:
    """A's and B's."""
    a, b = seal_of(A), seal_of(B)
    acquaint(a, A, b, B)
    return a, b
