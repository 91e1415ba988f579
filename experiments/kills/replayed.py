"""Real vLLM under a proxy: streams whose next token depends on more than the tokens before it.

Chats with a grammar, a tool call, penalties, log probabilities or a seed run in waves; in each wave
a decode server hangs, or in the first one of a kind is killed, when all streams are under way. The
same requests run undisturbed afterwards. With `--stock` the servers have no processor, so that each
stream is equal, or ends with an error; `--thoughts` starts them with a reasoning parser.
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
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from experiments.kills.vllm import STREAM_TIMEOUT_S, UP_TIMEOUT_S, strike
from experiments.kills.vllm_figures import Death
from experiments.record import Record
from kvrs.net.admin import AdminClient
from kvrs_engine.engine.random_model import SYLLABLES
from kvrs_lab.load.admin_port import AdminPort
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
# With --gpu, which has no room for a prefill server.
ALONE = {"n0": ("d0",), "n1": ("d1",)}
FLAGS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
UNDER_WAY_TOKENS = (3, 60)
# Between two runs in batches of other sizes, of a log probability.
_ROUNDING = 1e-3
_LOOK_AGAIN_S = 0.01
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 100_000},
        "tags": {
            "type": "array",
            "items": {"type": "string", "maxLength": 12},
            "minItems": 2,
            "maxItems": 6,
        },
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
_JSON = {
    "max_tokens": 1000,
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": _SCHEMA}},
}
_TOOLS = {
    "max_tokens": 1000,
    "tools": [{"type": "function", "function": {"name": "put", "parameters": _SCHEMA}}],
    "tool_choice": {"type": "function", "function": {"name": "put"}},
}
_LONG = {"max_tokens": 300, "ignore_eos": True}
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
# At stock servers: those that are not continued from their ids.
STOCK = ("JSON schema", "JSON schema, seeded", "tools", "tools, seeded")
# All that a random model generates is a thought to the parser, which waits for its end.
PARSER = ("--reasoning-parser", "deepseek_r1")
THOUGHTS: dict[str, dict[str, Any]] = {
    "thoughts": _LONG,
    "thoughts, seeded": _LONG | {"temperature": 1.0},
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

    def take(self, event: Any) -> None:
        if "error" in event:
            self.errors.append(event["error"])
            return
        for choice in event["choices"]:
            delta = choice["delta"]
            self.ids += choice.get("token_ids") or ()
            self.text += delta.get("content") or ""
            self.thought += delta.get("reasoning") or ""
            for call in delta.get("tool_calls") or ():
                function, index = call["function"], call["index"]
                part = (function.get("name") or "") + (function.get("arguments") or "")
                self.calls[index] = self.calls.get(index, "") + part
            self.logprobs += (choice.get("logprobs") or {}).get("content") or ()
            self.finish = choice["finish_reason"] or self.finish

    @property
    def has_ended(self) -> bool:
        """By itself: what it says is whole."""
        return self.finish in ("stop", "tool_calls")

    def is_begin_of(self, calm: "Said") -> bool:
        """An answer that ended with an error has nothing that the calm one has not."""
        parts = [(self.text, calm.text), (self.thought, calm.thought)]
        parts += [(text, calm.calls.get(index, "")) for index, text in self.calls.items()]
        is_begin = self.ids == calm.ids[: len(self.ids)]
        return is_begin and self.finish is None and all(b.startswith(a) for a, b in parts)

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
        {"temperature": 0, "stream": True, "return_token_ids": True}
        | fields
        | {
            "seed": choose.randrange(1 << 30),
            "messages": [{"role": "user", "content": " ".join(choose.choices(SYLLABLES, k=12))}],
        }
        for _ in range(WAVE)
    ]


class Series:
    def __init__(
        self, servers: VllmServers, kinds: dict[str, dict[str, Any]], console: Console, seed: int
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
        while len(recoveries) < cuts:
            wave = make_requests(self._kinds[kind], self._choose)
            death = Death.HANG if requests else Death.SERVER
            answers, found = await self._wave(wave, death)
            requests, said, recoveries = requests + wave, said + answers, recoveries + found
        calm = [
            each for at in range(0, len(requests), WAVE) for each in await self._calm(requests, at)
        ]
        ended = [each for each in said if each.has_ended]
        pairs = list(zip(said, calm, strict=True))
        equal = [alike(_without_mark(one), _without_mark(other)) for one, other in pairs]
        explicit = [bool(one.errors) and one.is_begin_of(other) for one, other in pairs]
        gaps_s = sorted(row["gap_s"] for row in recoveries if row["gap_s"] is not None)
        return {
            "kind": kind,
            "streams": len(said),
            "recoveries": dict(Counter(row["option"] for row in recoveries)),
            "known_tokens": sum(row["produced_tokens"] for row in recoveries),
            "kills": len(requests) // WAVE,
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
        return await asyncio.gather(*map(self._ask, requests[at : at + WAVE]))

    async def _wave(
        self, requests: Sequence[dict[str, Any]], death: Death
    ) -> tuple[list[Said], list[dict[str, Any]]]:
        """The answers, and the recoveries of streams that were at the victim."""
        start_s, least = time.time(), self._choose.randint(*UNDER_WAY_TOKENS)
        asked = [asyncio.create_task(self._ask(request)) for request in requests]
        while True:
            streams = (await self._port.state())["streams"]
            open_now = sum(not task.done() for task in asked)
            under_way = [each for each in streams if each["output_tokens"] >= least]
            if open_now == 0 or (len(under_way) == len(streams) == open_now):
                break
            await asyncio.sleep(_LOOK_AGAIN_S)
        victim = self._choose.choice(["d0", "d1"])
        strike(self._servers, victim, death)
        answers = await asyncio.gather(*asked)
        recoveries = [
            row for row in (await self._port.state())["recoveries"] if row["at_s"] >= start_s
        ]
        await asyncio.to_thread(self._bring_back, victim, death)
        await self._port.wait_all_up(UP_TIMEOUT_S, _LOOK_AGAIN_S, tested=True)
        return answers, recoveries

    def _bring_back(self, victim: str, death: Death) -> None:
        if death is Death.HANG:
            self._servers.signal(victim, signal.SIGCONT)
        else:
            self._servers.start(victim)
            self._servers.wait_ready(victim)

    async def _ask(self, request: dict[str, Any]) -> Said:
        async with self._http.post(self._url, json=request) as answer:
            said = Said(exact="x-kvrs-exact" not in answer.headers)
            raw = (await answer.read()).decode()
        if answer.status != 200:
            said.errors.append(raw)
        for line in raw.splitlines():
            if line.startswith("data: {"):
                said.take(json.loads(line[6:]))
        return said


def _without_mark(said: Said) -> dict[str, Any]:
    """The answer without its mark, which the first stream of a proxy lacks."""
    return vars(said) | {"exact": None}


def _is_json(kind: str) -> bool:
    return kind.startswith(("JSON", "tools"))


def faults_of(row: dict[str, Any], *, is_stock: bool = False) -> list[str]:
    """The parts of the claim that a kind of streams does not bear out."""
    faults = []
    if is_stock:
        if row["wrong"]:
            faults.append(f"{row['wrong']} streams are neither equal nor ended by an error")
        return faults
    if row["equal"] != row["streams"]:
        faults.append(f"{row['streams'] - row['equal']} streams are not equal")
    faults += [f"{row[name]} {name}" for name in ("marked", "errors") if row[name]]
    if set(row["recoveries"]) != {"replay"}:
        faults.append(f"recovered by {row['recoveries']}")
    if row["json_valid"] != row["json_ended"]:
        faults.append(f"{row['json_ended'] - row['json_valid']} are no JSON")
    return faults


def table_of(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(
        *("kind", "kills", "streams", "cut", "equal", "errors", "wrong", "JSON", "known tokens"),
        "gap p50/max s",
    )
    for row in rows:
        table.add_row(
            row["kind"],
            *map(str, (row["kills"], row["streams"], sum(row["recoveries"].values()))),
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


def run(options: argparse.Namespace) -> int:
    console, record = Console(record=True, width=130), Record(options.seed)
    cuts, until_s = options.kills or CUTS, time.monotonic() + (options.limit_s or math.inf)
    flags = (*FLAGS, *GPU_FLAGS) if options.gpu else FLAGS
    kinds, name = KINDS, "vllm-replay-gpu" if options.gpu else "vllm-replay"
    if options.thoughts:
        kinds, flags, name = THOUGHTS, (*flags, *PARSER), "vllm-thoughts"
    elif options.stock:
        kinds = {kind: KINDS[kind] for kind in STOCK}
    if options.stock:
        name += "-stock"
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        config = vllm_config(directory, ALONE if options.gpu else HANDED_OVER)
        if options.thoughts:
            add_marks(Path(str(config.cluster.model)))
        servers = VllmServers(config, os.environ[PYTHON_ENV], *flags)
        servers.environment = BATCH_INVARIANT if options.gpu else {}
        servers.replays = not options.stock
        stack.enter_context(servers).start_all()
        servers.start_proxy(servers.config)
        rows = asyncio.run(Series(servers, kinds, console, options.seed).run(cuts, until_s))
        servers.stop_proxy()
    faults = [
        f"{row['kind']}: {fault}"
        for row in rows
        for fault in faults_of(row, is_stock=bool(options.stock))
    ]
    console.print(table_of(rows))
    console.print("\n".join(faults) or "PASSED", markup=False)
    document = {"cuts_per_kind": cuts, "kinds": rows}
    record.keep(options.out, name, document, console.export_text())
    return 1 if faults else 0
