"""An agent that does tasks: a line of input is the message of a user, a line of output what the
agent has done. It needs no module of this repository, so that its environment may have none.

    python client.py {anthropic,responses,chats,langgraph} URL

The functions of the tools note each call that runs. Retries stay at the clients' defaults.
"""

import asyncio
import inspect
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

MODEL = "tiny"
_RAN: list[tuple[str, dict[str, Any]]] = []


# Tools.


async def delete_files(files: list[str], recursive: bool) -> str:
    """Delete files.

    Args:
        files: their names
        recursive: whether folders go with what they hold
    """
    return _note("delete_files", files=files, recursive=recursive)


async def send_note(to: str, text: str) -> str:
    """Send a note.

    Args:
        to: its reader
        text: its text
    """
    return _note("send_note", to=to, text=text)


async def tag_files(tags: dict[str, list[str]], limit: int) -> str:
    """Give tags to files.

    Args:
        tags: the tags by file
        limit: how many files
    """
    return _note("tag_files", tags=tags, limit=limit)


async def rename_files(pairs: list[dict[str, str]]) -> str:
    """Rename files.

    Args:
        pairs: the old and the new name of each
    """
    return _note("rename_files", pairs=pairs)


TOOLS = (delete_files, send_note, tag_files, rename_files)


def _note(name: str, **arguments: Any) -> str:
    _RAN.append((name, arguments))
    return f"ran as number {len(_RAN)}"


# Clients: each returns the final text.


async def by_anthropic(url: str, question: str) -> str:
    """The tool runner of Anthropic's SDK."""
    import anthropic

    async with anthropic.AsyncAnthropic(base_url=url, api_key="none") as client:
        runner = client.beta.messages.tool_runner(
            model=MODEL,
            max_tokens=4096,
            tools=[anthropic.beta_async_tool(tool) for tool in TOOLS],
            messages=[{"role": "user", "content": question}],
            stream=True,
        )
        text = ""
        async for stream in runner:
            async for _ in stream:
                pass
            message = await stream.get_final_message()
            text = "".join(part.text for part in message.content if part.type == "text")
    return text


async def by_responses(url: str, question: str) -> str:
    """The SDK `openai-agents` with the Responses API, its default."""
    from agents import OpenAIResponsesModel

    return await _by_agents(url, question, OpenAIResponsesModel)


async def by_chats(url: str, question: str) -> str:
    """The SDK `openai-agents` with chat completions."""
    from agents import OpenAIChatCompletionsModel

    return await _by_agents(url, question, OpenAIChatCompletionsModel)


async def _by_agents(url: str, question: str, model: Any) -> str:
    from agents import Agent, Runner, function_tool, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        agent = Agent(
            name="files",
            model=model(model=MODEL, openai_client=client),
            # `dict` has no strict schema.
            tools=[
                function_tool(tool, strict_mode=False, failure_error_function=None)
                for tool in TOOLS
            ],
        )
        result = Runner.run_streamed(agent, question)
        async for _ in result.stream_events():
            pass
        return str(result.final_output)


async def by_langgraph(url: str, question: str) -> str:
    """An agent of LangChain, which is a graph of LangGraph, with `langchain-openai`."""
    from langchain.agents import create_agent
    from langchain.tools import tool
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key="none", streaming=True)
    agent = create_agent(model, [tool(each) for each in TOOLS])
    asked = {"messages": [{"role": "user", "content": question}]}
    text = ""
    async for mode, part in agent.astream(asked, stream_mode=["messages", "values"]):
        if mode == "values":
            text = str(part["messages"][-1].text)
    return text


CLIENTS: dict[str, Callable[[str, str], Awaitable[str]]] = {
    "anthropic": by_anthropic,
    "responses": by_responses,
    "chats": by_chats,
    "langgraph": by_langgraph,
}


async def done_by(name: str, url: str, question: str) -> dict[str, Any]:
    """Do a task; return its calls, the final text, and the error that an application sees."""
    _RAN.clear()
    begun_s = time.monotonic()
    final, error, said = None, None, ""
    try:
        async with asyncio.timeout(120):
            final = await CLIENTS[name](url, question)
    except Exception as raised:
        error, said = type(raised).__name__, _said(raised)
    seconds = round(time.monotonic() - begun_s, 2)
    return {
        "calls": list(_RAN),
        "final": final,
        "error": error,
        "said": said,
        "seconds": seconds,
    }


def _said(raised: BaseException) -> str:
    body = getattr(raised, "body", None)
    return f"{raised}" + (f" | {json.dumps(body, default=str)}" if body else "")


def main() -> None:
    name, url = sys.argv[1:3]
    assert all(map(inspect.iscoroutinefunction, TOOLS))
    # Nothing is sent to the makers of the clients.
    os.environ |= {"LANGSMITH_TRACING": "false", "OPENAI_AGENTS_DISABLE_TRACING": "1"}

    async def work() -> None:
        while question := (await asyncio.to_thread(sys.stdin.readline)).strip():
            print(json.dumps(await done_by(name, url, question)), flush=True)

    asyncio.run(work())


if __name__ == "__main__":
    main()
