"""The decode instance that gets a hand-off, once prefill is done (DESIGN section 4).

The own decode instance's queue is weighed against a transfer to another one and the queue there.
The crossover of seed KVRS follows: with more than `q* = (KV bytes / bandwidth) / service time`
requests in the own queue, an idle remote instance is sooner.
"""

from collections.abc import Sequence

import msgspec

from kvrs.config.policy import Handoff
from kvrs.ids import InstanceId


class HandoffCandidate(msgspec.Struct, frozen=True):
    """A decode instance that could take the hand-off."""

    instance: InstanceId
    queue_s: float
    bytes_per_s: float  # From the prefill instance.
    bytes_ahead: int = 0  # On that link already.
    is_near: bool = False  # On the prefill instance's own node.


def choose(
    how: Handoff,
    planned: HandoffCandidate,
    others: Sequence[HandoffCandidate],
    kv_bytes: int,
    handshake_s: float,
) -> HandoffCandidate:
    """The candidate at which the stream goes on soonest; a tie goes to the planned one."""
    if how is Handoff.OWN_PAIR or not others:
        return planned
    return min((planned, *others), key=lambda each: hand_off_s(how, each, kv_bytes, handshake_s))


def hand_off_s(
    how: Handoff, candidate: HandoffCandidate, kv_bytes: int, handshake_s: float
) -> float:
    """Seconds until the stream goes on there: by seed KVRS (`rom`), or by all terms."""
    if how is Handoff.ROM:
        # The link of the own pair is taken to cost nothing: NVLink in seed KVRS.
        is_free = candidate.is_near
        return candidate.queue_s + (0.0 if is_free else kv_bytes / candidate.bytes_per_s)
    # Transfers ahead on the link drain while the stream queues.
    wait_s = max(candidate.queue_s, candidate.bytes_ahead / candidate.bytes_per_s)
    return wait_s + handshake_s + kv_bytes / candidate.bytes_per_s
