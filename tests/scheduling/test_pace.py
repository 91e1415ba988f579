"""The time of a step by a profile."""

from pathlib import Path

import msgspec
import pytest

from kvrs.profiles import catalog
from kvrs_engine.scheduling.pace import Pace
from kvrs_engine.scheduling.sequences import Chunk

NAME = "opt-13b-a100-distserve-tp1"
PREFILL = Chunk(list(range(64)), 0, [0], logits=1)
DECODE = Chunk([7], 99, [0], logits=1)


@pytest.mark.parametrize("chunks", [[PREFILL], [DECODE], [PREFILL, DECODE], [PREFILL, PREFILL]])
def test_the_time_of_the_engine_is_added_once_a_step(tmp_path: Path, chunks: list[Chunk]) -> None:
    """Whatever is in it; the table of prefill has it for each of a prompt's chunks."""
    slower = msgspec.structs.replace(catalog.profile(NAME), engine_step_s=0.01)
    path = tmp_path / "slower.json"
    path.write_bytes(msgspec.json.encode(slower))
    before, after = Pace(NAME), Pace(str(path))

    assert after.batch_s(chunks) - before.batch_s(chunks) == pytest.approx(0.01)
    for tokens, steps in ((512, 1), (1536, 3)):
        one, other = (
            each.prefill.chunked(512, 2048).seconds_for(tokens) for each in (before, after)
        )
        assert other - one == pytest.approx(0.01 * steps)


def test_drafts_are_rows_of_a_decode_step_and_read_their_context_once() -> None:
    drafted = Chunk([7, 8, 9], 99, [0], logits=3, drafts=2)
    table = catalog.decode_table(NAME)

    assert Pace(NAME).batch_s([drafted]) - Pace(NAME).batch_s([DECODE]) == pytest.approx(
        table.seconds_for(3, 100) - table.seconds_for(1, 100)
    )
