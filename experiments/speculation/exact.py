"""Streams of an instance with each source of drafts, compared answer by answer with those without:
token ids, log probabilities, texts, finish reasons, usage.

    python -m experiments.speculation.exact [--streams 2000] [--sources draft random]

The proxy and two instances are real. One of these is killed, stopped for a while and started again
at random; while it loads it makes drafts, and the weights of the draft are those of a pair, or
random. Where it is up, streams run at it, too, and are recovered. Nothing is timed.
"""

import asyncio
import os
import signal
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import msgspec
import torch

from experiments.command_line import parser_of
from experiments.record import Record
from experiments.rig import session_for
from kvrs.config.file import Config, parse_config
from kvrs.ids import InstanceId
from kvrs.protocol.instance import LoadReport, SpeculationReport
from kvrs_engine.engine.random_model import random_tokenizer, random_weights, write_model
from kvrs_engine.engine.speculation.pairs import DRAFT_LAYERS, write_pair
from kvrs_testkit.processes import Processes

SOURCES = ("draft", "random")
ASSISTED, HELPER = "d0", "d1"
ACCEPTANCE, DEPTH = 0.6, 4
AT_A_TIME = 12
PAGES = 4096
LOAD_S = 4.0  # Of the helper's model, whose draft is there before.
WHOLE_S = 300.0  # Of one answer.
LEASES_S = 60.0  # Within which the pages of ended streams are free again.
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["ka", "lo"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def request(number: int, seed: int) -> tuple[str, str, dict[str, Any]]:
    """The kind of a stream, its path and its body; the kinds come in turns."""
    random = Random(f"{seed} {number}")
    prompt = [random.randrange(4, 512) for _ in range(random.randrange(4, 120))]
    tokens = random.randrange(8, 96)
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": tokens, "seed": number}
    body |= {"temperature": 0.0, "return_token_ids": True, "logprobs": 2}
    chat = {"messages": [{"role": "user", "content": f"ka lo {number} mi"}], "max_tokens": 96}
    chat |= {"temperature": 0.0, "seed": number, "logprobs": True, "top_logprobs": 2}
    kinds: list[tuple[str, str, dict[str, Any]]] = [
        ("greedy", "completions", body | {"ignore_eos": True}),
        ("seeded", "completions", body | {"temperature": 0.7, "top_p": 0.95}),
        (
            "penalties",
            "completions",
            body | {"frequency_penalty": 0.6, "presence_penalty": 0.4},
        ),
        ("stops", "completions", body | {"stop": ["ka", "ren"], "min_tokens": 5}),
        ("n", "completions", body | {"n": 3, "temperature": 0.3}),
        (
            "JSON",
            "chat/completions",
            chat
            | {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "s", "schema": SCHEMA, "strict": True},
                }
            },
        ),
    ]
    kind, path, asked = kinds[number % len(kinds)]
    return kind, path, asked


def told(answer: dict[str, Any]) -> Any:
    """The parts of an answer that must not differ. How much of a prompt was cached depends on what
    came before.
    """
    usage = {name: count for name, count in answer["usage"].items() if not isinstance(count, dict)}
    return answer["choices"], usage


@dataclass
class Result:
    source: str
    answers: list[Any]
    tokens: int
    free_pages: int  # After all streams have ended.
    report: SpeculationReport | None
    deeds: Counter[str] = field(default_factory=Counter)


class Deployment:
    def __init__(
        self, processes: Processes, http: aiohttp.ClientSession, client: aiohttp.ClientSession
    ) -> None:
        """`http` proves the keys of instances; `client` talks to the proxy."""
        self._processes, self._http, self._client = processes, http, client
        instances = {one.id: one for _, one in processes.config.cluster.instances()}
        self._url = processes.config.url_of(instances[InstanceId(ASSISTED)])
        self._proxy = f"http://127.0.0.1:{processes.config.proxy.port}"

    async def load(self) -> LoadReport:
        async with self._http.get(f"{self._url}/kvrs/v1/load") as answer:
            return msgspec.json.decode(await answer.read(), type=LoadReport)

    async def all_ended(self) -> LoadReport:
        """The report once no lease keeps pages any more."""
        give_up_s = time.monotonic() + LEASES_S
        while True:
            found = await self.load()
            if found.free_pages == PAGES or time.monotonic() > give_up_s:
                return found
            await asyncio.sleep(0.5)

    async def ask(self, path: str, body: dict[str, Any]) -> Any:
        async with self._client.post(f"{self._proxy}/v1/{path}", json=body) as answer:
            if answer.status != 200:
                raise RuntimeError(f"{answer.status}: {await answer.text()}")
            return await answer.json()

    async def disturb(self, random: Random, deeds: Counter[str]) -> None:
        """Kill, stop and start the helper, until cancelled."""
        while True:
            self._processes.start(HELPER)
            deeds["started"] += 1
            await asyncio.sleep(random.uniform(2.0, 2.0 * LOAD_S))
            if random.random() < 0.5:
                os.kill(self._processes.pid(HELPER), signal.SIGSTOP)
                deeds["stopped"] += 1
                await asyncio.sleep(random.uniform(0.2, 3.0))
                os.kill(self._processes.pid(HELPER), signal.SIGCONT)
                await asyncio.sleep(random.uniform(0.0, 2.0))
            self._processes.kill(HELPER)
            deeds["killed"] += 1


def config_of(source: str, models: Path) -> Config:
    nodes = [{"id": f"n{n}", "instances": [{"id": f"d{n}", "role": "both"}]} for n in range(2)]
    target = models / "target"
    total = (target / "model.safetensors").stat().st_size
    speculation: dict[str, Any] = {"source": "off"}
    if source in ("draft", "random"):
        speculation = {"source": "draft", "draft": str(models / source), "depth": DEPTH}
    engine = {"pages": PAGES, "disk_bytes_per_s": total / LOAD_S}
    return parse_config(
        {
            "cluster": {"nodes": nodes, "model": str(target), "engine": engine},
            # A self-test has drafts that are right, whatever the source makes.
            "proxy": {"port": 0, "admin_port": 0, "self_test": False},
            "speculation": speculation,
        }
    )


async def run(source: str, models: Path, streams: int, seed: int) -> Result:
    with Processes(config_of(source, models)) as processes:
        processes.start(ASSISTED, HELPER)
        await asyncio.to_thread(processes.wait_ready, ASSISTED, HELPER)
        await asyncio.to_thread(processes.start_proxy)
        timeout = aiohttp.ClientTimeout(total=WHOLE_S)
        async with session_for(processes) as http, aiohttp.ClientSession(timeout=timeout) as client:
            at = Deployment(processes, http, client)
            deeds, disturbing = Counter[str](), None
            if source != "off":
                processes.kill(HELPER)
                disturbing = asyncio.create_task(at.disturb(Random(seed), deeds))
            slots = asyncio.Semaphore(AT_A_TIME)

            async def one(number: int) -> Any:
                _, path, body = request(number, seed)
                async with slots:
                    return await at.ask(path, body)

            answers = await asyncio.gather(*map(one, range(streams)))
            if disturbing is not None:
                disturbing.cancel()
                await asyncio.wait({disturbing})
                if not disturbing.cancelled():
                    disturbing.result()
            after = await at.all_ended()
            tokens = sum(answer["usage"]["completion_tokens"] for answer in answers)
            told_answers = [*map(told, answers)]
            return Result(source, told_answers, tokens, after.free_pages, after.speculation, deeds)


def row_of(result: Result, calm: Result, seed: int) -> dict[str, Any]:
    different = Counter[str]()
    for number, (one, other) in enumerate(zip(result.answers, calm.answers, strict=True)):
        different[request(number, seed)[0]] += one != other
    report = result.report or SpeculationReport(result.source)
    return {
        "source": result.source,
        "streams": len(result.answers),
        "tokens": result.tokens,
        "different": different.total(),
        "different_by_kind": {kind: count for kind, count in different.items() if count},
        "steps": report.steps,
        "proposed": report.proposed,
        "accepted": report.accepted,
        "stale": report.stale,
        "deeds": dict(result.deeds),
        "free_pages_after": result.free_pages,
    }


def as_text(rows: list[dict[str, Any]]) -> str:
    lines = [
        "streams that differ from those without drafts; drafts; what befell the helper",
        "  source  streams  tokens  different  proposed  accepted  stale  started stopped killed "
        "  free pages",
    ]
    for row in rows:
        deeds = row["deeds"]
        lines.append(
            f"  {row['source']:7} {row['streams']:7} {row['tokens']:7} {row['different']:10} "
            f"{row['proposed']:9} {row['accepted']:9} {row['stale']:6} "
            f"{deeds.get('started', 0):8} {deeds.get('stopped', 0):7} {deeds.get('killed', 0):6} "
            f"{row['free_pages_after']:6} of {PAGES}"
        )
    return "\n".join(lines) + "\n"


def faults_of(rows: list[dict[str, Any]]) -> list[str]:
    """The parts of the claim that the result does not bear out."""
    faults = []
    for row in rows:
        name = row["source"]
        if row["different"]:
            faults.append(f"{name}: {row['different']} streams differ: {row['different_by_kind']}")
        if row["free_pages_after"] != PAGES:
            faults.append(f"{name}: pages are missing")
        if name == "off":
            continue
        if not row["proposed"]:
            faults.append(f"{name}: nothing was proposed")
        if name != "random" and not row["accepted"]:
            faults.append(f"{name}: nothing was accepted")
    return faults


def write_models(directory: Path, seed: int) -> None:
    """Target and draft of a pair, and a draft of other weights, as small as that one: no other is
    used.
    """
    write_pair(directory, ACCEPTANCE, seed)
    tokenizer = random_tokenizer(seed)
    torch.manual_seed(seed)
    write_model(directory / "random", tokenizer, random_weights(seed + 1, tokenizer, DRAFT_LAYERS))


def main() -> int:
    parser = parser_of(__doc__, __file__, seed=0)
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--sources", nargs="+", choices=SOURCES, default=SOURCES)
    options = parser.parse_args()
    record, rows = Record(options.seed, timed=False), []
    with tempfile.TemporaryDirectory() as directory:
        models = Path(directory)
        write_models(models, options.seed)
        calm = asyncio.run(run("off", models, options.streams, options.seed))
        rows.append(row_of(calm, calm, options.seed))
        for source in options.sources:
            found = asyncio.run(run(source, models, options.streams, options.seed))
            rows.append(row_of(found, calm, options.seed))
            print(f"  {rows[-1]}", flush=True)
    faults = faults_of(rows)
    text = as_text(rows) + "\n".join(faults or ["PASSED"]) + "\n"
    print(text, end="")
    record.keep(options.out, "exact", {"rows": rows}, text)
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
