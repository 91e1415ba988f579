"""The blocks of running requests, as outputs of vLLM's scheduler tell them."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvrs.vllm.block_table import BlockTable


def output(
    new: dict[str, list[int]] | None = None,
    further: dict[str, list[int] | None] | None = None,
    resumed: set[str] | None = None,
    finished: set[str] | None = None,
) -> Any:
    further = further or {}
    cached = SimpleNamespace(
        req_ids=[*further],
        resumed_req_ids=resumed or set(),
        new_block_ids=[None if blocks is None else (blocks,) for blocks in further.values()],
    )
    return SimpleNamespace(
        finished_req_ids=finished or set(),
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, block_ids=(blocks,))
            for name, blocks in (new or {}).items()
        ],
        scheduled_cached_reqs=cached,
    )


def test_blocks_are_added_step_by_step() -> None:
    table = BlockTable()

    table.update(output(new={"a": [1, 2], "b": [3]}))
    table.update(output(further={"a": [4], "b": None}))

    assert (table.of("a"), table.of("b")) == ([1, 2, 4], [3])


def test_a_resumed_request_has_other_blocks() -> None:
    table = BlockTable()

    table.update(output(new={"a": [1, 2], "b": [3]}))
    table.update(output(further={"a": [7, 8, 9], "b": [5]}, resumed={"a"}))

    assert (table.of("a"), table.of("b")) == ([7, 8, 9], [3, 5])


def test_a_request_that_begins_again_as_a_new_one_has_other_blocks() -> None:
    table = BlockTable()

    table.update(output(new={"a": [1, 2]}))
    table.update(output(new={"a": [5]}, finished={"a"}))

    assert table.of("a") == [5]


def test_an_ended_request_is_forgotten() -> None:
    table = BlockTable()

    table.update(output(new={"a": [1, 2]}))
    table.update(output(finished={"a", "unknown"}))

    with pytest.raises(KeyError):
        table.of("a")


def test_vllm_s_own_lists_are_left_as_they_are() -> None:
    table, blocks = BlockTable(), [1, 2]

    table.update(output(new={"a": blocks}))
    table.update(output(further={"a": [3]}))

    assert blocks == [1, 2]
