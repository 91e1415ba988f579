"""The logits processor that SGLang loads, without SGLang: it leaves one token where the next one is
known, and disturbs nothing else.
"""

import importlib
import json
import pickle
import pickletools
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kvrs.proxy.backends.sglang_replay import can_replay, take_replay

VOCABULARY = 32
KNOWN = [7, 3, 9, 3]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    for name in ("sglang", "sglang.srt", "sglang.srt.sampling"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    base = ModuleType("sglang.srt.sampling.custom_logit_processor")
    vars(base)["CustomLogitProcessor"] = object
    monkeypatch.setitem(sys.modules, base.__name__, base)
    monkeypatch.delitem(sys.modules, "kvrs.sglang.replay", raising=False)
    yield importlib.import_module("kvrs.sglang.replay")
    sys.modules.pop("kvrs.sglang.replay", None)


def forced(module: ModuleType, *requests: dict[str, Any]) -> list[int | None]:
    """The tokens that are left in the rows of a step; None: all are."""
    logits = torch.zeros((len(requests), VOCABULARY))
    module.ReplayProcessor()(logits, [*requests])
    left = [row.isfinite().nonzero().flatten().tolist() for row in logits]
    return [row[0] if len(row) == 1 else None for row in left]


def request(known: Any = KNOWN) -> dict[str, Any]:
    req = SimpleNamespace(decode_batch_idx=0, output_ids=[])
    return {"kvrs_replay": known, "__req__": req}


def step(asked: dict[str, Any], steps: int, output: int) -> dict[str, Any]:
    asked["__req__"].decode_batch_idx = steps
    asked["__req__"].output_ids = [0] * output
    return asked


@pytest.mark.parametrize("late", [0, 1])
def test_a_server_that_does_both_stages_generates_what_is_known(
    module: ModuleType, late: int
) -> None:
    """The prompt comes in two chunks. With overlap scheduling the output is a token behind."""
    asked = request()

    chunks = [forced(module, step(asked, 0, 0)) for _ in range(2)]
    steps = [forced(module, step(asked, n, n - late)) for n in range(1, 6)]

    assert chunks == [[KNOWN[0]]] * 2
    assert steps == [[token] for token in (*KNOWN[1:], None, None)]


@pytest.mark.parametrize("late", [0, 1])
def test_decode_goes_on_behind_the_token_of_prefill(module: ModuleType, late: int) -> None:
    """Also if it was retracted, and goes on with the output that it had."""
    asked = request()

    outputs = [1, 2 - late]
    first = [forced(module, step(asked, n, output)) for n, output in enumerate(outputs, 1)]
    again = forced(module, step(asked, 1, 3))

    assert first == [[KNOWN[1]], [KNOWN[2]]]
    assert again == [KNOWN[3]]


def test_a_request_that_is_retracted_at_once_goes_on_behind_two_tokens(module: ModuleType) -> None:
    asked = request()
    forced(module, step(asked, 1, 1))

    assert forced(module, step(asked, 1, 2)) == [KNOWN[2]]


def test_a_prompt_that_is_computed_again_goes_on_where_it_was(module: ModuleType) -> None:
    """A server of both stages computes prompt and output anew once it has retracted a request."""
    asked = request()
    for n in range(3):
        forced(module, step(asked, n, n))

    assert forced(module, step(asked, 0, 3)) == [KNOWN[3]]


@pytest.mark.parametrize("known", [None, "text", [-1], [VOCABULARY], ["x"], [[1]]])
def test_what_cannot_be_replayed_is_left_as_it_is(module: ModuleType, known: Any) -> None:
    """It raises nothing, which would end the scheduler."""
    assert forced(module, step(request(known), 0, 0)) == [None]


def test_another_processor_s_requests_have_no_rows_here(module: ModuleType) -> None:
    first, second = request([1]), request([2])

    assert forced(module, step(first, 0, 0), step(second, 0, 0)) == [1, 2]


def test_what_is_sent_is_a_name_and_nothing_else(module: ModuleType) -> None:
    """SGLang unpickles it: the constant calls nothing."""
    fields: dict[str, Any] = {"vllm_xargs": {"kvrs_replay": KNOWN}}

    assert take_replay(fields)

    sent = bytes.fromhex(json.loads(fields["custom_logit_processor"])["callable"])
    assert [opcode.name for opcode, _, _ in pickletools.genops(sent)] == ["GLOBAL", "STOP"]
    assert pickle.loads(sent) is module.ReplayProcessor
    assert fields["custom_params"] == {"kvrs_replay": KNOWN}
    assert not take_replay({"prompt": [1]})


@pytest.mark.parametrize(
    ("takes", "options", "speculates", "can"),
    [
        (True, '{"module_path": "kvrs.sglang.storage"}', False, True),
        (False, '{"module_path": "kvrs.sglang.storage"}', False, False),
        (True, None, False, False),
        (True, '{"module_path": "another"}', False, False),
        (True, '{"module_path": "kvrs.sglang.storage"}', True, False),
    ],
)
def test_only_a_server_that_has_kvrs_replays(
    takes: bool, options: str | None, speculates: bool, can: bool
) -> None:
    """The scheduler of another one would end with the class that it does not find."""
    found = can_replay(takes_processors=takes, storage_options=options, speculates=speculates)

    assert found is can
