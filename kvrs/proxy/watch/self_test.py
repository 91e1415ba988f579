"""Runs the resume self-tests: short streams by the calls of a recovery, sent directly to the
backends.

The driver does not know these streams, so no metric, quota or record of failures counts them, and
they delay clients' streams only by a few tokens' work at an instance.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, assert_never

from kvrs.config.cluster import Backend as Engine
from kvrs.core.fleet.generated import Continues, Generated
from kvrs.core.fleet.tested import RestoreTest, SelfTest, TokensTest, TransferTest, names_of
from kvrs.core.model import actions as act
from kvrs.errors import UpstreamError
from kvrs.ids import InstanceId
from kvrs.protocol.instance import Capability, LeaseUpdate
from kvrs.protocol.speculation import SpeculationReport
from kvrs.proxy.backends.backend import RefusedError
from kvrs.proxy.backends.bodies import Call
from kvrs.proxy.streams.driver import Driver
from kvrs.proxy.watch.known_streams import CUT, PROMPT_IDS, SEED, KnownStreams
from kvrs.proxy.watch.restore_test import (
    COUNT_PAUSE_S,
    COUNTED_WITHIN_S,
    RestoreTester,
    ShowsNothing,
)
from kvrs.proxy.wire.journal import Journal
from kvrs.proxy.wire.peer import EngineError
from kvrs.proxy.wire.requests import COMPLETIONS
from kvrs.proxy.wire.upstream import EventReader

log = logging.getLogger(__name__)

_TIMEOUT_S = 60.0  # Time limit of a request: the first of a vLLM may take half a minute.
_AT_ONCE = 4

# Requests for what engines compile or load on first use, each separate, since a server may refuse
# one. Otherwise a client's stream would wait for it, and all others of the instance.
_WARM_UPS: Sequence[dict[str, Any]] = (
    {"logprobs": 1},
    {
        "temperature": 1.0,
        "top_p": 0.9,
        "top_k": 20,
        "seed": SEED,
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


class SelfTester:
    def __init__(self, driver: Driver, clock: Callable[[], float]) -> None:
        self._driver = driver
        self._control = driver.control
        self._tests = driver.control.self_tests
        self._clock = clock
        self._streams = KnownStreams(driver, clock)
        self._restores = RestoreTester(self._streams, driver, clock)
        self._wake = asyncio.Event()
        self._tests.changed = self._wake.set

    async def run(self) -> None:
        """Test instances that come up, until cancelled."""
        running: set[asyncio.Task[None]] = set()
        wakes = asyncio.create_task(self._wake.wait())
        try:
            while True:
                now_s = self._clock()
                while len(running) < _AT_ONCE and (test := self._tests.next(now_s)):
                    running.add(asyncio.create_task(self._carry_out(test)))
                retry_s = self._tests.next_retry_s(now_s)
                pause_s = None if retry_s is None else max(0.1, retry_s - self._clock())
                done, _ = await asyncio.wait(
                    {*running, wakes}, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done & running:
                    running.discard(task)
                    task.result()  # A bug ends this task, which is then restarted.
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
        except ShowsNothing as reason:
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
                fault, is_wrong = await self._restores.outcome(test)
                self._tests.restored(test, fault, self._clock(), is_wrong=is_wrong)
                kind = self._control.instances.known[target].store if test.in_store else None
                extra = {"from": holder, "to": target, "restores": not fault, "store": kind}
                if fault:
                    log.warning("self-test", extra=extra | {"cause": fault})
                else:
                    log.info("self-test", extra=extra)
            case _:
                assert_never(test)

    # Tests of tokens.

    async def _generate(self, instance: InstanceId) -> Generated:
        """Generate uncut streams first: the seeded one warms up the sampler's kernels. Then
        continue both at once, in one batch, as after the loss of an instance. An engine that
        refuses sampling counts as answering like the greedy stream. An engine with a source of
        drafts gets some drafts, one of them wrong.
        """
        if self._driver.engine is Engine.VLLM:
            await self._warm_up(instance)
        before = (await self._streams.backend(instance).load()).speculation
        journals = [
            self._streams.journal(instance, None, lists=True),
            self._streams.journal(instance, SEED),
        ]
        try:
            likeliest = await self._streams.stream(instance, journals[0])
        except RefusedError:  # The server gives fewer log probabilities (`--max-logprobs`).
            journals[0] = self._streams.journal(instance, None)
            likeliest = await self._streams.stream(instance, journals[0])
        try:
            await self._streams.stream(instance, journals[1])
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
        """Let the server compile now what it compiles on first use. A server that refuses a request
        has nothing to compile for it.
        """
        fields = {
            "model": self._streams.info(instance).model,
            "prompt": [*PROMPT_IDS],
            "max_tokens": 4,
            "stream": True,
            "temperature": 0.0,
        }
        for feature in _WARM_UPS:
            call = Call(COMPLETIONS.path, fields | feature)
            with suppress(RefusedError, EngineError):
                await self._streams.backend(instance).decode(call, EventReader())

    async def _continue(
        self, instance: InstanceId, journal: Journal, *, drafted: bool
    ) -> tuple[int, ...]:
        drafts = _with_a_wrong_one(journal.output_ids[CUT:]) if drafted else ()
        del journal.output_ids[CUT:]
        await self._streams.stream(instance, journal, drafts=drafts)
        return tuple(journal.output_ids)

    async def _drafts_since(
        self, instance: InstanceId, before: SpeculationReport
    ) -> SpeculationReport:
        until_s = self._clock() + COUNTED_WITHIN_S
        while True:
            after = (await self._streams.backend(instance).load()).speculation or before
            if (found := after.since(before)).proposed or self._clock() > until_s:
                return found
            await asyncio.sleep(COUNT_PAUSE_S)

    # Tests of KV.

    async def _transfer(self, holder: InstanceId, target: InstanceId) -> bool | None:
        """Test that the holder's KV of a history really reaches the target."""
        joins = self._control.instances.known[target].info.joins_prefill
        counts = holder if joins else target
        before = await self._streams.backend(counts).kv_received()
        if before is None:
            return None
        journal = self._streams.journal(target, seed=None, tokens=CUT + 1)
        try:
            pulls = Capability.PULL_PAGES in self._streams.info(target).capabilities
            if pulls and self._control.instances.known[holder].retains:
                await self._migrate(holder, target, journal)
            elif joins:
                await self._streams.stream(target, journal, beside=holder)
            else:
                await self._hand_off(holder, target, journal)
        finally:
            await self._release(holder, journal)
        return await self._counts_more(counts, before)

    async def _migrate(self, holder: InstanceId, target: InstanceId, journal: Journal) -> None:
        """Continue a stream that was prefilled at the holder, at a target that fetches pages."""
        await self._streams.prefill(holder, journal)
        journal.output_ids.extend(list(PROMPT_IDS)[:CUT])
        info = self._streams.info(holder)
        pages = journal.prompt_tokens // info.geometry.page_size_tokens
        await self._streams.stream(target, journal, [act.PageRange(holder, 0, pages, info.epoch)])

    async def _hand_off(self, holder: InstanceId, target: InstanceId, journal: Journal) -> None:
        """Continue a stream at an engine that fetches no pages: prefill gets the history again."""
        transfer = await self._streams.prefill(holder, journal)
        await self._streams.stream(target, journal, transfer=transfer)
        del journal.output_ids[CUT:]
        transfer = await self._streams.prefill(holder, journal)
        await self._streams.stream(target, journal, transfer=transfer)

    async def _counts_more(self, instance: InstanceId, before: float) -> bool:
        until_s = self._clock() + COUNTED_WITHIN_S
        while True:
            after = await self._streams.backend(instance).kv_received()
            if after is not None and after > before:
                return True
            if self._clock() > until_s:
                return False
            await asyncio.sleep(COUNT_PAUSE_S)

    async def _release(self, holder: InstanceId, journal: Journal) -> None:
        if self._control.instances.known[holder].retains:
            update = LeaseUpdate(1.0, release=[journal.stream])
            await self._streams.backend(holder).leases(update)


def _with_a_wrong_one(ids: Sequence[int]) -> list[int]:
    """Replace an id in the middle, so that drafts before and behind it may be right."""
    drafts, middle = [*ids], len(ids) // 2
    if drafts:
        drafts[middle] = next(each for each in PROMPT_IDS if each != drafts[middle])
    return drafts
