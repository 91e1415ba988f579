"""A thousand requests, drawn with a seed, to which vLLM answers in unusual ways."""

import asyncio
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from experiments.field_requests.cluster import (
    MODEL,
    Answer,
    Cluster,
    body,
    cluster,
    prompt,
    text_after,
)
from experiments.field_requests.rows import Row
from experiments.field_requests.servers import Odd
from kvrs_testkit.odd_vllm import Oddity

REQUESTS, AT_A_TIME = 1000, 8
MOST_CALLS = 2  # That answer a request with an error.
_TOKENS = 6
_TOO_LONG = "This model's maximum context length is 4096 tokens."


@dataclass(frozen=True, slots=True)
class Kind:
    """A way to answer; `status`: what the client gets, `finish`: how a whole answer ends."""

    odd: Odd
    asks: str = "any"  # Or one kind of request.
    status: int = 200
    finish: str = "length"


def _finishing(reason: str) -> Kind:
    return Kind(Odd(reason, Oddity(finish=reason)), finish=reason)


KINDS = {
    "plain": Kind(Odd()),
    "usage_details": Kind(Odd("usage_details"), asks="usage"),
    "repetition": _finishing("repetition"),
    "content_filter": _finishing("content_filter"),
    "unknown_finish": _finishing("tomorrow"),
    "no_token_ids": Kind(Odd("no_token_ids", Oddity(hides_ids=True)), asks="no_ids"),
    "no_hand_off": Kind(Odd("no_hand_off", lacks_transfer=True)),
    "ends_at_once": Kind(Odd("ends_at_once", ends_at_once=True)),
    "picture": Kind(Odd("picture", Oddity(status=500)), asks="picture", status=500),
    "too_long": Kind(Odd("too_long", Oddity(status=400, message=_TOO_LONG)), status=400),
    "decode_error": Kind(Odd("decode_error", Oddity(status=500, stage="decode")), status=500),
    "error_event": Kind(
        Odd("error_event", Oddity(status=500, stage="decode", is_event=True)),
        asks="stream",
        status=500,
    ),
    "embeddings": Kind(Odd("embeddings"), asks="embeddings"),
    "embeddings_error": Kind(
        Odd("embeddings_error", Oddity(status=500)), asks="embeddings", status=500
    ),
}


def request_of(number: int, asks: str, rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Path and body of a request."""
    said = prompt(number, rng.randint(1, 30))
    if asks == "embeddings":
        return "/v1/embeddings", {"model": MODEL, "input": said}
    is_stream = asks in ("stream", "usage") or rng.random() < 0.7
    more: dict[str, Any] = {"stream": is_stream}
    if asks == "usage":
        more["stream_options"] = {"include_usage": True}
    if asks == "picture":
        url = {"type": "image_url", "image_url": {"url": "https://pictures.example/cat.png"}}
        content: Any = [{"type": "text", "text": said}, url]
    else:
        content = said
    if asks in ("picture", "no_ids") or rng.random() < 0.5:
        if asks == "no_ids":
            more["include_reasoning"] = False
        asked = {"model": MODEL, "messages": [{"role": "user", "content": content}]}
        return "/v1/chat/completions", asked | {"max_tokens": _TOKENS, "temperature": 0} | more
    return "/v1/completions", body(number, _TOKENS) | {"prompt": said} | more


def _is_as_wanted(kind: Kind, request: Mapping[str, Any], answer: Answer) -> bool:
    if kind.status != 200:
        said = kind.odd.answer.message
        return answer.status == kind.status and said in answer.error and not answer.is_done
    if "input" in request:
        return answer.status == 200
    if "messages" in request:
        asked = f"user: {request['messages'][0]['content']}\n"
    else:
        asked = str(request["prompt"])
    return answer.is_whole(text_after(asked, _TOKENS), kind.finish)


async def odd(seed: int) -> Row:
    """No server is to blame for any of these."""
    rng = random.Random(seed)
    kinds = [rng.choice([*KINDS]) for _ in range(REQUESTS)]
    asked = [request_of(n, KINDS[kind].asks, rng) for n, kind in enumerate(kinds)]
    row = Row("odd", wanted=REQUESTS)
    async with cluster(odd={n: KINDS[kind].odd for n, kind in enumerate(kinds)}) as system:
        begun_s = time.monotonic()
        answers = await _all_asked(system, asked)
        row.seconds = time.monotonic() - begun_s
        await asyncio.sleep(1.0)  # What was given up is freed, and counted.
        await row.take(system)
        row.more["by_kind"] = _by_kind(kinds, asked, answers, system)
    by_kind = row.more["by_kind"]
    row.answered = sum(each["as_wanted"] for each in by_kind.values())
    failing = {name: kind.odd.answer.stage for name, kind in KINDS.items() if kind.status != 200}
    most_refused = max(by_kind[name]["most_refused"] for name in failing)
    at_first = [name for name, stage in failing.items() if stage == "prefill"]
    most = max(by_kind[name]["most_calls"] for name in at_first)
    row.notes += [
        f"{name:<17}{each['requests']:>4} requests, {each['as_wanted']:>4} as wanted, at most "
        f"{each['most_calls']} calls, {each['most_refused']} of them answered with the error"
        + "".join(f"; got {said}" for said in each["others"])
        for name, each in by_kind.items()
    ]
    row.all_answered()
    row.bar("no server ejected or lost", is_met=not row.ejections and not row.deaths)
    row.bar(f"at most {MOST_CALLS} errors of a request", is_met=most_refused <= MOST_CALLS)
    row.bar(f"at most {MOST_CALLS} calls of one that the first refuses", is_met=most <= MOST_CALLS)
    return row


async def _all_asked(system: Cluster, asked: list[tuple[str, dict[str, Any]]]) -> list[Answer]:
    room = asyncio.Semaphore(AT_A_TIME)

    async def ask(path: str, request: dict[str, Any]) -> Answer:
        async with room:
            return await system.ask(request, path)

    return await asyncio.gather(*(ask(path, request) for path, request in asked))


def _by_kind(
    kinds: list[str],
    asked: list[tuple[str, dict[str, Any]]],
    answers: list[Answer],
    system: Cluster,
) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name, kind in KINDS.items():
        numbers = [n for n, each in enumerate(kinds) if each == name]
        wanted = [n for n in numbers if _is_as_wanted(kind, asked[n][1], answers[n])]
        others = {
            f"{answers[n].status} {answers[n].finish} {answers[n].error}".strip()[:120]
            for n in {*numbers} - {*wanted}
        }
        found[name] = {
            "requests": len(numbers),
            "as_wanted": len(wanted),
            "most_calls": max((len(system.seen.calls[n]) for n in numbers), default=0),
            "most_refused": max((system.seen.refused[n] for n in numbers), default=0),
            "others": sorted(others)[:3],
            "first_other": min({*numbers} - {*wanted}, default=None),
        }
    return found
