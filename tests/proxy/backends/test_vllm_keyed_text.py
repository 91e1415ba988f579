"""Streams with an `Idempotency-Key` whose engine sends no token ids: nothing is left out."""

import asyncio
from typing import Any

from kvrs_testkit.vllm_cluster import Builder
from tests.proxy.backends.test_vllm_odd_requests import CHAT, odd_vllms

REQUEST: dict[str, Any] = CHAT | {"max_tokens": 40, "stream": True, "include_reasoning": False}


def positions(events: bytes) -> list[int]:
    lines = [line for line in events.split(b"\n") if line.startswith(b"id:")]
    return [int(line.rsplit(b":", 1)[1]) for line in lines]


async def test_each_event_has_a_position(vllms: Builder) -> None:
    """Without ids all had the same one, so that a client that resumed missed the rest."""
    system, _ = await odd_vllms(vllms, {"hides_ids": True})

    status, body = await system.ask(REQUEST, {"Idempotency-Key": "k"})

    found = positions(body.encode() if isinstance(body, str) else body)
    assert status == 200
    assert len(found) > 10
    assert found == sorted(set(found))


async def test_a_cut_connection_cannot_be_gone_on_with(vllms: Builder) -> None:
    """Rather than with text that is missing, or comes twice."""
    system, _ = await odd_vllms(vllms, {"hides_ids": True})
    system.shared.pause_s = 0.05
    url, headers = f"{system.url}/v1/chat/completions", {"Idempotency-Key": "k"}
    seen = b""
    async with system.http.post(url, json=REQUEST, headers=headers) as answer:
        while len(positions(seen)) < 6:
            seen += await answer.content.readany()
        answer.close()
    name = seen.split(b"id: ")[-1].split(b"\n")[0].decode()

    async def resumed() -> int:
        async with system.http.post(
            url, json=REQUEST, headers=headers | {"Last-Event-ID": name}
        ) as answer:
            assert answer.status == 502, await answer.text()
            assert (await answer.json())["error"]["code"] == "inexact"
            return answer.status

    await asyncio.sleep(0.2)  # Until the proxy has noticed it.
    assert await resumed() == 502
