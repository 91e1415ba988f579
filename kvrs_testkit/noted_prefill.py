"""Prefill tables that are noted beside a model in advance: on a machine that runs tests each start
of an instance would measure its own, since none of them is undisturbed.
"""

from pathlib import Path

from kvrs.config.cluster import EngineSettings
from kvrs_engine.engine import warm_up
from kvrs_engine.engine.worker import Worker


def note_prefill(model: Path) -> None:
    """Note the table of instances with the usual settings."""
    before, warm_up._UNDISTURBED = warm_up._UNDISTURBED, float("inf")
    try:
        settings = EngineSettings()
        warm_up.prefill_table(Worker(model, settings), settings.max_model_len, model)
    finally:
        warm_up._UNDISTURBED = before
