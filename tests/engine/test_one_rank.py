"""An instance of one process runs no code of ranks, but for what every engine has of them."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

from kvrs_engine.engine import ranks
from tests.engine.serving import serving

pytestmark = [pytest.mark.engine, pytest.mark.network]

FOLDER = Path(ranks.__file__).parent
WITHOUT_RANKS = {"__init__.py", "cells.py", "settings.py"}


@contextmanager
def called_files() -> Iterator[set[Path]]:
    """The files of ranks of which functions are called, by this thread and by new ones."""
    files: set[Path] = set()

    def note(frame: FrameType, what: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if what == "call" and path.parent == FOLDER:
            files.add(path)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield files
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


async def test_an_instance_of_one_process_calls_no_code_of_ranks(tiny_model: Path) -> None:
    with called_files() as files:
        async with serving(tiny_model) as (_, client):
            request = {"prompt": list(range(2, 50)), "max_tokens": 9, "temperature": 0}
            async with client.post("/v1/completions", json=request) as response:
                assert response.status == 200
                await response.read()
            for path in ("/kvrs/v1/load", "/kvrs/v1/instance", "/metrics"):
                async with client.get(path) as response:
                    await response.read()

    assert {path.name for path in files} <= WITHOUT_RANKS
    assert files  # The settings are looked at.
