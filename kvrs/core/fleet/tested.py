"""Self-tests of instances, and the results of one process."""

from dataclasses import dataclass, field
from typing import assert_never

import msgspec

from kvrs.core.fleet.generated import Generated
from kvrs.core.model.events import StoreSeen
from kvrs.ids import InstanceId
from kvrs.protocol.instance import InstanceInfo


@dataclass(frozen=True, slots=True, eq=False)
class TokensTest:
    """A stream of known tokens at the instance, uncut and cut."""

    instance: InstanceId


@dataclass(frozen=True, slots=True, eq=False)
class TransferTest:
    """A transfer of KV from `holder` to `target`, as in a recovery."""

    holder: InstanceId
    target: InstanceId


@dataclass(frozen=True, slots=True, eq=False)
class RestoreTest:
    """A load by `target` of the holder's KV from the agent of its node, or from a store."""

    holder: InstanceId
    target: InstanceId
    in_store: bool = False


SelfTest = TokensTest | TransferTest | RestoreTest


class Seen(msgspec.Struct, frozen=True):
    moves_kv: bool = False
    generated: Generated | None = None
    # KV from agents or a store restores; None: not tested separately, same as `moves_kv`.
    restores: bool | None = None
    store: StoreSeen | None = None

    @property
    def tokens(self) -> str:
        return "" if self.generated is None else self.generated.name


@dataclass(slots=True, eq=False)
class TestedProcess:
    """A process of an instance, and the results of its tests."""

    info: InstanceInfo
    generated: Generated | None = None
    # None: not tested, or no KV moved in tests with other instances of unknown ability.
    moves_kv: bool | None = None
    # Instances with which no KV moved in a test.
    partners: set[InstanceId] = field(default_factory=set)
    former: Seen | None = None  # Results of the process before.
    is_busy: bool = False
    restores: bool | None = None  # None: not tested.
    restore_fault: str = ""
    # Failed tests of rows or of the store, and the time of the next test.
    restore_failures: int = 0
    restore_at_s: float = 0.0
    # The instance dies in tests of rows or of its store, so no more are made.
    ends_in_tests: bool = False
    put_offs: int = 0  # Consecutive tests that showed nothing.
    failures: int = 0
    retry_at_s: float = 0.0
    cause: str = ""

    @property
    def seen(self) -> Seen:
        former = self.former or Seen()
        return Seen(
            former.moves_kv if self.moves_kv is None else self.moves_kv,
            self.generated or former.generated,
            former.restores if self.restores is None else self.restores,
        )


def names_of(test: SelfTest) -> tuple[InstanceId, ...]:
    """Instances that take part in a test."""
    match test:
        case TokensTest():
            return (test.instance,)
        case TransferTest() | RestoreTest():
            return (test.holder, test.target)
        case _:
            assert_never(test)
