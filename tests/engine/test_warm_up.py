"""The prefill table of an instance: measured once on a machine, then remembered."""

from collections.abc import Callable
from pathlib import Path

import pytest

from kvrs.config.engine import EngineSettings
from kvrs.engine import warm_up
from kvrs.engine.warm_up import NOTE_NAME, median_of_repeats, prefill_table
from kvrs.engine.worker import Worker

pytestmark = pytest.mark.engine


@pytest.fixture
def undisturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is that runs this test."""
    monkeypatch.setattr(warm_up, "_UNDISTURBED", float("inf"))


def worker_of(model: Path, max_batch_tokens: int = 256) -> Worker:
    return Worker(model, EngineSettings(pages=16, max_batch_tokens=max_batch_tokens))


@pytest.mark.usefixtures("undisturbed")
def test_a_table_is_measured_once_for_the_same_settings(tmp_path: Path, tiny_model: Path) -> None:
    """Other settings are measured for themselves, and nothing is lost of the first."""
    worker = worker_of(tiny_model)

    first = prefill_table(worker, 256, tmp_path)
    other = prefill_table(worker_of(tiny_model, max_batch_tokens=64), 256, tmp_path)
    shorter = prefill_table(worker, 128, tmp_path)

    assert prefill_table(worker, 256, tmp_path).seconds == first.seconds
    assert len({first.seconds, other.seconds, shorter.seconds}) == 3


def test_a_disturbed_measurement_is_not_remembered(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm_up, "_UNDISTURBED", 0.0)

    prefill_table(worker_of(tiny_model), 256, tmp_path)

    assert not (tmp_path / NOTE_NAME).exists()


@pytest.mark.usefixtures("undisturbed")
@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda _: "[]",
        lambda text: text.replace('"seconds":[', '"seconds":[-1.0,'),
        lambda text: text.replace('"step_tokens":', '"step_tokens":-'),
    ],
)
def test_a_damaged_note_is_no_table(
    tmp_path: Path, tiny_model: Path, damage: Callable[[str], str]
) -> None:
    """It is measured again, and noted."""
    worker = worker_of(tiny_model)
    first = prefill_table(worker, 256, tmp_path)
    note = tmp_path / NOTE_NAME
    note.write_text(damage(note.read_text()))

    again = prefill_table(worker, 256, tmp_path)

    assert again.seconds != first.seconds
    assert prefill_table(worker, 256, tmp_path).seconds == again.seconds


@pytest.mark.usefixtures("undisturbed")
def test_a_directory_that_cannot_be_written_remembers_nothing(
    tmp_path: Path, tiny_model: Path
) -> None:
    missing = tmp_path / "missing"

    assert prefill_table(worker_of(tiny_model), 256, missing).seconds
    assert not missing.exists()


def test_a_long_measurement_is_not_repeated() -> None:
    took_s = iter([0.4, 0.9, 0.1])

    assert median_of_repeats(lambda: next(took_s)) == pytest.approx(0.65)
    assert next(took_s) == 0.1
