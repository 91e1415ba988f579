"""What each way of recovery is predicted to cost, in seconds (DESIGN section 5, seed KVRS `ROM_DECIDE`).

Plain functions of plain numbers: the recovery policy calls them with its books, `kvrs explain` with what it is told.
Each takes the same few operations whatever the length of the history.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

from kvrs.ids import InstanceId, NodeId
from kvrs.policy.config import PolicyName
from kvrs.profiles.tables import PrefillTable
from kvrs.protocol.geometry import KvGeometry
from kvrs.protocol.instance import Capability, Role


class Option(StrEnum):
    START = "start"  # Not a recovery: a new stream, or one that had no KV and no token yet.
    MIGRATE = "migrate"
    RECOMPUTE = "recompute"
    ABORT = "abort"


# Until Python 3.12 a look-up of an enum's member costs as much as the rest of a line; decisions are made of such lines.
_MIGRATE, _RECOMPUTE = Option.MIGRATE, Option.RECOMPUTE


@dataclass(frozen=True, slots=True)
class Instance:
    """What the policy knows of an instance that is up."""

    id: InstanceId
    node: NodeId
    role: Role
    epoch: int
    geometry: KvGeometry
    prefill: PrefillTable
    capabilities: frozenset[Capability]


@dataclass(frozen=True, slots=True)
class Estimate:
    """One option for one victim and target; `total_s` is what options are compared by."""

    option: Option
    target: InstanceId
    total_s: float
    queue_s: float = 0.0
    transfer_s: float = 0.0
    compute_s: float = 0.0
    extrapolated: bool = False  # A table was asked outside its measured range.


def estimate_migrate(
    target: Instance,
    *,
    history_tokens: int,
    pages: int,
    bytes_per_s: float,
    bytes_ahead: int = 0,
    slot_wait_s: float = 0.0,
    queue_s: float = 0.0,
    handshake_s: float = 0.0,
) -> Estimate:
    """Fetch the first `pages` pages of the history and compute the rest at the target.

    `bytes_ahead` are on the same link already. They drain while a slot is waited for, so the longer of the two counts.
    """
    geometry = target.geometry
    prefix = pages * geometry.page_size_tokens
    transfer_s = handshake_s + prefix * (geometry.bytes_per_token / bytes_per_s)
    compute_s = target.prefill.extra(prefix, history_tokens - prefix)
    drain_s = bytes_ahead / bytes_per_s
    queue_s += slot_wait_s if slot_wait_s > drain_s else drain_s
    total_s = queue_s + transfer_s + compute_s
    extrapolated = not target.prefill.covers_extra(prefix, history_tokens - prefix)
    return Estimate(_MIGRATE, target.id, total_s, queue_s, transfer_s, compute_s, extrapolated)


def estimate_recompute(
    prefill: Instance,
    target: Instance,
    *,
    history_tokens: int,
    bytes_per_s: float,
    queue_s: float = 0.0,
    handshake_s: float = 0.0,
) -> Estimate:
    """Compute the whole history at `prefill`, then hand it off to the target, unless they are the same instance."""
    compute_s = prefill.prefill.seconds_for(history_tokens)
    transfer_s = 0.0
    if prefill.id != target.id:
        transfer_s = handshake_s + history_tokens * (prefill.geometry.bytes_per_token / bytes_per_s)
    total_s = queue_s + compute_s + transfer_s
    return Estimate(_RECOMPUTE, target.id, total_s, queue_s, transfer_s, compute_s, not prefill.prefill.covers(history_tokens))


def rom_migrate(target: Instance, *, prompt_tokens: int, bytes_per_s: float) -> Estimate:
    """Seed KVRS `MIGRATE_COST`: KV bytes of the prompt over the bandwidth, in bytes and bytes per second."""
    transfer_s = prompt_tokens * (target.geometry.bytes_per_token / bytes_per_s)
    return Estimate(_MIGRATE, target.id, transfer_s, transfer_s=transfer_s)


def rom_recompute(prefill: Instance, target: Instance, *, prompt_tokens: int) -> Estimate:
    """Seed KVRS `RECOMPUTE_COST`: the prefill table at the length of the prompt."""
    compute_s = prefill.prefill.seconds_for(prompt_tokens)
    extrapolated = not prefill.prefill.covers(prompt_tokens)
    return Estimate(_RECOMPUTE, target.id, compute_s, compute_s=compute_s, extrapolated=extrapolated)


def decide(name: PolicyName, estimates: Sequence[Estimate], budget_s: float | None = None) -> Estimate:
    """The policy's choice among at least one estimate.

    With a budget that no estimate meets, the answer is `Option.ABORT`, with what the fastest option would have cost.
    """
    cheapest = _cheapest(estimates)
    if budget_s is not None and cheapest.total_s > budget_s:
        return Estimate(Option.ABORT, cheapest.target, cheapest.total_s)
    match name:
        case PolicyName.AUTO | PolicyName.ROM:
            return cheapest
        case PolicyName.ALWAYS_MIGRATE:
            return _cheapest_by(_MIGRATE, estimates) or cheapest
        case PolicyName.ALWAYS_RECOMPUTE:
            return _cheapest_by(_RECOMPUTE, estimates) or cheapest
        case _:
            assert_never(name)


def _cheapest(estimates: Sequence[Estimate]) -> Estimate:
    best = estimates[0]
    for estimate in estimates:
        # A tie goes to migrate, as in the seed: it leaves the prefill instances to new requests.
        if estimate.total_s < best.total_s or (
            estimate.total_s == best.total_s and estimate.option is _MIGRATE and best.option is not _MIGRATE
        ):
            best = estimate
    return best


def _cheapest_by(option: Option, estimates: Sequence[Estimate]) -> Estimate | None:
    wanted = [estimate for estimate in estimates if estimate.option is option]
    return _cheapest(wanted) if wanted else None
