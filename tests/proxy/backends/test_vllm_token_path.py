"""The token path in front of a plain vLLM, through a whole proxy."""

from typing import Any

import pytest

from kvrs.proxy.streams.relay import TokenPath
from kvrs_testkit.vllm_cluster import PROMPT, TOKENS, Builder

# The first event, the one from which a template is learnt, and the last.
_OTHERS = 3


@pytest.mark.parametrize("headers", [{}, {"Idempotency-Key": "one"}])
@pytest.mark.parametrize(
    "asked", [{"prompt": PROMPT}, {"messages": [{"role": "user", "content": "a"}]}]
)
async def test_the_tokens_of_a_plain_vllm_take_the_short_way(
    vllms: Builder, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], headers: dict[str, str]
) -> None:
    """All but the first ones, although the characters that the client has are counted."""
    tokens = 3 * TOKENS
    taken, take = 0, TokenPath.take

    def counted(path: TokenPath, data: bytes) -> bytes:
        nonlocal taken
        if path._gathered is not None:  # Called by itself.
            return take(path, data)
        before = path._delivered.tokens
        rest = take(path, data)
        taken += path._delivered.tokens - before
        return rest

    monkeypatch.setattr(TokenPath, "take", counted)
    system = await vllms()
    system.shared.pause_s = 0.002
    fields = {"max_tokens": tokens, "temperature": 0, "stream": True, "ignore_eos": True}
    path = "chat/completions" if "messages" in asked else "completions"

    async with system.http.post(
        f"{system.url}/v1/{path}", json=asked | fields, headers=headers
    ) as response:
        body = await response.read()

    assert response.status == 200, body
    assert body.endswith(b"data: [DONE]\n\n")
    assert taken >= tokens - _OTHERS
