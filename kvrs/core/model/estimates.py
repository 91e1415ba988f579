"""The recovery options by name, and the predicted cost of one option for one victim and target."""

from enum import StrEnum

import msgspec

from kvrs.ids import InstanceId

# Time to connect, authenticate and ask before the first page moves.
HANDSHAKE_S = 0.002
# Shorter costs count as this long: they show the clock and polling more than the recovery.
SHORTEST_S = 0.001


def real_over_predicted(predicted_s: float, real_s: float) -> float:
    """Return the factor from a predicted cost to the real one."""
    return max(real_s, SHORTEST_S) / max(predicted_s, SHORTEST_S)


class Option(StrEnum):
    START = "start"  # The start of a stream without KV and tokens; not a recovery.
    IN_PLACE = "in_place"  # The same attempt goes on at its instance, which re-forms.
    SUBSTITUTE = "substitute"  # In place, with the lost stage computed by another instance's host.
    MIGRATE = "migrate"  # KV comes from an instance that retains or caches it.
    RESTORE = "restore"  # KV comes from an agent: a checkpoint in host memory, or an engine's rows.
    REUSE = "reuse"  # The target itself has KV of the front of the history.
    SPLIT = "split"  # The target computes the front while it fetches the rest.
    RECOMPUTE = "recompute"
    REPLAY = "replay"  # The request begins again, and its known output is generated once more.
    ABORT = "abort"

    @property
    def is_same_output(self) -> bool:
        """True if the engine keeps or regenerates all state on which the next token depends, not
        only the tokens before it.
        """
        return self.stays or self is Option.REPLAY

    @property
    def stays(self) -> bool:
        """True if the attempt is not ended and goes on at its instance, which re-forms."""
        return self in (Option.IN_PLACE, Option.SUBSTITUTE)


class Estimate(msgspec.Struct, frozen=True, gc=False):
    """The predicted cost of one option for one victim and target; the policy compares `total_s`.

    A msgspec struct takes a tenth of the time of a frozen dataclass to create.
    """

    option: Option
    target: InstanceId
    # The sum of the parts below, for a split less than the sum, for a replay more.
    total_s: float
    queue_s: float = 0.0
    transfer_s: float = 0.0
    compute_s: float = 0.0
    extrapolated: bool = False  # True: a table was used outside its measured range.
    # Time for which other victims at the target wait because of this one: the target's part of
    # `compute_s` without step overheads, or in place, this stream's restore.
    at_target_s: float = 0.0
    # The instance or agent that sends pages, or the prefill instance; None: the target itself.
    source: InstanceId | None = None
    # The second source, which has more of the history than the first, or than the target itself.
    second: InstanceId | None = None
    first_page: int = 0  # First page of the fetch; the target computes earlier pages meanwhile.
    # Migrate: the source completes its cached prefix and hands the whole history off.
    by_prefill: bool = False
    # Extra time of the tokens after the next one, compared with an instance that has all its ranks.
    lookahead_s: float = 0.0
    # Start: prompt tokens that the prefilling instance is presumed to have cached.
    cached_tokens: int = 0
    # The rest of the target's running step, and what the step that brings the token takes longer
    # than the computing in it, as streams decode there.
    step_s: float = 0.0

    # Streams at the target that wait for its computing: those without a token since they came, and
    # for a split, whose front need not be computed there, all.
    waiting: int = 0

    @property
    def next_token_s(self) -> float:
        """Predicted time until the next token reaches the client."""
        return self.total_s - self.lookahead_s

    @property
    def work_s(self) -> float:
        """Predicted time until the next token without the queue at the instance."""
        return max(0.0, self.next_token_s - self.queue_s)

    def wait_of_others_s(self, others: float) -> float:
        """Return the total time that other streams at the target wait for this one: `others`, the
        event's other victims there, or for a single victim, those that wait already.
        """
        return (others or self.waiting) * self.at_target_s
