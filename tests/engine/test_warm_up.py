"""The prefill table of an instance: measured once on a machine, then remembered; what it declares
of it.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from kvrs.config.cluster import EngineSettings
from kvrs.config.file import parse_config
from kvrs.ids import InstanceId, StreamId
from kvrs.profiles.tables import PrefillTable
from kvrs.protocol.pages import root_tag
from kvrs_engine.engine import warm_up
from kvrs_engine.engine.instance import EngineInstance
from kvrs_engine.engine.random_model import write_tiny_model
from kvrs_engine.engine.warm_up import NOTE_NAME, measure_prefill, median_of_repeats, prefill_table
from kvrs_engine.engine.worker import ModelWorker, Worker
from kvrs_engine.scheduling.pace import Pace
from kvrs_engine.scheduling.sequences import Chunk, Sequence
from tests.engine.serving import SECRET

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


def test_overheads_of_steps_are_left_out(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table is of one step; a chunk behind others then has one overhead."""
    seconds = {1: 0.01, 32: 0.042, 64: 0.074, 128: 0.148, 256: 0.296}
    monkeypatch.setattr(warm_up, "prefill_s", lambda worker, tokens: seconds[tokens])

    table = measure_prefill(worker_of(tiny_model, max_batch_tokens=64), 256)

    assert table.seconds_for(256) == pytest.approx(0.01 + 0.256)
    assert table.extra(192, 64) == pytest.approx(0.01 + 0.064)
    assert table.chunked(64, 256).seconds_for(256) == pytest.approx(seconds[256])


def test_a_disturbed_first_length_leaves_no_negative_times(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm_up, "prefill_s", lambda worker, tokens: 1.0 if tokens == 1 else 0.1)

    table = measure_prefill(worker_of(tiny_model, max_batch_tokens=64), 256)

    assert table.seconds_for(256) == 1.0


@pytest.mark.parametrize("pace", ["opt-13b-a100-distserve-tp1", "llama-3.1-8b-h100-vllm-tp1", None])
def test_an_instance_declares_what_its_chunks_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pace: str | None
) -> None:
    """Prediction and queue agree with the steps, whether those are paced or measured."""
    monkeypatch.setattr(warm_up, "prefill_s", taken_s)
    write_tiny_model(tmp_path, seed=0)  # Of its own: no table was noted beside it.
    nodes = [{"id": "n0", "instances": [{"id": "e0", "role": "both"}]}]
    engine = {"pages": 128, "max_batch_tokens": 256, "pace": pace}
    cluster = {"model": str(tmp_path), "engine": engine, "nodes": nodes}
    instance = EngineInstance(parse_config({"cluster": cluster}), InstanceId("e0"), 1, SECRET)
    declared = PrefillTable.from_measured(instance.info().prefill)
    scheduler = instance.core.scheduler
    for first in (0, 1):
        ids = [first] * 1024
        scheduler.add(
            Sequence(StreamId(f"s{first}"), (0, 1), ids, 1024, root_tag(""), prefill_only=True)
        )
    chunks = [Chunk([0] * 256, first, [], logits=0) for first in range(0, 1024, 256)]
    if pace is None:
        real_s = taken_s(instance.worker, 1024)
    else:
        real_s = sum(Pace(pace).batch_s([chunk]) for chunk in chunks)

    assert declared.seconds_for(1024) == pytest.approx(real_s)
    assert instance.core.queue_delay_s() == pytest.approx(2 * real_s, rel=0.02)


def taken_s(worker: ModelWorker, tokens: int) -> float:
    return 0.01 * -(-tokens // worker.settings.max_batch_tokens) + 0.0001 * tokens


def test_a_long_measurement_is_not_repeated() -> None:
    took_s = iter([0.4, 0.9, 0.1])

    assert median_of_repeats(lambda: next(took_s)) == pytest.approx(0.65)
    assert next(took_s) == 0.1
