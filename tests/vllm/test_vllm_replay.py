"""Real vLLM makes known output once more: what follows is what an undisturbed run gives."""

import asyncio
import signal
from contextlib import suppress
from typing import Any

import pytest

from experiments.kills.replayed import KINDS, Said, alike
from kvrs_testkit.vllm_servers import ServerError, VllmServers
from tests.vllm.marks import REAL_VLLM
from tests.vllm.test_vllm_proxy import MESSAGES, open_front

pytestmark = REAL_VLLM


def said(answer: tuple[int, Any]) -> Said:
    status, events = answer
    assert status == 200, events
    found = Said()
    for event in events:
        found.take(event)
    return found


# Tools need a parser, with which the servers of the series run.
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "tools" not in kind])
async def test_a_stream_goes_on_exactly_when_its_decode_server_hangs(
    vllm_servers: VllmServers, kind: str
) -> None:
    """Grammar, penalties, log probabilities and the generator of a seed go on."""
    asked = {"messages": MESSAGES, "stream": True, "seed": 7} | KINDS[kind]
    async with open_front(vllm_servers, vllm_servers.config) as front:
        alone = said(await front.ask_alone(**asked))

        stream = asyncio.create_task(front.ask(**asked))
        victim = await front.hang_in_mid_stream(least_tokens=10)
        try:
            again = said(await stream)
        finally:
            front.servers.signal(victim, signal.SIGCONT)

        recoveries = (await front.state())["recoveries"]
        await front.until_up()
    assert [row["option"] for row in recoveries] == ["replay"]
    assert alike(vars(again), vars(alone))


@pytest.mark.parametrize("known", ["x", [-1], [1 << 40], [1.5], [600, 600], list(range(3000))])
def test_no_known_tokens_end_the_engine(vllm_servers: VllmServers, known: Any) -> None:
    """Malformed ones are refused, impossible ones are not generated."""
    asked = {"prompt": [5], "max_tokens": 4, "vllm_xargs": {"kvrs_replay": known}}
    with suppress(ServerError):
        vllm_servers.complete("d0", **asked)

    assert vllm_servers.complete("d0", prompt=[5], max_tokens=4)["choices"][0]["token_ids"]
