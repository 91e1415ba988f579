"""Profiles with other times, for operating points that are fitted to published figures."""

from pathlib import Path
from typing import Any

import msgspec

from kvrs.profiles import catalog


def slowed(
    label: str,
    directory: Path,
    *,
    prefill: float = 1.0,
    decode: float = 1.0,
    step_s: float = 0.0,
    weight_bytes: int | None = None,
) -> str:
    """Write the file of a profile whose prefill and decode steps take so many times as long, and
    each step a fixed time more. `weight_bytes`: it is that of a model of another size.
    """
    profile: dict[str, Any] = msgspec.to_builtins(catalog.profile(label))
    times = profile["prefill"]
    times["seconds"] = {at: prefill * each for at, each in times["seconds"].items()}
    times["cached"]["seconds_per_token_pair"] *= prefill
    for name in ("small_ms", "large_ms"):
        profile["decode"][name] = [decode * each for each in profile["decode"][name]]
    profile["engine_step_s"] += step_s
    if weight_bytes is not None:
        profile["load"]["weight_bytes"] = weight_bytes
    path = directory / f"{label}-{prefill:g}-{decode:g}-{step_s:g}.json"
    path.write_bytes(msgspec.json.encode(profile))
    return str(path)
