"""CPU of a chat with tools on its way through the proxy, beside another checkout: to the first
token, and for each further token of a thought, of text and of a tool call's arguments.

    python -m experiments.request_path.chat --beside CHECKOUT [--rounds N] [--out DIR]

Client and engines are in memory, and each token comes in a read of its own. Both checkouts take
turns, each time in a process of its own.
"""

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

# Modules of kvrs are imported where they are used: `--measure` takes them from another checkout.
ROUNDS = 12
REQUESTS = 60  # In one process, of which the first half warms up.
THOUGHT, TEXT, ARGUMENTS = 60, 60, 80  # Tokens.
TOKENS = THOUGHT + TEXT + 1 + ARGUMENTS


def request() -> bytes:
    tool = {"type": "function", "function": {"name": "put", "parameters": {"type": "object"}}}
    fields: dict[str, Any] = {
        "model": "model",
        "messages": [{"role": "user", "content": "word " * 128}],
    }
    fields |= {"tools": [tool], "max_tokens": TOKENS, "stream": True, "temperature": 0}
    body = msgspec.json.encode(fields)
    path = "/v1/chat/completions"
    return b"POST %b HTTP/1.1\r\nHost: proxy\r\nContent-Length: %d\r\n\r\n%b" % (
        *(path.encode(), len(body)),
        body,
    )


def deltas() -> Iterator[dict[str, Any]]:
    for n in range(THOUGHT):
        yield {"reasoning": f"thought{n} "}
    for n in range(TEXT):
        yield {"content": f"word{n} "}
    begun = {"index": 0, "id": "call-1", "type": "function"}
    yield {"tool_calls": [begun | {"function": {"name": "put", "arguments": ""}}]}
    for n in range(ARGUMENTS):
        yield {"tool_calls": [{"index": 0, "function": {"arguments": f'"key{n}": '}}]}


def reads() -> list[bytes]:
    """The bytes of the decode server's answer, one read a token."""
    from experiments.request_path import whole
    from kvrs.protocol.openai.chunks import sse

    said, found = list(deltas()), []
    for token, delta in enumerate(said):
        is_last = token == len(said) - 1
        finish = "tool_calls" if is_last else None
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        choice["token_ids"] = [1000 + token]
        event = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1}
        data = sse(msgspec.json.encode(event | {"model": "model", "choices": [choice]}))
        data += b"data: [DONE]\n\n" * is_last
        found.append(b"%x\r\n%b\r\n" % (len(data), data) + whole._LAST_CHUNK * is_last)
    found[0] = whole._STREAM + found[0]
    return found


async def measured() -> dict[str, float]:
    """Median microseconds of CPU to the first token, and for each further token."""
    from experiments.request_path import death, whole
    from kvrs.protocol.instance import Capability

    config = death.make_config(2)
    capabilities = [Capability.PREFIX_CACHE, Capability.RETAIN, Capability.PULL_PAGES]
    infos = [
        msgspec.structs.replace(
            death.make_info(each.id, node.id, each.role), capabilities=capabilities
        )
        for node, each in config.cluster.instances()
    ]
    proxy, client = whole.Proxy(config, infos), whole._Written()
    connection = proxy.connect(client)
    asked, answer, (first, *steps) = request(), whole.prefilled(), reads()
    firsts, tokens = [], []
    for _ in range(REQUESTS):
        for each in (client, *proxy.links.engines):
            each.begin()
        begun_ns = time.thread_time_ns()
        connection.data_received(asked)
        prefill = await proxy.called()
        for each in proxy.links.engines:
            each.begin()
        prefill.answer(answer)
        decode = await proxy.called()
        decode.answer(first)
        firsts.append(time.thread_time_ns() - begun_ns)
        begun_ns = time.thread_time_ns()
        for step in steps:
            decode.answer(step)
        while not client.data[-1].endswith(whole._LAST_CHUNK):
            await asyncio.sleep(0)
        tokens.append((time.thread_time_ns() - begun_ns) / len(steps))
        assert b"call-1" in b"".join(client.data)
        await asyncio.sleep(0)
    proxy.links.close()
    warm = REQUESTS // 2
    return {
        "first_token_us": statistics.median(firsts[warm:]) / 1e3,
        "token_us": statistics.median(tokens[warm:]) / 1e3,
    }


def in_checkout(checkout: Path) -> dict[str, float]:
    """The figures of a checkout, by this program in a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).resolve()), "--measure"]
    done = subprocess.run(
        command, cwd=checkout, env=environment, check=True, capture_output=True, timeout=300
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> int:
    if sys.argv[1:] == ["--measure"]:
        print(json.dumps(asyncio.run(measured())))
        return 0
    from experiments.command_line import parser_of
    from experiments.record import Record

    parser = parser_of(__doc__)
    before = os.environ.get("KVRS_BEFORE")
    parser.add_argument("--beside", type=Path, default=before, required=not before)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    here, record = Path(__file__).resolve().parents[2], Record()
    rows = []
    for number in range(options.rounds):
        order = [("here", here), ("beside", options.beside.resolve())]
        found = {name: in_checkout(path) for name, path in (order if number % 2 else order[::-1])}
        rows.append(found)
    lines, figures = [], {}
    for name in ("first_token_us", "token_us"):
        ratios = sorted(row["here"][name] / row["beside"][name] for row in rows)
        mine, theirs = (statistics.median(row[which][name] for row in rows) for which in row_names)
        figures[name] = {"here": mine, "beside": theirs, "ratios": ratios}
        lines.append(
            f"{name:<16} here {mine:8.2f}, beside {theirs:8.2f}, ratio of pairs: median "
            f"{statistics.median(ratios):.3f}, {ratios[0]:.3f} to {ratios[-1]:.3f}"
        )
    text = "\n".join(lines)
    print(text)
    record.keep(options.out, "chat", {"rounds": rows, "figures": figures}, text)
    return 0


row_names = ("here", "beside")

if __name__ == "__main__":
    sys.exit(main())
