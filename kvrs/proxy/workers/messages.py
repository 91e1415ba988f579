"""What a supervisor and its workers tell each other."""

from typing import Any

import msgspec

from kvrs.protocol.mirror import FleetOrder
from kvrs.proxy.workers.loads import Booked

# Names of messages. From the supervisor:
PLAN = "plan"  # The first one.
STATE = "state"
METRICS = "metrics"
RELOAD = "reload"
PING = "ping"
ORDER = "order"  # A `DrainOrder`.
RANK = "rank"  # A `RankOrder`, to one of the workers.
EXITED = "exited"  # An `Exited`.
FLEET = "fleet"  # A `FleetChange`.
DRAIN = "drain"  # The whole proxy drains; a second time: at once.
# From a worker:
READY = "ready"
HEARD = "heard"  # All `FleetOrder` that it knows, after one from another proxy.
# From a worker what it has sent to instances, from the supervisor what the others have.
BOOKED = "booked"
# To be granted by the supervisor (`limits.py`):
TAKE = "take"
GIVE = "give"
GUESS = "guess"
TURN = "turn"
TURN_OVER = "turn_over"


class WorkerPlan(msgspec.Struct):
    """All that a worker needs to start beside the file, and the environment, which it inherits."""

    worker: int
    path: str  # Of the configuration.
    no_env: bool  # The environment overrides no setting.
    names: list[str]  # Ids of all workers.
    port: int  # The bound one of clients.
    peer_ports: list[int]  # Of all workers.
    orders: list[FleetOrder] = []  # Over the file's nodes.


class Sample(msgspec.Struct, array_like=True):
    name: str
    labels: dict[str, str]
    value: float


class Family(msgspec.Struct, array_like=True):
    """All samples of one metric."""

    name: str
    type: str
    help: str
    samples: list[Sample]


class Reloaded(msgspec.Struct):
    """What came of a reload; with faults nothing has changed."""

    applied: list[str] = []
    restart_needed: list[str] = []
    faults: list[str] = []


def packed(
    message: msgspec.Struct | list[Family] | list[FleetOrder] | dict[str, Booked],
) -> bytes:
    return msgspec.msgpack.encode(message)


def unpacked(body: bytes, kind: Any) -> Any:
    return msgspec.msgpack.decode(body, type=kind)
