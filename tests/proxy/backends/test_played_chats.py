"""Chats through the proxy, whose scripted engines play recordings."""

from kvrs_testkit.engine_streams import recordings
from kvrs_testkit.engine_streams.reading import Answer
from kvrs_testkit.engine_streams.scripts import TOOLS
from kvrs_testkit.vllm_cluster import Builder, Servers

THOUGHT = recordings("vllm")["vllm-tools-hermes-thought-qwen3"]
MESSAGES = [{"role": "user", "content": "Tidy up."}]


async def test_a_proxy_passes_a_played_chat_behind_its_self_tests(vllms: Builder) -> None:
    """The proxy tests the servers with prompts of its own, and its client has the recording."""

    def prepare(servers: Servers) -> None:
        for server in servers.values():
            server.recording = THOUGHT

    system = await vllms(prepare=prepare, proxy={"self_test": True})

    async def tested() -> bool:
        rows = (await system.state())["instances"]
        return all(row["self_test"] is not None and row["self_test"]["done"] for row in rows)

    await system.until(tested)
    status, body = await system.ask({"messages": MESSAGES, "tools": TOOLS, "stream": True})

    assert status == 200
    *events, _, _ = body.decode().split("\n\n")
    answer = Answer.of(event.removeprefix("data: ") for event in events)
    assert (answer.parsed_calls(), answer.reasoning) == (THOUGHT.calls, THOUGHT.reasoning)
