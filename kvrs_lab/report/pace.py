"""Says whether a machine kept the pace of the profile that its instances imitate."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

_KEPT = 1.15  # A larger factor is more than the jitter of steps.


def pace_of(profile: str, decodes: Sequence[float], prompts: Sequence[float]) -> dict[str, Any]:
    """Return the median factors from the profile's times to those of steps without and with
    prompts, and the largest one of steps without; None: not reported.
    """
    return {
        "profile": profile,
        "decodes": round(median(decodes), 3) if decodes else None,
        "decodes_max": round(max(decodes), 3) if decodes else None,
        "prompts": round(median(prompts), 3) if prompts else None,
    }


def pace_sentence(machine: Mapping[str, Any]) -> str | None:
    """A sentence on the pace; None: it is not known."""
    found = machine.get("pace")
    if found is None or found["decodes"] is None:
        return None
    prompts = "" if found["prompts"] is None else f", those with prompts {found['prompts']:.2f}"
    took = (
        f"took {found['decodes']:.2f} times the profile's (at most {found['decodes_max']:.2f})"
        f"{prompts}"
    )
    if max(found["decodes"], found["prompts"] or 0.0) <= _KEPT:
        return f"This machine kept the pace of {found['profile']}: steps {took}."
    return (
        f"This machine did not keep the pace of {found['profile']}: steps {took}. Predictions are "
        f"of the profile, except where instances have reported their steps."
    )
