"""Self-tests of instances, and what the tests of one process have seen."""

from dataclasses import dataclass, field
from typing import assert_never

import msgspec

from kvrs.core.fleet.generated import Generated
from kvrs.core.model.events import StoreSeen
from kvrs.ids import InstanceId
from kvrs.protocol.instance import InstanceInfo


@dataclass(frozen=True, slots=True, eq=False)
class TokensTest:
    """A stream of known tokens at the instance, whole and cut."""

    instance: InstanceId


@dataclass(frozen=True, slots=True, eq=False)
class TransferTest:
    """KV from `holder` to `target`, by the way of a recovery."""

    holder: InstanceId
    target: InstanceId


@dataclass(frozen=True, slots=True, eq=False)
class RestoreTest:
    """KV of `holder` that the agent of its node serves, or a store has, loaded by `target`."""

    holder: InstanceId
    target: InstanceId
    in_store: bool = False


SelfTest = TokensTest | TransferTest | RestoreTest


class Seen(msgspec.Struct, frozen=True):
    moves_kv: bool = False
    generated: Generated | None = None
    # From agents or its store; None: not tested apart, it is as `moves_kv`.
    restores: bool | None = None
    store: StoreSeen | None = None

    @property
    def tokens(self) -> str:
        return "" if self.generated is None else self.generated.name


@dataclass(slots=True, eq=False)
class TestedProcess:
    """One process of one instance."""

    info: InstanceInfo
    generated: Generated | None = None
    # None: not tested, or not seen to move with any other instance that was not seen either.
    moves_kv: bool | None = None
    partners: set[InstanceId] = field(default_factory=set)  # With which no KV was seen to move.
    former: Seen | None = None  # Of the process before it.
    is_busy: bool = False
    restores: bool | None = None  # None: not tested.
    restore_fault: str = ""
    # Failures of its tests of rows or its store, and when the next one is due.
    restore_failures: int = 0
    restore_at_s: float = 0.0
    ends_in_tests: bool = False  # Of its rows or its store: none is made any more.
    put_offs: int = 0  # In a row, of tests that showed nothing.
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
    """The instances that are tested."""
    match test:
        case TokensTest():
            return (test.instance,)
        case TransferTest() | RestoreTest():
            return (test.holder, test.target)
        case _:
            assert_never(test)
