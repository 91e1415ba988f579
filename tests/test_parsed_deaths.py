"""The experiment on deaths of parsed streams: a few of its deaths, and proof that its oracle sees
what it is to see.
"""

import asyncio
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from experiments.parsed_deaths import oracle
from experiments.parsed_deaths.asked import APIS, Asked
from experiments.parsed_deaths.oracle import CHAT, MESSAGES, RESPONSES, counted, judge, read
from experiments.parsed_deaths.run import BARS, Deaths, Row, parsers_of
from experiments.parsed_deaths.world import Cluster, Death, open_cluster
from kvrs.protocol.openai.chunks import ReceivedChoice
from kvrs.proxy.streams.continuation import ReplayedOutput
from kvrs_testkit.memory_loop import MemoryLoop

TOOLS = "vllm-tools-hermes-thought-qwen3"


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Each death is a warning."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def rows_of(deaths: Deaths, count: int) -> list[Row]:
    with asyncio.Runner(loop_factory=MemoryLoop) as runner:
        return runner.run(deaths.rows(count))


@pytest.mark.parametrize("differ", [0.0, 0.01])
def test_deaths_at_random_bytes_show_nothing_wrong(differ: float) -> None:
    """No half call, nothing twice, no thought in content, no broken connection."""
    rows = rows_of(Deaths(seed=3, differ=differ), 40 if not differ else 12)

    found = counted(row.verdict for row in rows)
    assert [found[bar] for bar in BARS] == [0, 0, 0, 0], [
        (row.asked, row.at_byte, row.verdict.faults) for row in rows if row.verdict.is_wrong
    ]
    with_ids = [row for row in rows if row.engine == "vllm"]
    assert differ or all(row.verdict.is_whole for row in with_ids)
    assert differ or parsers_of(rows)["tool parsers"] >= 6
    assert all(row.verdict.is_whole or row.verdict.error for row in rows)


def _forwarded(self: Any, data: bytes, choice: ReceivedChoice) -> Sequence[Any]:
    """A second run that reaches the client from its first event on."""
    self._at, self._owed = len(self._known), {}
    return [(data, choice)]


@pytest.mark.parametrize("api", APIS)
def test_the_oracle_sees_a_second_run_that_is_forwarded(
    monkeypatch: pytest.MonkeyPatch, api: str
) -> None:
    """In each API, where the client has a part of the thought already."""
    monkeypatch.setattr(ReplayedOutput, "take", _forwarded)
    asked = Asked(TOOLS, api, is_stream=True, is_seeded=False)

    async def judged(cluster: Cluster) -> oracle.Verdict:
        calm, length = await _answer(cluster, asked, Death())
        got, _ = await _answer(cluster, asked, Death(at_byte=length // 5))
        return judge(got, [calm])

    async def run() -> oracle.Verdict:
        async with open_cluster("vllm") as cluster:
            return await judged(cluster)

    with asyncio.Runner(loop_factory=MemoryLoop) as runner:
        verdict = runner.run(run())
    assert verdict.is_wrong
    assert not verdict.is_whole


async def _answer(cluster: Cluster, asked: Asked, death: Death) -> tuple[oracle.Answer, int]:
    got = await cluster.ask_for(asked.played, asked.api, asked.body(), death)
    answer = read(asked.api, is_stream=True, status=got.status, body=got.body, ended=got.ended)
    return answer, cluster.body_bytes(death)


CALL = '{"id":"c","function":{"name":"f","arguments":'


def chat(*deltas: str, finish: str = "tool_calls", done: str = "data: [DONE]\n\n") -> bytes:
    """A stream of these deltas."""
    head = 'data: {"id":"x","created":1,"model":"m","choices":[{"index":0,'
    events = [f'{head}"delta":{delta},"finish_reason":null}}]}}\n\n' for delta in deltas]
    ends = f'{head}"delta":{{}},"finish_reason":"{finish}"}}]}}\n\n' if finish else ""
    return "".join([*events, ends, done]).encode()


CALM = chat(
    '{"reasoning":"a thought of many words"}',
    '{"content":"Hello"}',
    f'{{"tool_calls":[{CALL}"{{\\"q\\":"}}}}]}}',
    '{"tool_calls":[{"index":0,"function":{"arguments":"1}"}}]}',
)


@pytest.mark.parametrize(
    ("body", "bar"),
    [
        pytest.param(
            chat('{"content":"Hello"}', f'{{"tool_calls":[{CALL}"{{\\"q\\":"}}}}]}}'),
            "half calls shown as complete",
            id="half",
        ),
        pytest.param(
            chat('{"content":"HelloHello"}', finish="", done=""), "twice or other text", id="twice"
        ),
        pytest.param(
            chat('{"content":"a thought of many words"}', finish="", done=""),
            "thought in content",
            id="thought",
        ),
        pytest.param(chat('{"content":"Hel"}', finish="", done=""), "broken connections", id="cut"),
        pytest.param(CALM + b"data: {", "broken connections", id="half event"),
        pytest.param(CALM.replace(b"[DONE]", b"{}"), "broken connections", id="no JSON event"),
    ],
)
def test_the_oracle_counts_each_kind_of_wrong(body: bytes, bar: str) -> None:
    calm = read(CHAT, is_stream=True, status=200, body=CALM, ended="")

    verdict = judge(read(CHAT, is_stream=True, status=200, body=body, ended=""), [calm])

    assert counted([verdict])[bar] == 1
    assert counted([judge(calm, [calm])])["whole and equal"] == 1


@pytest.mark.parametrize(
    ("api", "body"),
    [
        (CHAT, b'data: {"error":{"message":"m","type":"server_error","code":"inexact"}}\n\n'),
        (
            MESSAGES,
            b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error"}}\n\n',
        ),
        (
            RESPONSES,
            b'event: response.failed\ndata: {"type":"response.failed","sequence_number":0,'
            b'"response":{"status":"failed","error":{"code":"server_error"},"output":[]}}\n\n',
        ),
    ],
)
def test_an_error_is_explicit_in_each_api(api: str, body: bytes) -> None:
    """And one that nothing ends is a broken connection."""
    calm = oracle.Answer(content="a", finish="stop", is_over=True)

    verdict = judge(read(api, is_stream=True, status=200, body=body, ended=""), [calm])
    cut = judge(read(api, is_stream=True, status=200, body=b"", ended=""), [calm])

    assert (verdict.is_wrong, verdict.is_whole) == (False, False)
    assert verdict.error
    assert cut.broken
