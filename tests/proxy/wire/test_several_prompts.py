"""A request of several prompts, as the proxy reads it and what it keeps of it."""

from typing import Any

import msgspec
import pytest

from kvrs.errors import RequestError
from kvrs.net.connections import ByteBudget
from kvrs.protocol.openai.requests import packed
from kvrs.proxy.wire.requests import COMPLETIONS, RequestUsage, read


def completion(**fields: Any) -> bytes:
    return msgspec.json.encode({"prompt": "hello", **fields})


@pytest.mark.parametrize("wrong", ["", [], 3, None, [-1], [1, "a"], [1 << 32], [["a"]]])
def test_each_of_several_prompts_is_checked(wrong: Any) -> None:
    """Wherever it stands, and before any of them is begun."""
    for prompts in (["a", wrong], [[1], wrong, [2]]):
        with pytest.raises(RequestError) as refusal:
            read(COMPLETIONS, completion(prompt=prompts))

        assert (refusal.value.param or "").startswith("prompt")


def test_the_budget_follows_all_prompts_of_a_request() -> None:
    """The budget holds what is kept of each while their ids come, and nothing after their end."""
    body = completion(prompt=["a" * 100, "b" * 200, [1, 2, 3]], user="u" * 50)
    budget = ByteBudget(1 << 20, len(body))

    with RequestUsage(budget) as held:
        held.take(len(body))
        parsed = read(COMPLETIONS, body)
        parsed.hold(held)
        kept = [sum(map(len, one.fields.values())) for one in parsed.prompts]
        assert budget.held_bytes == sum(kept) + 3 * 4
        parsed.prompts[0].tokenised(packed([7] * 10))
        parsed.prompts[0].pack()
        assert budget.held_bytes == sum(kept) + 3 * 4 + 10 * 4 - 102

    assert budget.held_bytes == 0
