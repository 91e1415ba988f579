"""The time of a step by a profile."""

from pathlib import Path

import msgspec
import pytest

from kvrs.profiles import catalog
from kvrs.profiles.tables import DecodeTable
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


LLAMA = "llama-3.1-70b-a100-vllm-tp4"  # Its decode table has a knee at 128 rows.


def llama() -> DecodeTable:
    table = catalog.decode_table(LLAMA)
    assert isinstance(table, DecodeTable)
    return table


def decodes(count: int, context_tokens: int = 1000) -> list[Chunk]:
    return [Chunk([7], context_tokens - 1, [0], logits=1) for _ in range(count)]


def prompt(tokens: int, first_position: int = 0) -> Chunk:
    return Chunk(list(range(tokens)), first_position, [0], logits=1)


def test_decode_steps_beside_a_prompt_add_rows_and_context_to_its_pass() -> None:
    """A mixed batch reads the weights once: beyond the knee a row costs what it costs in a large
    decode batch, and each token of context what reading its KV costs.
    """
    pace = Pace(LLAMA)
    _, per_context_ms, per_row_ms = llama().large_ms

    added_s = pace.batch_s([prompt(1024), *decodes(40)]) - pace.batch_s([prompt(1024)])

    assert added_s == pytest.approx((40 * per_row_ms + 40_000 * per_context_ms) / 1e3)
    assert added_s < pace.batch_s(decodes(40)) / 4


def test_a_few_prompt_tokens_beside_decode_steps_pay_no_second_pass() -> None:
    """A helper that catches up with two tokens of one stream computes them as two more rows."""
    pace = Pace("llama-3.1-8b-a100-vllm-tp1")
    mixed_s = pace.batch_s([prompt(2, first_position=999), *decodes(20)])

    assert mixed_s == pytest.approx(pace.batch_s(decodes(22)), rel=0.02)


@pytest.mark.parametrize(("decoding", "is_beyond"), [(20, False), (120, True)])
def test_drafts_are_cheap_up_to_the_knee(decoding: int, is_beyond: bool) -> None:
    """Verification is priced by the rows of the whole pass: 80 rows fit below 128, 480 do not."""
    pace = Pace(LLAMA)
    drafted = [Chunk([7, 8, 9, 10], 999, [0], logits=4, drafts=3) for _ in range(decoding)]
    plain_s, drafted_s = pace.batch_s(decodes(decoding)), pace.batch_s(drafted)
    table = llama()

    cost_ms = (drafted_s - plain_s) * 1e3 / (3 * decoding)

    assert (cost_ms > 1.1 * table.small_ms[2]) == is_beyond
    assert cost_ms < table.large_ms[2]


@pytest.mark.parametrize("tokens", [2, 64, 127, 128, 512, 1024])
@pytest.mark.parametrize("decoding", [1, 30, 127, 128, 300])
def test_a_mixed_batch_takes_no_less_than_either_part_and_no_more_than_both(
    tokens: int, decoding: int
) -> None:
    pace = Pace(LLAMA)
    chunks, rows = [prompt(tokens)], decodes(decoding)
    mixed_s = pace.batch_s([*chunks, *rows])

    # The two fits of the table meet with a step down of a millisecond.
    assert mixed_s >= max(pace.batch_s(chunks), pace.batch_s(rows) - 1e-3)
    assert mixed_s <= pace.batch_s(chunks) + pace.batch_s(rows)
