"""Requests that wait for long computations, and streams of an engine that stops."""

import asyncio
import os
import sys
import time

from experiments.field_requests.cluster import Answer, Cluster, body, cluster, prompt, text_after
from experiments.field_requests.rows import Row
from experiments.field_requests.servers import FieldVllm

LONG_S = 30.0
QUEUED, EACH_S = 20, 2.0
EMBEDDING_S = 20.0
RECOMPUTED_S, CUT_AT = 60.0, 20
STREAMS, LATE = 50, 10
_WEDGED_TOKENS, _WEDGED_PACE_S, _BEFORE_S = 100, 0.2, 4.0
LEFT_S, PREDICTED_S = 10.0, 1.0  # The bar: the first, and twice what is predicted at most.
AFTER_S = 2.0  # For a history of 0.1 s at another server, and its tokens.
CALM, AT_A_TIME = 1000, 50
_ESTIMATED_TOKENS = 47  # Of a prompt, by a proxy without its tokenizer.
_TOKENS = 20


def _are_whole(answers: dict[int, Answer], tokens: int) -> int:
    return sum(each.is_whole(text_after(prompt(n), tokens)) for n, each in answers.items())


def _note_errors(row: Row, answers: dict[int, Answer], tokens: int) -> None:
    """Say what others than whole answers were, a few of them."""
    others = [each for n, each in answers.items() if not _are_whole({n: each}, tokens)]
    said = {f"{each.status} {each.error or each.finish}"[:160] for each in others}
    row.notes += [f"not whole: {each}" for each in sorted(said)[:3]]


async def _asked(
    system: Cluster, numbers: range, tokens: int, begun_s: float, ended: dict[int, float]
) -> dict[int, Answer]:
    """All at once; `ended`: when each had its answer."""

    async def ask(number: int) -> Answer:
        answer = await system.ask(body(number, tokens))
        ended[number] = time.monotonic() - begun_s
        return answer

    answers = await asyncio.gather(*(ask(number) for number in numbers))
    return dict(zip(numbers, answers, strict=True))


async def _take_all(row: Row, system: Cluster, *killed: str) -> None:
    """Ask all that the row wants, at once, and note what comes of it."""
    begun_s, ended = time.monotonic(), dict[int, float]()
    answers = await _asked(system, range(row.wanted), _TOKENS, begun_s, ended)
    row.answered, row.seconds = _are_whole(answers, _TOKENS), max(ended.values())
    _note_errors(row, answers, _TOKENS)
    await row.take(system, *killed)


async def long(_: int) -> Row:
    """A prompt whose prefill shows no sign of progress before its end."""
    row = Row("long", wanted=1)
    async with cluster((LONG_S,)) as system:
        await _take_all(row, system)
        called = sorted(name[0] for name in system.seen.calls[0])
    row.all_answered()
    row.bar("engine calls: 1 prefill, 1 decode", is_met=called == ["d", "p"])
    row.bar("no server ejected", is_met=not row.ejections)
    return row


async def queued(_: int) -> Row:
    """Prompts that prefill takes one after the other."""
    row = Row("queued", wanted=QUEUED)
    async with cluster((EACH_S,), lanes=1) as system:
        await _take_all(row, system)
    row.all_answered()
    row.bar("each computed once", is_met=row.computed == 1)
    row.bar("no server ejected", is_met=not row.ejections)
    return row


async def embeddings(_: int) -> Row:
    row = Row("embeddings", wanted=1)
    async with cluster((EMBEDDING_S,)) as system:
        begun_s = time.monotonic()
        answer = await system.ask({"model": "tiny", "input": prompt(0)}, "/v1/embeddings")
        row.answered, row.seconds = int(answer.status == 200), time.monotonic() - begun_s
        row.notes += [f"not answered: {answer.status} {answer.error}"] * (answer.status != 200)
        await row.take(system)
    row.all_answered()
    row.bar("one engine call", is_met=row.calls == 1)
    row.bar("no server ejected", is_met=not row.ejections)
    return row


async def recomputed(_: int) -> Row:
    """A stream whose decode server dies, with a history that takes a minute to compute again, in
    one step: no counter moves.
    """
    return await _recomputed(Row("recomputed", wanted=1), in_chunks=False)


async def in_chunks(_: int) -> Row:
    """The same, with counters that move as those of a prefill in chunks."""
    return await _recomputed(Row("in_chunks", wanted=1), in_chunks=True)


async def _recomputed(row: Row, *, in_chunks: bool) -> Row:
    tokens = 2 * CUT_AT
    async with cluster((0.0, RECOMPUTED_S), pause_s=0.1) as system:
        for server in system.servers.values():
            server.in_chunks = in_chunks
        begun_s, ended = time.monotonic(), dict[int, float]()
        asked = asyncio.create_task(_asked(system, range(1), tokens, begun_s, ended))
        streams = (await system.state())["streams"]
        while not streams or streams[0]["output_tokens"] < CUT_AT:
            await asyncio.sleep(0.02)
            streams = (await system.state())["streams"]
        killed = streams[0]["decode"]
        await system.servers[killed].kill()
        answers = await asked
        row.answered, row.seconds = _are_whole(answers, tokens), ended[0]
        row.more |= {"cut_at": streams[0]["output_tokens"], "calls": system.seen.calls[0]}
        _note_errors(row, answers, tokens)
        await row.take(system, killed)
        row.note_causes()
    row.all_answered()
    row.bar("computed once, and once after the death", is_met=row.computed == 2)
    row.bar("no other server ejected", is_met=not row.ejections)
    return row


async def wedged(_: int) -> Row:
    """Streams of a server whose API answers while its engine computes nothing any more, and some
    that come after that.
    """
    row = Row("wedged", wanted=STREAMS + LATE)
    async with cluster(pause_s=_WEDGED_PACE_S) as system:
        begun_s, ended = time.monotonic(), dict[int, float]()
        tokens = _WEDGED_TOKENS
        first = asyncio.create_task(_asked(system, range(STREAMS), tokens, begun_s, ended))
        await asyncio.sleep(_BEFORE_S)
        wedge, wedged_s = system.servers["d0"], time.monotonic()
        row.more["streams_of_d0"] = len(wedge.held)
        wedge.computes.clear()
        numbers = range(STREAMS, STREAMS + LATE)
        late = asyncio.create_task(_asked(system, numbers, tokens, begun_s, ended))
        left_s, late_s = await asyncio.gather(
            _left(wedge, {*range(STREAMS)}, wedged_s), _left(wedge, {*numbers}, wedged_s)
        )
        answers = await first | await late
        row.answered, row.seconds = _are_whole(answers, tokens), max(ended.values())
        _note_errors(row, answers, tokens)
        await row.take(system, "d0")
        suspected = sorted(system.suspected)
        row.more |= {"left_s": left_s, "late_left_s": late_s, "suspected_d0": suspected}
    bar_s = LEFT_S + 2 * PREDICTED_S
    row.notes.append(
        f"{row.more['streams_of_d0']} streams were on d0, and had left after {left_s:.1f} s; those "
        f"without a token after {late_s:.1f} s"
    )
    row.bar(f"streams have left d0 within {bar_s:.0f} s", is_met=max(left_s, late_s) <= bar_s)
    row.all_answered()
    row.bar("no other server ejected", is_met=not row.ejections)
    return row


async def wedged_long(_: int) -> Row:
    """A prompt at one of two prefill servers, which computes nothing any more; a profile predicts
    30 s. Behind others the prompt would be awaited for their time, too.
    """
    row, token_s = Row("wedged_long", wanted=1), LONG_S / _ESTIMATED_TOKENS
    async with cluster((LONG_S, 0.1), token_s=token_s, names=("p0", "p1", "d0")) as system:
        system.servers["p0"].computes.clear()
        await _take_all(row, system, "p0")
        row.note_causes()
    bar_s = LEFT_S + 2 * LONG_S
    row.bar(f"all answered within {bar_s:.0f} s", is_met=row.seconds <= bar_s + AFTER_S)
    row.all_answered()
    row.bar("no other server ejected", is_met=not row.ejections)
    return row


async def busy(_: int) -> Row:
    """Streams of healthy servers while other processes take every core."""
    row = Row("busy", wanted=CALM)
    cores = os.cpu_count() or 1
    spin = (sys.executable, "-c", "while True: pass")
    async with cluster(pause_s=_WEDGED_PACE_S) as system:
        others = [await asyncio.create_subprocess_exec(*spin) for _ in range(cores)]
        try:
            begun_s, ended = time.monotonic(), dict[int, float]()
            turns = (range(at, at + AT_A_TIME) for at in range(0, CALM, AT_A_TIME))
            for numbers in turns:
                answers = await _asked(system, numbers, _TOKENS, begun_s, ended)
                row.answered += _are_whole(answers, _TOKENS)
                _note_errors(row, answers, _TOKENS)
            row.seconds = max(ended.values())
        finally:
            for each in others:
                each.kill()
                await each.wait()
        await row.take(system)
        row.note_causes()
    row.all_answered()
    row.bar("no failed attempt, no server lost", is_met=not row.failed_attempts + row.deaths)
    row.bar("no server ejected", is_met=not row.ejections)
    return row


async def _left(server: FieldVllm, numbers: set[int], since_s: float) -> float:
    """Seconds until none of these is on the server for half a second, or a minute."""
    last_s = since_s
    while time.monotonic() - max(last_s, since_s) < 0.5 or time.monotonic() - since_s < 1.0:
        if server.held & numbers and time.monotonic() - since_s < 6 * LEFT_S:
            last_s = time.monotonic()
        await asyncio.sleep(0.02)
    return last_s - since_s
