"""Goals of `kvrs lab tune`; imports nothing, for the command line."""

from enum import StrEnum


class Goal(StrEnum):
    RECOVERY_P99 = "recovery_p99"  # Seconds until a recovered stream has its next token: least.
    GOODPUT = "goodput"  # Requests within the SLO, per second: most.

    @property
    def sign(self) -> float:
        """Factor by which a value of the goal becomes a cost."""
        return 1.0 if self is Goal.RECOVERY_P99 else -1.0

    @property
    def unit(self) -> str:
        return " s" if self is Goal.RECOVERY_P99 else "/s"
