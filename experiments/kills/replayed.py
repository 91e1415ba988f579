"""Real vLLM or SGLang under a proxy: streams whose next token depends on more than the tokens
before it.

Chats with a grammar, a tool call, penalties, log probabilities or a seed run in waves; in each wave
a decode server hangs, or in the first one of a kind is killed, when all streams are under way. The
same requests run undisturbed afterwards. `--forced` leaves the grammars and tool calls. With
`--stock`, and at SGLang, the servers have no processor, so that each stream is equal, or ends with
an error; `--thoughts` starts them with a reasoning parser.
"""

import argparse
import asyncio
import json
import math
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from experiments.kills.vllm import STREAM_TIMEOUT_S, UP_TIMEOUT_S
from experiments.record import Record
from kvrs.net.admin import AdminClient
from kvrs_engine.engine.random_model import SYLLABLES
from kvrs_lab.load.admin_port import AdminPort
from kvrs_testkit.engine_servers import EngineServers
from kvrs_testkit.sglang_servers import PYTHON_ENV as SGLANG_PYTHON_ENV
from kvrs_testkit.sglang_servers import SglangServers, sglang_config
from kvrs_testkit.vllm_servers import (
    BATCH_INVARIANT,
    GPU_FLAGS,
    HANDED_OVER,
    PYTHON_ENV,
    VllmServers,
    vllm_config,
)

WAVE = 8
CUTS = 50  # Of each kind.
# With --gpu, which has no room for a prefill server, and of SGLang.
ALONE = {"n0": ("d0",), "n1": ("d1",)}
FLAGS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
SGLANG_FLAGS = ("--tool-call-parser", "hermes")
UNDER_WAY_CHARACTERS = (3, 80)  # How much the last stream of a wave has when a fault comes.
# Between two runs in batches of other sizes, of a log probability.
_ROUNDING = 1e-3
_LOOK_AGAIN_S = 0.01


def _schema(pattern: str | None = None) -> dict[str, Any]:
    """A person; `pattern`: of its texts."""
    limits = {} if pattern is None else {"pattern": pattern}
    return {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40} | limits,
            "age": {"type": "integer", "minimum": 0, "maximum": 100_000},
            "tags": {
                "type": "array",
                "items": {"type": "string", "maxLength": 12} | limits,
                "minItems": 2,
                "maxItems": 6,
            },
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    }


def _tool(parameters: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "put", "parameters": parameters} | fields}


_JSON = {
    "max_tokens": 1000,
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": _schema()}},
}
_TOOLS = {
    "max_tokens": 1000,
    "tools": [_tool(_schema())],
    "tool_choice": {"type": "function", "function": {"name": "put"}},
}
_LONG = {"max_tokens": 300, "ignore_eos": True}
_USAGE = {"include_usage": True}
# Greedy ones too, each in its wave.
KINDS: dict[str, dict[str, Any]] = {
    "JSON schema": _JSON,
    "JSON schema, seeded": _JSON | {"temperature": 1.0},
    "tools": _TOOLS,
    "tools, seeded": _TOOLS | {"temperature": 1.0},
    "penalties": _LONG | {"presence_penalty": 1.0, "frequency_penalty": 0.7},
    "log probabilities": _LONG | {"logprobs": True, "top_logprobs": 3},
    "seeded": _LONG | {"temperature": 1.0, "top_p": 0.9},
}
# Those that a schema forces, which stock servers do not continue from their ids.
FORCED = ("JSON schema", "JSON schema, seeded", "tools", "tools, seeded")
# All that a random model generates is a thought to the parser, which waits for its end.
PARSER = ("--reasoning-parser", "deepseek_r1")
THOUGHTS: dict[str, dict[str, Any]] = {
    "thoughts": _LONG,
    "thoughts, seeded": _LONG | {"temperature": 1.0},
}
# SGLang draws random numbers for all requests together: no run is that of another time.
_DRAWN = ", drawn"
# SGLang forces the schema of strict tools alone, and its parsers stop at control characters. Text
# follows a call without a stop string.
_STRICT = _TOOLS | {
    "tools": [_tool(_schema("^[a-z ]{3,40}$"), strict=True)],
    "stop": ["</tool_call>"],
}
SGLANG_KINDS: dict[str, dict[str, Any]] = {
    "JSON schema": _JSON,
    "tools": _STRICT,
    "tools, required": _STRICT | {"tool_choice": "required", "stop": [], "max_tokens": 400},
    f"tools{_DRAWN}": _STRICT | {"temperature": 1.0},
}
SGLANG_PARSER = ("--reasoning-parser", "deepseek-r1")
SGLANG_THOUGHTS: dict[str, dict[str, Any]] = {
    "thoughts": _LONG,
    "thoughts, tools": _TOOLS | _LONG | {"tool_choice": "auto"},
    f"thoughts{_DRAWN}": _LONG | {"temperature": 1.0},
}


@dataclass
class Said:
    """The answer of a stream, whatever its events."""

    exact: bool = False  # As its header says.
    errors: list[Any] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    text: str = ""
    thought: str = ""
    calls: dict[int, str] = field(default_factory=dict)  # Names and arguments.
    logprobs: list[Any] = field(default_factory=list)
    finish: str | None = None
    usage: tuple[int, int] | None = None  # Tokens of the prompt and of the output.
    is_done: bool = False  # [DONE] came.

    def take(self, event: Any) -> None:
        if "error" in event:
            self.errors.append(event["error"])
            return
        if usage := event.get("usage"):
            self.usage = usage["prompt_tokens"], usage["completion_tokens"]
        for choice in event["choices"]:
            delta = choice["delta"]
            self.ids += choice.get("token_ids") or ()
            self.text += delta.get("content") or ""
            self.thought += delta.get("reasoning") or delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls") or ():
                function, index = call["function"], call["index"]
                part = (function.get("name") or "") + (function.get("arguments") or "")
                self.calls[index] = self.calls.get(index, "") + part
            self.logprobs += (choice.get("logprobs") or {}).get("content") or ()
            self.finish = choice["finish_reason"] or self.finish

    @property
    def characters(self) -> int:
        return len(self.text) + len(self.thought) + sum(map(len, self.calls.values()))

    @property
    def has_ended(self) -> bool:
        """By itself: what it says is whole."""
        return self.finish in ("stop", "tool_calls")

    def is_begin_of(self, calm: "Said") -> bool:
        """An answer that ended with an error has nothing that the calm one has not."""
        parts = [(self.text, calm.text), (self.thought, calm.thought)]
        parts += [(text, calm.calls.get(index, "")) for index, text in self.calls.items()]
        is_begin = self.ids == calm.ids[: len(self.ids)]
        return is_begin and not self.looks_whole and all(b.startswith(a) for a, b in parts)

    @property
    def looks_whole(self) -> bool:
        return self.finish is not None or self.is_done

    @property
    def is_json(self) -> bool:
        said = self.calls[0].removeprefix("put") if self.calls else self.text
        try:
            # The model puts control characters into strings, which vLLM's grammar allows.
            json.loads(said, strict=False)
        except ValueError:
            return False
        return True


def alike(one: Any, other: Any) -> bool:
    match one, other:
        case float(), float():
            return abs(one - other) <= _ROUNDING
        case dict(), dict():
            return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
        case list(), list():
            return len(one) == len(other) and all(map(alike, one, other))
        case _:
            return bool(one == other)


def make_requests(fields: dict[str, Any], choose: random.Random) -> list[dict[str, Any]]:
    return [
        {"temperature": 0, "stream": True, "return_token_ids": True, "stream_options": _USAGE}
        | fields
        | {
            "seed": choose.randrange(1 << 30),
            "messages": [{"role": "user", "content": " ".join(choose.choices(SYLLABLES, k=12))}],
        }
        for _ in range(WAVE)
    ]


class Series:
    def __init__(
        self, servers: EngineServers, kinds: dict[str, dict[str, Any]], console: Console, seed: int
    ) -> None:
        self._servers = servers
        self._kinds = kinds
        self._console = console
        self._choose = random.Random(seed)
        proxy = servers.config.proxy
        self._url = f"http://{proxy.host}:{proxy.port}/v1/chat/completions"
        self._admin_url = f"http://{proxy.admin_host}:{proxy.admin_port}"

    async def run(self, cuts: int, until_s: float) -> list[dict[str, Any]]:
        """The rows of the table; no kind begins later than `until_s` of the monotonic clock."""
        timeout = aiohttp.ClientTimeout(total=STREAM_TIMEOUT_S)
        rows = []
        async with (
            aiohttp.ClientSession(timeout=timeout) as self._http,
            AdminPort(AdminClient(self._admin_url)) as self._port,
        ):
            await self._port.wait_all_up(UP_TIMEOUT_S, _LOOK_AGAIN_S, tested=True)
            for kind in self._kinds:
                if time.monotonic() > until_s:
                    break
                rows.append(row := await self._kind(kind, cuts))
                self._console.print(f"  {row}", style="dim", markup=False)
        return rows

    async def _kind(self, kind: str, cuts: int) -> dict[str, Any]:
        requests: list[dict[str, Any]] = []
        said: list[Said] = []
        recoveries: list[dict[str, Any]] = []
        kills = cut = 0
        while cut < cuts:
            wave = make_requests(self._kinds[kind], self._choose)
            fault = signal.SIGSTOP if kills else signal.SIGKILL
            answers, there, found = await self._wave(wave, fault)
            requests, said, recoveries = requests + wave, said + answers, recoveries + found
            kills, cut = kills + bool(there), cut + there
        calm = said  # What is drawn has no other run to be compared with.
        if not kind.endswith(_DRAWN):
            starts = range(0, len(requests), WAVE)
            calm = [each for at in starts for each in await self._calm(requests, at)]
        ended = [each for each in said if each.has_ended]
        pairs = list(zip(said, calm, strict=True))
        equal = [is_equal(*pair) for pair in pairs]
        explicit = [bool(one.errors) and one.is_begin_of(other) for one, other in pairs]
        gaps_s = sorted(row["gap_s"] for row in recoveries if row["gap_s"] is not None)
        return {
            "kind": kind,
            "streams": len(said),
            "cut": cut,
            "recoveries": dict(Counter(row["option"] for row in recoveries)),
            "known_tokens": sum(row["produced_tokens"] for row in recoveries),
            "kills": kills,
            "equal": sum(equal),
            "explicit_errors": sum(explicit),
            "wrong": sum(not (a or b) for a, b in zip(equal, explicit, strict=True)),
            "marked": sum(not each.exact for each in said),
            "errors": sum(bool(each.errors) for each in said),
            "json_ended": len(ended) if _is_json(kind) else 0,
            "json_valid": sum(each.is_json for each in ended) if _is_json(kind) else 0,
            "gap_s_p50": round(gaps_s[len(gaps_s) // 2], 3) if gaps_s else None,
            "gap_s_max": round(gaps_s[-1], 3) if gaps_s else None,
        }

    async def _calm(self, requests: Sequence[dict[str, Any]], at: int) -> list[Said]:
        return await asyncio.gather(
            *(self._ask(request, Said()) for request in requests[at : at + WAVE])
        )

    async def _wave(
        self, requests: Sequence[dict[str, Any]], fault: signal.Signals
    ) -> tuple[list[Said], int, list[dict[str, Any]]]:
        """The answers, how many of them the victim was giving, and the recoveries. Nothing is hit
        where all streams have ended.
        """
        start_s, least = time.time(), self._choose.randint(*UNDER_WAY_CHARACTERS)
        said = [Said() for _ in requests]
        asked = [asyncio.create_task(self._ask(*each)) for each in zip(requests, said, strict=True)]
        while any(
            each.characters < least
            for task, each in zip(asked, said, strict=True)
            if not task.done()
        ):
            await asyncio.sleep(_LOOK_AGAIN_S)
        there = Counter(each["decode"] for each in (await self._port.state())["streams"])
        if not there:
            return await asyncio.gather(*asked), 0, []
        victim = self._choose.choice(sorted(there))
        self._servers.signal(victim, fault)
        await asyncio.gather(*asked)
        recoveries = [
            row for row in (await self._port.state())["recoveries"] if row["at_s"] >= start_s
        ]
        await asyncio.to_thread(self._bring_back, victim, fault)
        await self._port.wait_all_up(UP_TIMEOUT_S, _LOOK_AGAIN_S, tested=True)
        return said, there[victim], recoveries

    def _bring_back(self, victim: str, fault: signal.Signals) -> None:
        if fault is signal.SIGSTOP:
            self._servers.signal(victim, signal.SIGCONT)
        else:
            self._servers.start(victim)
            self._servers.wait_ready(victim)

    async def _ask(self, request: dict[str, Any], said: Said) -> Said:
        # A connection that breaks leaves an answer that is neither whole nor ended by an error.
        with suppress(aiohttp.ClientPayloadError, TimeoutError):
            async with self._http.post(self._url, json=request) as answer:
                said.exact = "x-kvrs-exact" not in answer.headers
                if answer.status != 200:
                    said.errors.append(await answer.text())
                async for line in answer.content:
                    if line.startswith(b"data: {"):
                        said.take(json.loads(line[6:]))
                    said.is_done |= line.startswith(b"data: [DONE]")
        return said


def is_equal(said: Said, calm: Said) -> bool:
    """Both are whole, and the same but for the mark, which the first stream of a proxy lacks."""
    is_alike = alike(vars(said) | {"exact": None}, vars(calm) | {"exact": None})
    return said.is_done and not said.errors and is_alike


def _is_json(kind: str) -> bool:
    return kind.startswith(("JSON", "tools"))


def faults_of(row: dict[str, Any], *, is_stock: bool = False) -> list[str]:
    """The parts of the claim that a kind of streams does not bear out."""
    faults = []
    if row["json_valid"] != row["json_ended"]:
        faults.append(f"{row['json_ended'] - row['json_valid']} are no JSON")
    if row["kind"].endswith(_DRAWN) and row["recoveries"]:
        faults.append("streams went on with other random numbers")
    if is_stock:
        if row["wrong"]:
            faults.append(f"{row['wrong']} streams are neither equal nor ended by an error")
        return faults
    if row["equal"] != row["streams"]:
        faults.append(f"{row['streams'] - row['equal']} streams are not equal")
    faults += [f"{row[name]} {name}" for name in ("marked", "errors") if row[name]]
    if set(row["recoveries"]) != {"replay"}:
        faults.append(f"recovered by {row['recoveries']}")
    return faults


def table_of(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(
        *("kind", "kills", "streams", "cut", "equal", "errors", "wrong", "JSON", "known tokens"),
        "gap p50/max s",
    )
    for row in rows:
        table.add_row(
            row["kind"],
            *map(str, (row["kills"], row["streams"], row["cut"])),
            *map(str, (row["equal"], row["explicit_errors"], row["wrong"])),
            f"{row['json_valid']} of {row['json_ended']}" if _is_json(row["kind"]) else "",
            str(row["known_tokens"]),
            f"{row['gap_s_p50']} / {row['gap_s_max']}",
        )
    return table


def add_marks(model: Path) -> None:
    """Add the marks of a thought to the model's tokenizer, with ids that it never generates."""
    path = model / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    known = [each["id"] for each in tokenizer["added_tokens"]]
    known += tokenizer["model"]["vocab"].values()
    for number, mark in enumerate(("<think>", "</think>"), max(known) + 1):
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        tokenizer["added_tokens"].append({"id": number, "content": mark, "special": True} | flags)
    path.write_text(json.dumps(tokenizer))


def _of_vllm(options: argparse.Namespace) -> tuple[dict[str, dict[str, Any]], list[str], str]:
    """Kinds, flags of the servers, and the result's name."""
    kinds, flags, name = KINDS, [*FLAGS], "vllm-replay"
    if options.thoughts:
        kinds, flags, name = THOUGHTS, [*flags, *PARSER], "vllm-thoughts"
    elif options.stock or options.forced:
        kinds = {kind: KINDS[kind] for kind in FORCED}
        name = "vllm-forced" if options.forced else name
    if options.gpu:
        flags, name = [*flags, *GPU_FLAGS], f"{name}-gpu"
    return kinds, flags, f"{name}-stock" if options.stock else name


def _of_sglang(options: argparse.Namespace) -> tuple[dict[str, dict[str, Any]], list[str], str]:
    if options.thoughts:
        return SGLANG_THOUGHTS, [*SGLANG_FLAGS, *SGLANG_PARSER], "sglang-thoughts"
    return SGLANG_KINDS, [*SGLANG_FLAGS], "sglang-forced"


def _servers(options: argparse.Namespace, directory: Path, flags: Sequence[str]) -> EngineServers:
    if options.cluster == "sglang":
        config = sglang_config(directory, ALONE)
        return SglangServers(config, os.environ[SGLANG_PYTHON_ENV], *flags)
    config = vllm_config(directory, ALONE if options.gpu else HANDED_OVER)
    servers = VllmServers(config, os.environ[PYTHON_ENV], *flags)
    servers.environment = BATCH_INVARIANT if options.gpu else {}
    servers.replays = not options.stock
    return servers


def run(options: argparse.Namespace) -> int:
    console, record = Console(record=True, width=130), Record(options.seed)
    cuts, until_s = options.kills or CUTS, time.monotonic() + (options.limit_s or math.inf)
    is_sglang = options.cluster == "sglang"
    kinds, flags, name = (_of_sglang if is_sglang else _of_vllm)(options)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = _servers(options, directory, flags)
        if options.thoughts:
            add_marks(Path(servers.model))
        stack.enter_context(servers).start_all()
        servers.start_proxy(servers.config)
        rows = asyncio.run(Series(servers, kinds, console, options.seed).run(cuts, until_s))
        servers.stop_proxy()
    faults = [
        f"{row['kind']}: {fault}"
        for row in rows
        for fault in faults_of(row, is_stock=is_sglang or options.stock)
    ]
    console.print(table_of(rows))
    kills = sum(row["kills"] for row in rows)
    console.print(f"{kills} kills", "\n".join(faults) or "PASSED", sep="\n", markup=False)
    document = {"cuts_per_kind": cuts, "kills": kills, "kinds": rows}
    record.keep(options.out, name, document, console.export_text())
    return 1 if faults else 0
