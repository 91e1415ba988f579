"""The logits processor that has known tokens generated, without vLLM: with stand-ins for what it
imports of it.
"""

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

OFF = float("-inf")


def process_dict_updates(entries: dict[int, Any], update: Any, new_state: Any) -> bool:
    """The stand-in for vLLM's own, without moves."""
    for index, params, prompt, output in update.added:
        if (state := new_state(params, prompt, output)) is None:
            entries.pop(index, None)
        else:
            entries[index] = state
    for index in update.removed:
        entries.pop(index, None)
    return True


@pytest.fixture
def replay(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    stand_ins: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.logger": {"init_logger": lambda _: SimpleNamespace(error=lambda *_: None)},
        "vllm.sampling_params": {"SamplingParams": object},
        "vllm.v1": {},
        "vllm.v1.sample": {},
        "vllm.v1.sample.logits_processor": {
            "BatchUpdate": object,
            "LogitsProcessor": object,
            "process_dict_updates": process_dict_updates,
        },
    }
    for name, members in stand_ins.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "kvrs.vllm.replay", raising=False)
    module = importlib.import_module("kvrs.vllm.replay")
    monkeypatch.delitem(sys.modules, "kvrs.vllm.replay")
    return module


def params(known: Any = None, **others: Any) -> Any:
    return SimpleNamespace(extra_args=None if known is None else {"kvrs_replay": known} | others)


def update(*added: tuple[int, Any, list[int]], removed: tuple[int, ...] = ()) -> Any:
    rows = [(row, of_request, [1], output) for row, of_request, output in added]
    return SimpleNamespace(added=rows, removed=removed)


def test_one_token_is_left_until_all_known_ones_are_generated(replay: ModuleType) -> None:
    """Rows of other requests are not touched, nor is a row that is past its known tokens."""
    processor, output = replay.Replay(None, None, False), list[int]()
    processor.update_state(update((0, params(), []), (1, params([2, 0]), output)))

    rows = []
    for token in (2, 0, 1):
        rows.append(processor.apply(torch.ones(2, 3)))
        output.append(token)
        processor.update_state(None)

    assert [row[1].tolist() for row in rows] == [[OFF, OFF, 0], [0, OFF, OFF], [1, 1, 1]]
    assert all(row[0].tolist() == [1, 1, 1] for row in rows)


def test_a_request_that_was_preempted_goes_on_where_it_was(replay: ModuleType) -> None:
    """It is added again with its output so far; a row without it is free for others."""
    processor = replay.Replay(None, None, False)
    processor.update_state(update((0, params([2, 0]), [])))
    processor.update_state(update(removed=(0,)))
    assert processor.apply(torch.ones(1, 3)).tolist() == [[1, 1, 1]]

    processor.update_state(update((0, params([2, 0]), [2])))

    assert processor.apply(torch.ones(1, 3)).tolist() == [[0, OFF, OFF]]


@pytest.mark.parametrize(
    "known", ["x", 7, {"a": 1}, [1.5], [True], [-1], ["1"], [1 << 31], [[1]], [0] * (1 << 20 | 1)]
)
def test_what_is_no_list_of_ids_is_refused_before_it_reaches_the_engine(
    replay: ModuleType, known: Any
) -> None:
    """An exception within the engine would end it with all its streams."""
    with pytest.raises(ValueError, match="kvrs_replay must"):
        replay.Replay.validate_params(params(known))


@pytest.mark.parametrize("given", [None, [], [0, 7]])
def test_other_requests_are_none_of_its_business(replay: ModuleType, given: Any) -> None:
    replay.Replay.validate_params(params(given))
    replay.Replay.validate_params(SimpleNamespace(extra_args={"other": "x"}))


def test_an_id_that_the_model_has_not_changes_nothing(replay: ModuleType) -> None:
    """The proxy sees that another token comes."""
    processor = replay.Replay(None, None, False)
    processor.update_state(update((0, params([3]), [])))

    assert processor.apply(torch.ones(1, 3)).tolist() == [[1, 1, 1]]


def test_an_error_turns_it_off_and_ends_no_engine(replay: ModuleType) -> None:
    """Whatever another version of vLLM hands it."""
    processor = replay.Replay(None, None, False)
    processor.update_state(update((0, params([2]), [])))
    odd = SimpleNamespace(shape=(1, 3))  # Not to be written to.

    assert processor.apply(odd) is odd
    assert processor.apply(torch.ones(1, 3)).tolist() == [[1, 1, 1]]
    processor.update_state(SimpleNamespace())
    processor.update_state(update((0, params([2]), [])))
    assert processor.apply(torch.ones(1, 3)).tolist() == [[1, 1, 1]]
