"""Self-tests of instances, and what they have seen.

Judgement of engines by what they do with the KV pages of a request that is aborted while its KV
moves.

SGLang's prefill writes into pages of decode. From 0.5.23 on decode keeps the pages of an aborted
request until prefill has stopped, at most 30 s, unless the environment says otherwise; earlier
versions give them to others at once. vLLM's decode reads, and keeps the pages until the read is
over; before 0.32 not until the last of several reads, which prefill and decode of unequal tensor
parallelism have.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b

import msgspec

from kvrs.config.cluster import Backend
from kvrs.core.model.events import StoreSeen
from kvrs.core.model.member import GOES_ON_NOWHERE
from kvrs.ids import InstanceId
from kvrs.protocol.rows import SGLANG_VARIABLE

# First versions that keep the pages by default.
_SGLANG_SINCE = (0, 5, 23)
_VLLM_SINCE = (0, 32, 0)
_VERSION = re.compile(r"(\d{1,6})\.(\d{1,6})(?:\.(\d{1,6}))?")


class AbortedTransfers(msgspec.Struct, frozen=True):
    """`are_held`: pages of aborted transfers are kept until nothing writes them; None: not known.
    `cause`: why they are not, or may not be.
    """

    are_held: bool | None
    cause: str = ""


def aborted_transfers(
    engine: Backend, version: str | None, *, shown: bool | None, ranks: Collection[int | None]
) -> AbortedTransfers | None:
    """Judge an instance to or from which KV moves; None: an engine of which nothing is known to be
    wrong. `shown`: what kvrs's plug-in sees in the process, None if it is not there. `ranks`:
    tensor-parallel ranks of each instance, None where they are not known.
    """
    if engine not in (Backend.SGLANG, Backend.VLLM):
        return None
    since = _SGLANG_SINCE if engine is Backend.SGLANG else _VLLM_SINCE
    wanted = ".".join(map(str, since))
    if shown is not None:
        cause = f"{SGLANG_VARIABLE} is off in its environment"
        return AbortedTransfers(shown, "" if shown else cause)
    found = _VERSION.match(version or "")
    if found is None:
        cause = f"its version is {version or 'not known'}; needed: {wanted} or later"
        return AbortedTransfers(None, cause)
    if tuple(int(part or 0) for part in found.groups()) >= since:
        return AbortedTransfers(True)
    cause = f"its version is {version}; needed: {wanted} or later"
    if engine is Backend.SGLANG:
        return AbortedTransfers(False, cause)
    if None in ranks:
        return AbortedTransfers(None, f"{cause}, or equal tensor parallelism, which is not known")
    if len(set(ranks)) > 1:
        return AbortedTransfers(False, f"{cause}, or equal tensor parallelism at all instances")
    return AbortedTransfers(True)


# Largest difference of log probabilities at which rounding can exchange two tokens.
_NEAR_TIE = 0.5


class Continues(StrEnum):
    """Exactness with which an instance continues a history that was computed elsewhere."""

    SEEDED = "exact seeded"  # Equal to the uncut stream, also for sampled streams of one seed.
    GREEDY = "exact greedy"  # Equal to the uncut stream at temperature 0.
    TEXT = "text-stitched"  # Different tokens: only the text continues.
    NONE = "none"  # The instance does not continue the stream.

    def is_below(self, other: "Continues") -> bool:
        levels = list(Continues)
        return levels.index(self) > levels.index(other)


class Likeness(StrEnum):
    """Difference between the outputs of two instances for the known prompt."""

    ALIKE = "alike"
    NEAR = "near"  # Two tokens of similar likelihood change places: rounding differs.
    OTHER = "other"  # The outputs differ by other weights, or by a fault.


class Generated(msgspec.Struct, frozen=True):
    """Tokens that an instance computes from the known prompt, and how it continues after a cut."""

    greedy: tuple[int, ...]
    seeded: tuple[int, ...]
    continues: Continues
    # Log probabilities of the likeliest tokens at each position of `greedy`; empty: not available.
    likeliest: tuple[Mapping[int, float], ...] = ()
    model: str = ""  # Path of the model, as a stock engine reports it.

    @property
    def name(self) -> str:
        """Value of `Member.tokens`."""
        if self.continues not in (Continues.SEEDED, Continues.GREEDY):
            return GOES_ON_NOWHERE
        seeded = self._digest(self.seeded) if self.continues is Continues.SEEDED else ""
        return f"{self._digest(self.greedy)}:{seeded}"

    @property
    def generates(self) -> str:
        """Value of `Member.generates`."""
        return f"{self._digest(self.greedy)}:{self._digest(self.seeded)}"

    def _digest(self, ids: tuple[int, ...]) -> str:
        return blake2b(repr((self.model, ids)).encode(), digest_size=8).hexdigest()

    def likeness(self, other: "Generated") -> Likeness:
        """Compare two outputs; they are different if both instances give their first two differing
        tokens likelihoods far apart.
        """
        if self.model != other.model:
            return Likeness.OTHER
        for at, (mine, theirs) in enumerate(zip(self.greedy, other.greedy, strict=False)):
            if mine != theirs:
                is_far = _apart(self, at, theirs) and _apart(other, at, mine)
                return Likeness.OTHER if is_far else Likeness.NEAR
        return Likeness.ALIKE


def _apart(one: Generated, at: int, other_token: int) -> bool:
    """Return whether `other_token` is far less likely than the greedy token at position `at`. A
    token outside the likeliest is less likely than all of these.
    """
    if at >= len(one.likeliest) or not (likeliest := one.likeliest[at]):
        return True
    lowest = min(likeliest.values())
    gap = likeliest.get(one.greedy[at], 0.0) - likeliest.get(other_token, lowest)
    return abs(gap) > _NEAR_TIE


@dataclass(frozen=True, slots=True, eq=False)
class TokensTest:
    """A stream of known tokens at the instance, uncut and cut."""

    instance: InstanceId

    @property
    def names(self) -> tuple[InstanceId, ...]:
        return (self.instance,)


@dataclass(frozen=True, slots=True, eq=False)
class TransferTest:
    """A transfer of KV from `holder` to `target`, as in a recovery."""

    holder: InstanceId
    target: InstanceId

    @property
    def names(self) -> tuple[InstanceId, ...]:
        return self.holder, self.target


@dataclass(frozen=True, slots=True, eq=False)
class RestoreTest:
    """A load by `target` of the holder's KV from the agent of its node, or from a store."""

    holder: InstanceId
    target: InstanceId
    in_store: bool = False

    @property
    def names(self) -> tuple[InstanceId, ...]:
        return self.holder, self.target


SelfTest = TokensTest | TransferTest | RestoreTest


class Seen(msgspec.Struct, frozen=True):
    """Results of the tests of an instance."""

    moves_kv: bool = False
    generated: Generated | None = None
    # KV from agents or a store restores; None: not tested separately, same as `moves_kv`.
    restores: bool | None = None
    store: StoreSeen | None = None

    @property
    def tokens(self) -> str:
        return "" if self.generated is None else self.generated.name

    @property
    def generates(self) -> str:
        return "" if self.generated is None else self.generated.generates
