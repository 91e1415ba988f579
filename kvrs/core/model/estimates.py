"""The recovery options by name, and the predicted cost of one option for one victim and target."""

from enum import StrEnum

import msgspec

from kvrs.ids import InstanceId

# Time to connect, authenticate and ask before the first page moves.
HANDSHAKE_S = 0.002


class Option(StrEnum):
    START = "start"  # Not a recovery: a new stream, or one that had no KV and no token yet.
    IN_PLACE = "in_place"  # The same attempt goes on at its instance, which re-forms.
    SUBSTITUTE = "substitute"  # So, and another instance's host computes the stage that was lost.
    MIGRATE = "migrate"  # From an instance that retains the KV, or has it in its prefix cache.
    RESTORE = "restore"  # From a checkpoint in an agent's host memory, or rows that it serves.
    REUSE = "reuse"  # The target has it.
    SPLIT = "split"  # The front is computed while the back is fetched.
    RECOMPUTE = "recompute"
    REPLAY = "replay"  # The request begins again, and its known output is generated once more.
    ABORT = "abort"

    @property
    def is_same_output(self) -> bool:
        """The engine has all that the next token depends on beside the tokens before it: nothing of
        that was lost, or it makes that again.
        """
        return self.stays or self is Option.REPLAY

    @property
    def stays(self) -> bool:
        """The attempt is not ended: its instance re-forms, and goes on with it."""
        return self in (Option.IN_PLACE, Option.SUBSTITUTE)


class Estimate(msgspec.Struct, frozen=True, gc=False):
    """One option for one victim and target; `total_s` is what options are compared by.

    A struct, because one is made in a tenth of the time that a frozen dataclass takes, and
    decisions make many.
    """

    option: Option
    target: InstanceId
    # Corrected by the real costs of recoveries of this kind, and with the look-ahead.
    total_s: float
    queue_s: float = 0.0
    transfer_s: float = 0.0
    compute_s: float = 0.0
    extrapolated: bool = False  # A table was used outside its measured range.
    # By the tables: of a split less than the sum of its parts, of any other option their sum.
    raw_s: float = 0.0
    # The part of `compute_s` that the target computes, without the overhead of steps: victims that
    # come to it together share its steps, and each waits for what is computed for the others. In
    # place, what is restored of the stream before those behind it.
    at_target_s: float = 0.0
    # The instance or agent that is fetched from, or the prefill instance that computes; None: the
    # target itself.
    source: InstanceId | None = None
    # It has more of the history than the source, or than the target that reuses.
    second: InstanceId | None = None
    first_page: int = 0  # What is fetched begins here; what is before it is computed meanwhile.
    # Migrate: the source computes what its prefix cache lacks of the history, and hands all of it
    # off.
    by_prefill: bool = False
    # Extra time of the tokens after the next one, compared with an instance that has all its ranks.
    lookahead_s: float = 0.0
    # Start: tokens of the prompt that the instance which computes it is taken to have cached.
    cached_tokens: int = 0

    @property
    def next_token_s(self) -> float:
        """The prediction alone: until the next token reaches the client."""
        return self.total_s - self.lookahead_s

    @property
    def work_s(self) -> float:
        """The prediction without what is queued at the instance."""
        return max(0.0, self.next_token_s - self.queue_s)

    def wait_of_others_s(self, others: float) -> float:
        """Total time that so many other victims wait for it, at the same target."""
        return others * self.at_target_s
