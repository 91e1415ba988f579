"""The worth of drafts that an instance makes for another one while it is started again (LUMEN,
section 4.4). Pure: seconds, tokens and rates.
"""

from collections.abc import Callable
from dataclasses import dataclass

StepS = Callable[[int], float]  # Seconds of a step by its rows.


def accepted_tokens(acceptance: float, depth: int) -> float:
    """Drafts that a step accepts of `depth`, each right with that probability and of no use behind
    a wrong one: a (1 - a^s) / (1 - a) (LUMEN, B.6).
    """
    if acceptance >= 1:
        return float(depth)
    return acceptance * (1 - acceptance**depth) / (1 - acceptance)


@dataclass(frozen=True, slots=True)
class ReloadTimes:
    """The states of a start, one after another."""

    loading_draft_s: float
    assist_s: float
    hotswap_s: float

    @property
    def full_service_s(self) -> float:
        return self.loading_draft_s + self.assist_s + self.hotswap_s

    @property
    def is_worth_it(self) -> bool:
        """The draft is there before the model would be."""
        return self.loading_draft_s < self.assist_s + self.hotswap_s


def reload_times(
    draft_bytes: float, model_bytes: float, disk_bytes_per_s: float, draft_s: float, model_s: float
) -> ReloadTimes:
    """The draft is read first, then the model while the draft works; `draft_s` and `model_s` are
    their ways into the GPU.
    """
    read_s = model_bytes / disk_bytes_per_s
    return ReloadTimes(
        draft_bytes / disk_bytes_per_s + draft_s, max(0.0, read_s - draft_s), model_s
    )


@dataclass(frozen=True, slots=True)
class Assistance:
    """One step of the instance that is helped."""

    step_s: float  # Without drafts.
    verified_step_s: float  # With `depth` drafts of each stream.
    draft_s: float  # In which the other one makes a draft of each.
    drafts: float  # Of a stream, that are there when a step begins.
    accepted_tokens: float  # Of a stream, in a step.

    @property
    def gain(self) -> float:
        """Tokens per second, by those without drafts."""
        return (1 + self.accepted_tokens) * self.step_s / self.verified_step_s


def assistance(
    step_s: StepS, draft_step_s: StepS, batch: int, acceptance: float, depth: int
) -> Assistance:
    """A step with `batch` streams. Drafting and verifying overlap: it finds the drafts that were
    made during the one before.
    """
    verified_s, draft_s = step_s(batch * (1 + depth)), draft_step_s(batch)
    drafts = min(float(depth), verified_s / draft_s)
    whole = int(drafts)
    least, most = (accepted_tokens(acceptance, count) for count in (whole, whole + 1))
    accepted = least + (drafts - whole) * (most - least)
    return Assistance(step_s(batch), verified_s, draft_s, drafts, accepted)
