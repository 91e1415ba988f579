"""An attempt without an engine, for readers of answers."""

from collections.abc import Callable
from dataclasses import dataclass, field

from kvrs.core.fleet.silence import Delivered, SilenceTimer


@dataclass
class AnsweredAttempt:
    """Counts what the reader of its answer reports."""

    number: int = 1
    now_s: Callable[[], float] = float
    delivered: Delivered = field(default_factory=Delivered)
    silence: SilenceTimer = field(default_factory=lambda: SilenceTimer(0.0))
    told: list[str] = field(default_factory=list)

    def resumed(self) -> None:
        self.told.append("resumed")

    def completed(self) -> None:
        self.told.append("completed")
