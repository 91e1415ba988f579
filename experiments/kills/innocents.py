"""Streams that did nothing, where instances are ended one after another or many at once, and
requests that end what they run on; before embedded engines and scripted vLLM servers.
"""

import argparse
import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from experiments.kills.beds import Bed, Prompt, open_bed
from experiments.record import Record

TOKENS = 32
BURST = 10
BURST_PAUSE_S = 4.5  # Ten kills take about as long as all bursts.
LONG = (900, 1700)  # Tokens of a prompt.
SHORT = (200, 600)
KILL_GAP_S = (1.0, 4.0)
AGAIN_S = (0.1, 0.5)  # After a moment at which none was at work.
KILLS = 10
SPREAD_S = 0.06
REQUESTS_PER_S = {"embedded": 6.0, "scripted": 20.0}
BESIDE = 40
POISON_TOKENS = 1711  # No other prompt is so long: the state shows where it runs.
POISON_DEATHS = 3  # The default of policy.recovery.poison_deaths.
LOOK_S = 0.01
ANSWER_S = 120.0
GIVE_UP_S = 240.0  # Of one cell and seed.
FIRST_ORDINARY_TOKEN, VOCAB_SIZE = 4, 500


@dataclass
class Answer:
    status: int = 0
    ids: list[int] = field(default_factory=list)
    code: str | None = None  # Of an error, before or after the first token.
    is_done: bool = False


async def ask(bed: Bed, prompt: Prompt, tokens: int = TOKENS) -> Answer:
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
    body |= {"return_token_ids": True, "ignore_eos": True}
    found = Answer()
    timeout = aiohttp.ClientTimeout(total=ANSWER_S)
    try:
        async with bed.session.post(
            f"{bed.url}/v1/completions", json=body, timeout=timeout
        ) as answer:
            found.status = answer.status
            if answer.status != 200:
                found.code = _code(await answer.read())
                return found
            async for line in answer.content:
                _take(found, line)
    except (aiohttp.ClientError, TimeoutError) as error:
        found.code = type(error).__name__
    return found


def _take(found: Answer, line: bytes) -> None:
    if line.startswith(b"data: [DONE]"):
        found.is_done = True
    elif line.startswith(b"data: {"):
        event = msgspec.json.decode(line[6:])
        if "error" in event:
            found.code = str(event["error"].get("code"))
        for choice in event.get("choices", ()):
            found.ids += choice.get("token_ids") or []


def _code(body: bytes) -> str:
    try:
        return str(msgspec.json.decode(body)["error"]["code"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return "no error of the API"


def verdict(answers: Sequence[Answer], expected: Sequence[list[int]]) -> dict[str, Any]:
    """Streams that were refused or lost, and tokens that came twice or are others."""
    refused = [each for each in answers if each.code == "poison"]
    whole = [
        (each, ids)
        for each, ids in zip(answers, expected, strict=True)
        if each.code is None and each.is_done
    ]
    short = sum(len(each.ids) < len(ids) for each, ids in whole)
    failed = [each for each in answers if each not in refused and not each.is_done]
    failed += [each for each in answers if each.is_done and each.code not in (None, "poison")]
    return {
        "streams": len(answers),
        "refused": len(refused),
        "lost": len(failed) + short,
        "repeated": sum(max(0, len(each.ids) - len(ids)) for each, ids in whole),
        "different": sum(
            one != other
            for each, ids in zip(answers, expected, strict=True)
            for one, other in zip(each.ids, ids, strict=False)
        ),
        "codes": dict(Counter(str(each.code) for each in answers if each.code is not None)),
    }


def draw(rng: random.Random, sizes: tuple[int, int]) -> Prompt:
    return [rng.randrange(FIRST_ORDINARY_TOKEN, VOCAB_SIZE) for _ in range(rng.randint(*sizes))]


async def at_work(bed: Bed) -> list[str]:
    """Prefill instances with streams, where all others are up."""
    state = await bed.state()
    down = {row["id"] for row in state["instances"] if row["health"] != "up"}
    busy = {row["prefill"] for row in state["streams"] if row["stage"] == "prefill"}
    return [] if down else [name for name in bed.prefills if name in busy]


async def one_by_one(bed: Bed, rng: random.Random, size: int, kills: int) -> dict[str, Any]:
    """Prefill instances at work are killed in turn, under bursts of long prompts."""
    prompts = [draw(rng, LONG) for _ in range(size)]
    asked: list[asyncio.Task[Answer]] = []

    async def ask_all() -> None:
        for at, prompt in enumerate(prompts):
            if at and at % BURST == 0:
                await asyncio.sleep(BURST_PAUSE_S)
            asked.append(asyncio.create_task(ask(bed, prompt)))

    async def kill() -> None:
        for _ in range(kills):
            await asyncio.sleep(rng.uniform(*KILL_GAP_S))
            # At moments that no request chooses: one that was killed for whenever it began would
            # do what a poisoned one does.
            while not (names := await at_work(bed)):
                await asyncio.sleep(rng.uniform(*AGAIN_S))
            await bed.end(rng.choice(names), signal.SIGKILL)

    killing = asyncio.create_task(kill())
    await ask_all()
    answers = await asyncio.gather(*asked)
    await _cancel(killing)
    return await _with_oracle(bed, prompts, answers)


async def half(bed: Bed, rng: random.Random, size: int, kills: int) -> dict[str, Any]:
    """Half of the instances are killed within a moment, again and again, under a load that lasts as
    long, of `size` streams at most.
    """
    prompts: list[Prompt] = []
    asked: list[asyncio.Task[Answer]] = []

    async def kill() -> None:
        for _ in range(kills):
            await bed.all_up()
            await asyncio.sleep(rng.uniform(*KILL_GAP_S))
            # One of each role stays.
            spared = {rng.choice(bed.prefills), rng.choice(bed.decodes)}
            names = [*bed.prefills, *bed.decodes]
            chosen = rng.sample([name for name in names if name not in spared], len(names) // 2)
            moments = [rng.uniform(0, SPREAD_S) for _ in chosen]
            await asyncio.gather(*map(kill_at, chosen, moments))

    async def kill_at(name: str, moment_s: float) -> None:
        await asyncio.sleep(moment_s)
        await bed.end(name, signal.SIGKILL)

    killing = asyncio.create_task(kill())
    while len(prompts) < size and not killing.done():
        prompts.append(draw(rng, SHORT))
        asked.append(asyncio.create_task(ask(bed, prompts[-1])))
        await asyncio.sleep(rng.expovariate(REQUESTS_PER_S[bed.engine]))
    answers = await asyncio.gather(*asked)
    await _cancel(killing)
    return await _with_oracle(bed, prompts, answers)


async def poison(bed: Bed, rng: random.Random, size: int, kills: int) -> dict[str, Any]:
    """One request ends every instance that computes its prompt, by an abort; others go on."""
    del kills
    prompts = [draw(rng, SHORT) for _ in range(size)]
    poisoned = draw(rng, (POISON_TOKENS, POISON_TOKENS))
    beside = []
    for prompt in prompts[: size // 2]:
        beside.append(asyncio.create_task(ask(bed, prompt)))
        await asyncio.sleep(rng.uniform(0, 0.1))
    asked = asyncio.create_task(ask(bed, poisoned))
    ending = asyncio.create_task(_end_where_it_runs(bed))
    for prompt in prompts[size // 2 :]:
        beside.append(asyncio.create_task(ask(bed, prompt)))
        await asyncio.sleep(rng.uniform(0, 0.1))
    answer = await asked
    await _cancel(ending)
    answers = await asyncio.gather(*beside)
    found = await _with_oracle(bed, prompts, answers)
    return found | {"poison_status": answer.status, "poison_code": answer.code}


async def _end_where_it_runs(bed: Bed) -> None:
    ended: set[tuple[str, int]] = set()
    while True:
        state = await bed.state()
        for row in state["streams"]:
            run = str(row["id"]), int(row["attempt"])
            if (
                row["prompt_tokens"] == POISON_TOKENS
                and row["stage"] == "prefill"
                and run not in ended
                and row["prefill"] is not None
                and await bed.end(row["prefill"], signal.SIGABRT)
            ):
                ended.add(run)
        await asyncio.sleep(LOOK_S)


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    if not task.cancelled() and (error := task.exception()) is not None:
        raise error


async def _with_oracle(
    bed: Bed, prompts: Sequence[Prompt], answers: Sequence[Answer]
) -> dict[str, Any]:
    ended = bed.ended
    expected = await bed.expected(prompts, TOKENS)
    if expected is None:
        await bed.all_up()
        await bed.forget()
        print("  the same requests undisturbed", flush=True)
        quiet = await _few_at_a_time(bed, prompts)
        if bad := [each for each in quiet if len(each.ids) != TOKENS]:
            raise RuntimeError(f"{len(bad)} undisturbed streams failed: {bad[0].code}")
        expected = [each.ids for each in quiet]
    return {"deaths": ended} | verdict(answers, expected)


async def _few_at_a_time(bed: Bed, prompts: Sequence[Prompt]) -> list[Answer]:
    places = asyncio.Semaphore(BURST)

    async def one(prompt: Prompt) -> Answer:
        async with places:
            return await ask(bed, prompt)

    return await asyncio.gather(*map(one, prompts))


Cell = Callable[[Bed, random.Random, int, int], Awaitable[dict[str, Any]]]
# By name: the cell, pairs of instances, streams, kills.
CELLS: dict[str, tuple[Cell, int, int, int]] = {
    "prefill": (one_by_one, 2, 80, KILLS),
    "half": (half, 4, 1500, KILLS),
    "poison": (poison, 4, BESIDE, 0),
}


async def measure(cell: str, engine: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    run, pairs, streams, kills = CELLS[cell]
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    began_s = time.monotonic()
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        open_bed(engine, pairs, seed, session) as bed,
        asyncio.timeout(GIVE_UP_S),
    ):
        await bed.all_up()
        rng = random.Random(f"{seed} {cell}")
        figures = await run(bed, rng, options.streams or streams, options.kills or kills)
    took_s = round(time.monotonic() - began_s, 1)
    return {"cell": cell, "engine": engine, "seed": seed, "took_s": took_s, **figures}


def is_met(row: dict[str, Any]) -> bool:
    kept = not any(row[key] for key in ("refused", "lost", "repeated", "different"))
    if row["cell"] != "poison":
        return kept and row["deaths"] > 0
    told = (row["poison_status"], row["poison_code"]) == (422, "poison")
    return kept and told and 0 < row["deaths"] <= POISON_DEATHS


def as_line(row: dict[str, Any]) -> str:
    line = (
        f"{row['cell']:10} {row['engine']:8} seed {row['seed']} {row['deaths']:3} deaths, "
        f"{row['streams']:3} streams: {row['refused']} refused, {row['lost']} lost; tokens: "
        f"{row['repeated']} repeated, {row['different']} different"
    )
    if row["cell"] == "poison":
        line += f"; the poison got {row['poison_status']} {row['poison_code']}"
    if row["lost"]:
        line += f" ({', '.join(f'{n} {code}' for code, n in row['codes'].items())})"
    return line + ("" if is_met(row) else ": MISSED")


def run(cell: str, engine: str, options: argparse.Namespace) -> int:
    # What is killed at once, or ends by a request, is the same for every seed.
    count = (options.seeds or 5) if cell == "prefill" else 1
    seeds = range(options.seed, options.seed + count)
    record = Record(*seeds, timed=False)  # No figure is a time.
    rows = []
    for seed in seeds:
        rows.append(asyncio.run(measure(cell, engine, seed, options)))
        print(as_line(rows[-1]), f"({rows[-1]['took_s']} s)", flush=True)
    text = "\n".join(map(as_line, rows))
    record.keep(options.out, f"{cell}-{engine}", {"rows": rows}, text)
    return 0 if all(map(is_met, rows)) else 1
