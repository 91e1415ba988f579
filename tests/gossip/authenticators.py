"""Two authenticators that have each other's run, for the tests of authentication and transport."""

from kvrs.gossip.authenticator import Keyring, Opened, PacketAuthenticator, Unproven
from kvrs.ids import NodeId

OLD_SECRET = b"the secret of yesterday"
NEW_SECRET = b"the secret of tomorrow!"
A, B, C = NodeId("n0"), NodeId("n1"), NodeId("n2")


def seal_of(
    node: NodeId, epoch: int = 1, run: int | None = None, secrets: tuple[bytes, ...] = (OLD_SECRET,)
) -> PacketAuthenticator:
    """An authenticator; `run` is derived from node and epoch when it is not given."""
    number = run if run is not None else hash((node, epoch)) & 0xFFFF_FFFF | 1
    return PacketAuthenticator(node, epoch, number.to_bytes(8, "big"), Keyring(secrets))


def acquaint(
    one: PacketAuthenticator, one_node: NodeId, other: PacketAuthenticator, other_node: NodeId
) -> None:
    """Exchange packets until each has the other's run to echo."""
    assert other.open(one.seal(other_node, b"")) == Unproven(one_node)
    assert one.open(other.seal(one_node, b"")) == Opened(other_node, b"")
    assert other.open(one.seal(other_node, b"")) == Opened(one_node, b"")


def pair() -> tuple[PacketAuthenticator, PacketAuthenticator]:
    """Authenticators of A and B."""
    a, b = seal_of(A), seal_of(B)
    acquaint(a, A, b, B)
    return a, b
