"""Limits of a server's stages before it measures them. Ray does not run."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from distserve_patches.jobs import Stage
from kvrs.errors import ConfigError
from kvrs_engine.scheduling.pages import PageManager


@pytest.mark.parametrize(("pages", "longest"), [(4, 16), (10, 40)])
def test_no_request_is_longer_than_a_stage(distserve: Path, pages: int, longest: int) -> None:
    """Whatever the model could take."""
    assert limited(pages) == longest


def test_stages_too_small_to_be_measured_are_refused(distserve: Path) -> None:
    """Requests of the measurement would wait for ever."""
    with pytest.raises(ConfigError, match="hold requests of 12 tokens; allowed: at least 16"):
        limited(3)


def limited(pages: int) -> int:
    from distserve_patches.server import Server

    server = object.__new__(Server)
    server._engine = SimpleNamespace(stage=lambda _: SimpleNamespace(pages=PageManager(pages, 4)))  # type: ignore[assignment]
    instances = {stage: SimpleNamespace(max_model_len=100) for stage in Stage}
    server.instances = instances  # type: ignore[assignment]
    server._limit_lengths()
    return int(instances[Stage.CONTEXT].max_model_len)
