"""Carries the resume self-tests out: short streams by the calls of a recovery, straight at the
backends.

They are no streams of the driver, so that no metric, quota or record of failures counts them, and
none of them can delay a client's stream but by a few tokens' work at an instance.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, assert_never

import msgspec

from kvrs.core.fleet.generated import Continues, Generated, Likeness
from kvrs.core.fleet.tested import RestoreTest, SelfTest, TokensTest, TransferTest, names_of
from kvrs.core.model import actions as act
from kvrs.errors import UpstreamError
from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.instance import Capability, InstanceInfo, LeaseUpdate, Role
from kvrs.protocol.openai.chunks import CHUNK, ReceivedChoice
from kvrs.protocol.openai.fields import EMBEDDED, VLLM
from kvrs.protocol.speculation import SpeculationReport
from kvrs.proxy.backends.backend import Backend, RefusedError
from kvrs.proxy.backends.bodies import Call, decode_call, prefill_call
from kvrs.proxy.streams.driver import Driver
from kvrs.proxy.wire.journal import Journal
from kvrs.proxy.wire.peer import UNREADABLE, EngineError
from kvrs.proxy.wire.requests import COMPLETIONS, read
from kvrs.proxy.wire.upstream import EventReader

log = logging.getLogger(__name__)

NAME = "selftest-"  # Of its streams, before a number as long as that of any stream.
TOKENS = 12
CUT = 5
_SEED = 20_26
# No special ids of usual vocabularies, and few enough for the smallest.
_PROMPT_IDS = range(3, 35)
_PAGES = 2  # Full ones of the prompt, where the model has room for them.
_ROWS = 2  # The same of a test of rows.
_LOADS = 2  # Tries to load them.
_TIMEOUT_S = 60.0  # The first request of a vLLM may take half a minute.
_AT_ONCE = 4
# Counters of an engine may be published a moment after the answer.
_COUNTED_WITHIN_S = 3.0
_COUNT_PAUSE_S = 0.1


# Requests of what engines compile or load on first use, each by itself, since a server may refuse
# one of them. Without them a client's stream would wait for that, and all others of the instance
# too.
_WARM_UPS: Sequence[dict[str, Any]] = (
    {"logprobs": 1},
    {
        "temperature": 1.0,
        "top_p": 0.9,
        "top_k": 20,
        "seed": _SEED,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.1,
        "repetition_penalty": 1.1,
    },
    {
        "structured_outputs": {
            "json": {"type": "object", "properties": {"a": {"type": "string"}}},
        },
    },
)
_LISTED = 5  # Log probabilities at each position, of the likeliest tokens.
_ID_PREFIX = "token_id:"  # Before the number of a token, in the place of its text.


class _ShowsNothing(Exception):  # noqa: N818 - it is no error.
    """A test of rows has shown nothing, and is to be carried out later."""


class SelfTester:
    def __init__(self, driver: Driver, clock: Callable[[], float]) -> None:
        self._driver = driver
        self._control = driver.control
        self._tests = driver.control.self_tests
        self._clock = clock
        self._is_vllm = driver.is_vllm
        self._wake = asyncio.Event()
        self._tests.changed = self._wake.set

    async def run(self) -> None:
        """Test what comes up, until cancelled."""
        running: set[asyncio.Task[None]] = set()
        wakes = asyncio.create_task(self._wake.wait())
        try:
            while True:
                while len(running) < _AT_ONCE and (test := self._tests.next(self._clock())):
                    running.add(asyncio.create_task(self._carry_out(test)))
                retry_s = self._tests.next_retry_s()
                pause_s = None if retry_s is None else max(0.1, retry_s - self._clock())
                done, _ = await asyncio.wait(
                    {*running, wakes}, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done & running:
                    running.discard(task)
                    task.result()  # A bug ends this task, which is started again.
                if wakes in done:
                    self._wake.clear()
                    wakes = asyncio.create_task(self._wake.wait())
        finally:
            for task in (*running, wakes):
                task.cancel()
            await asyncio.gather(*running, wakes, return_exceptions=True)

    async def _carry_out(self, test: SelfTest) -> None:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await self._outcome(test)
        except (UpstreamError, RefusedError, TimeoutError) as error:
            cause = str(error) or f"no answer within {_TIMEOUT_S:g} s"
            if isinstance(error, RefusedError):
                cause = error.body.decode(errors="replace")[:300]
            self._tests.failed(test, cause, self._clock())
            extra = {"instances": names_of(test), "cause": cause}
            log.warning("self-test failed", extra=extra)
        except _ShowsNothing as reason:
            assert isinstance(test, RestoreTest)
            self._tests.put_off(test, str(reason), self._clock())
        except BaseException:
            if isinstance(test, RestoreTest):
                self._tests.put_off(test, "it was ended", self._clock())
            else:
                self._tests.failed(test, "it was ended", self._clock())
            raise
        for news in self._tests.news(names_of(test)):
            self._control.tell(news, self._clock())

    async def _outcome(self, test: SelfTest) -> None:
        match test:
            case TokensTest(instance=instance):
                found = await self._generate(instance)
                self._tests.generated(test, found)
                told = log.info if found.name else log.warning
                shown = self._tests.describe(instance) or {}
                seen = {name: shown.get(name) for name in ("continues", "drafts")}
                told("self-test", extra={"instance": instance, **seen})
                if shown.get("differs_from"):
                    extra = {"instance": instance, "others": shown["differs_from"]}
                    log.warning(
                        "self-test: computes other tokens than other instances", extra=extra
                    )
            case TransferTest(holder=holder, target=target):
                moved = await self._transfer(holder, target)
                self._tests.transferred(test, moved=moved)
                told = log.warning if moved is False else log.info
                told("self-test", extra={"from": holder, "to": target, "moves_kv": moved})
            case RestoreTest(holder=holder, target=target):
                fault, is_wrong = await self._restore(holder, target)
                self._tests.restored(test, fault, self._clock(), is_wrong=is_wrong)
                extra = {"from": holder, "to": target, "restores": not fault}
                if fault:
                    log.warning("self-test", extra=extra | {"cause": fault})
                else:
                    log.info("self-test", extra=extra)
            case _:
                assert_never(test)

    # Tokens.

    async def _generate(self, instance: InstanceId) -> Generated:
        """Whole streams first: the seeded one warms the sampler's kernels up. Then both are
        continued at once, in one batch, as after the loss of an instance. An engine that refuses to
        draw answers all that it takes as the greedy one. One that has a source of drafts gets some
        for what it continues, of which one is wrong.
        """
        if self._is_vllm:
            await self._warm_up(instance)
        before = (await self._backend(instance).load()).speculation
        journals = [self._journal(instance, None, lists=True), self._journal(instance, _SEED)]
        try:
            likeliest = await self._stream(instance, journals[0])
        except RefusedError:  # It gives fewer log probabilities, as of `--max-logprobs`.
            journals[0] = self._journal(instance, None)
            likeliest = await self._stream(instance, journals[0])
        try:
            await self._stream(instance, journals[1])
        except RefusedError:
            del journals[1]
        whole = [tuple(journal.output_ids) for journal in journals]
        try:
            rests = await asyncio.gather(
                *(
                    self._continue(instance, journal, drafted=before is not None)
                    for journal in journals
                )
            )
        except RefusedError:
            return Generated(whole[0], whole[-1], Continues.NONE, likeliest=likeliest)
        drafts = None if before is None else await self._drafts_since(instance, before)
        alike = [ids == rest for ids, rest in zip(whole, rests, strict=True)]
        continues = Continues.TEXT
        if alike[0]:
            continues = Continues.SEEDED if alike[-1] else Continues.GREEDY
        return Generated(whole[0], whole[-1], continues, drafts, likeliest)

    async def _warm_up(self, instance: InstanceId) -> None:
        """Have what is compiled on its first use be compiled now. A server that refuses any of it
        has none of it to compile.
        """
        fields = {
            "model": self._info(instance).model,
            "prompt": [*_PROMPT_IDS],
            "max_tokens": 4,
            "stream": True,
            "temperature": 0.0,
        }
        for feature in _WARM_UPS:
            call = Call(COMPLETIONS.path, fields | feature)
            with suppress(RefusedError, EngineError):
                await self._backend(instance).decode(call, EventReader())

    async def _continue(
        self, instance: InstanceId, journal: Journal, *, drafted: bool
    ) -> tuple[int, ...]:
        drafts = _with_a_wrong_one(journal.output_ids[CUT:]) if drafted else ()
        del journal.output_ids[CUT:]
        await self._stream(instance, journal, drafts=drafts)
        return tuple(journal.output_ids)

    async def _drafts_since(
        self, instance: InstanceId, before: SpeculationReport
    ) -> SpeculationReport:
        until_s = self._clock() + _COUNTED_WITHIN_S
        while True:
            after = (await self._backend(instance).load()).speculation or before
            if (found := after.since(before)).proposed or self._clock() > until_s:
                return found
            await asyncio.sleep(_COUNT_PAUSE_S)

    # KV.

    async def _transfer(self, holder: InstanceId, target: InstanceId) -> bool | None:
        """Test that KV of a history really comes from the holder to the target."""
        before = await self._backend(target).kv_received()
        if before is None:
            return None
        journal = self._journal(target, seed=None, tokens=CUT + 1)
        try:
            pulls = Capability.PULL_PAGES in self._info(target).capabilities
            if pulls and self._control.instances.known[holder].retains:
                await self._migrate(holder, target, journal)
            else:
                await self._hand_off(holder, target, journal)
        finally:
            await self._release(holder, journal)
        return await self._has_received(target, before)

    async def _migrate(self, holder: InstanceId, target: InstanceId, journal: Journal) -> None:
        """Bring back a stream that was prefilled at the holder, as a target that fetches pages
        does.
        """
        await self._prefill(holder, journal)
        journal.output_ids.extend(list(_PROMPT_IDS)[:CUT])
        info = self._info(holder)
        pages = journal.prompt_tokens // info.geometry.page_size_tokens
        await self._stream(target, journal, [act.PageRange(holder, 0, pages, info.epoch)])

    async def _hand_off(self, holder: InstanceId, target: InstanceId, journal: Journal) -> None:
        """Bring back a stream as an engine that fetches no pages does: the history goes to prefill
        once more.
        """
        transfer = await self._prefill(holder, journal)
        await self._stream(target, journal, transfer=transfer)
        del journal.output_ids[CUT:]
        transfer = await self._prefill(holder, journal)
        await self._stream(target, journal, transfer=transfer)

    async def _has_received(self, target: InstanceId, before: float) -> bool:
        until_s = self._clock() + _COUNTED_WITHIN_S
        while True:
            after = await self._backend(target).kv_received()
            if after is not None and after > before:
                return True
            if self._clock() > until_s:
                return False
            await asyncio.sleep(_COUNT_PAUSE_S)

    async def _release(self, holder: InstanceId, journal: Journal) -> None:
        if self._control.instances.known[holder].retains:
            update = LeaseUpdate(1.0, release=[journal.stream])
            await self._backend(holder).leases(update)

    # Rows at agents.

    async def _restore(self, holder: InstanceId, target: InstanceId) -> tuple[str, bool]:
        """Why the target does not go on rightly with rows that the holder's agent serves, by the
        server's own count of them and by the tokens (empty: it does), and whether that is for the
        tokens.
        """
        agent, row_tokens = self._rows_of(holder)
        length, limit = _ROWS * row_tokens + 1, self._info(target).max_model_len
        if limit and length > limit - TOKENS and (length := limit - TOKENS) <= row_tokens:
            return f"rows of {row_tokens} tokens; allowed for its model: {length - 1}", False
        lists, salt = bool(self._seen(target).likeliest), secrets.token_hex(8)
        whole = self._journal(target, None, prompt_tokens=length, lists=lists)
        wanted = await self._stream(target, whole)
        saved = self._journal(target, None, prompt_tokens=length, salt=salt)
        if self._info(holder).role is Role.PREFILL:
            if (transfer := await self._prefill(holder, saved, has_rows=True)) is not None:
                with suppress(UpstreamError, RefusedError):  # The hand-off ends by itself, later.
                    await self._backend(target).free_hand_off(transfer, saved.prompt_ids or ())
        else:
            await self._stream(holder, saved, has_rows=True)
        pages = length // self._info(target).geometry.page_size_tokens
        for _ in range(_LOADS):  # The last rows are there a moment after the answer.
            cut = self._journal(target, None, prompt_tokens=length, salt=salt, lists=lists)
            cut.output_ids[:] = whole.output_ids[:CUT]
            run = act.PageRange(agent, 0, pages, 0)
            found = await self._stream(target, cut, [run], has_rows=True)
            if loaded := await self._loaded_tokens(target, cut):
                break
        if not loaded:
            return f"loaded none of the rows that {agent} serves of {holder}", False
        if self._tests.goes_on(self._tests.processes.get(holder), target, sampled=False):
            computed, behind = (
                Generated(tuple(ids), (), Continues.GREEDY, likeliest=likeliest)
                for ids, likeliest in (
                    (whole.output_ids, wanted),
                    (cut.output_ids, (*wanted[:CUT], *found)),
                )
            )
            if computed.likeness(behind) is Likeness.OTHER:
                return f"goes on with other tokens behind rows of {holder}", True
        return "", False

    def _seen(self, target: InstanceId) -> Generated:
        """Tokens of the target, whose test comes before those of rows."""
        generated = self._tests.seen(target).generated
        assert generated is not None
        return generated

    def _rows_of(self, holder: InstanceId) -> tuple[InstanceId, int]:
        """The agent that serves them, and tokens of one.

        Raises:
            _ShowsNothing: no agent serves any, or their size in tokens is not told.
        """
        node = self._control.instances.known[holder].node
        if (agent := self._control.agents.by_node.get(node)) is not None and agent.report:
            for region in agent.report.rows.regions:
                if region.engine == holder and region.is_alive and region.row_tokens:
                    return agent.id, region.row_tokens
        raise _ShowsNothing(f"no agent serves rows of {holder}")

    async def _loaded_tokens(self, target: InstanceId, journal: Journal) -> int:
        """Raises _ShowsNothing: the server's counters are still shared with other streams."""
        until_s = self._clock() + _COUNTED_WITHIN_S
        while True:
            for fetch in (await self._backend(target).load()).fetches:
                if fetch.stream == journal.stream:
                    return fetch.loaded_tokens
            if self._clock() > until_s:
                raise _ShowsNothing("what it has loaded is not counted yet")
            await asyncio.sleep(_COUNT_PAUSE_S)

    # Calls.

    def _backend(self, instance: InstanceId) -> Backend:
        """Raises UpstreamError: the instance has been removed meanwhile."""
        found = self._driver.backends.get(instance)
        if found is None:
            raise UpstreamError("removed")
        return found

    def _info(self, instance: InstanceId) -> InstanceInfo:
        info = self._control.instances.known[instance].info
        if info is None:
            raise UpstreamError("not up")
        return info

    def _journal(
        self,
        instance: InstanceId,
        seed: int | None,
        tokens: int = TOKENS,
        *,
        prompt_tokens: int = 0,
        salt: str = "",
        lists: bool = False,
    ) -> Journal:
        """A stream of the known prompt. Its salt keeps it out of the caches of others.
        `prompt_tokens`: 0 for some pages. `lists`: with log probabilities.
        """
        info = self._info(instance)
        length = prompt_tokens or _PAGES * info.geometry.page_size_tokens + 1
        if info.max_model_len:
            length = max(1, min(length, info.max_model_len - tokens))
        prompt = [_PROMPT_IDS[(index * index) % len(_PROMPT_IDS)] for index in range(length)]
        backend = VLLM if self._is_vllm else EMBEDDED
        fields: dict[str, Any] = {
            "model": info.model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0.0 if seed is None else 1.0,
            "ignore_eos": True,
            "cache_salt": salt or secrets.token_hex(8),
        }
        if seed is not None:
            fields["seed"] = seed
        elif lists and self._is_vllm:
            fields |= {"logprobs": _LISTED, "return_tokens_as_token_ids": True}
        journal = Journal(
            stream=StreamId(NAME + secrets.token_hex(16)),
            parsed=read(COMPLETIONS, msgspec.json.encode(fields), backend),
            arrived_s=self._clock(),
            seed=seed,
            prompt_ids=prompt,
        )
        # Later attempts are recoveries, which the embedded engine puts before new requests. Behind
        # long prompts a test would take minutes, in which no KV is fetched.
        journal.attempt = 1
        return journal

    async def _prefill(
        self, instance: InstanceId, journal: Journal, *, has_rows: bool = False
    ) -> msgspec.Raw | None:
        journal.attempt += 1
        exact = self._control.instances.known[instance].resumes_exactly
        call = prefill_call(journal, journal.attempt, (), exact=exact, has_rows=has_rows)
        return (await self._backend(instance).prefill(call)).transfer

    async def _stream(
        self,
        instance: InstanceId,
        journal: Journal,
        runs: Sequence[act.PageRange] = (),
        transfer: msgspec.Raw | None = None,
        drafts: Sequence[int] = (),
        *,
        has_rows: bool = False,
    ) -> tuple[Mapping[int, float], ...]:
        """Have the rest of a stream computed, whose ids are added to the journal; return the log
        probabilities of the likeliest tokens at each position, as far as they are given.
        """
        journal.attempt += 1
        exact = self._control.instances.known[instance].resumes_exactly
        call = decode_call(
            journal, journal.attempt, runs, (), transfer, exact=exact, has_rows=has_rows
        )
        if drafts:
            call.fields["kvrs"].drafts = [*drafts]
        if call.rows is not None and runs:
            call.rows.node = self._control.agents.known[runs[0].holder].node
        events = EventReader()
        await self._backend(instance).decode(call, events)
        likeliest = list[Mapping[int, float]]()
        for payload in events.payloads:
            if payload != b"[DONE]":
                for choice in _choices_of(payload):
                    journal.output_ids.extend(choice.token_ids or ())
                    likeliest += _likeliest(choice)
        if b"[DONE]" not in events.payloads:
            raise UpstreamError("ended without [DONE]")
        return tuple(likeliest)


def _with_a_wrong_one(ids: Sequence[int]) -> list[int]:
    """In the middle, so that drafts before and behind it may be right."""
    drafts, middle = [*ids], len(ids) // 2
    if drafts:
        drafts[middle] = next(each for each in _PROMPT_IDS if each != drafts[middle])
    return drafts


def _choices_of(payload: bytes) -> list[ReceivedChoice]:
    try:
        chunk = CHUNK.decode(payload)
    except UNREADABLE:
        raise UpstreamError("sent an event that is not a completion chunk") from None
    if chunk.error is not None:
        raise UpstreamError("sent an error event")
    return chunk.choices or []


def _likeliest(choice: ReceivedChoice) -> list[Mapping[int, float]]:
    """The likeliest tokens at each position of an event, by their ids."""
    try:
        listed = choice.logprob_lists().get("top_logprobs") or []
        found = [msgspec.json.decode(each, type=dict[str, float] | None) or {} for each in listed]
    except UNREADABLE:  # Later positions keep their places.
        return [{} for _ in choice.token_ids or ()]
    return [
        {
            int(token.removeprefix(_ID_PREFIX)): logprob
            for token, logprob in each.items()
            if token.startswith(_ID_PREFIX) and token.removeprefix(_ID_PREFIX).isdigit()
        }
        for each in found
    ]
