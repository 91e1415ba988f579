"""Resume self-tests: short streams by the calls of a recovery, sent directly to the backends.

The driver does not know these streams, so no metric, quota or record of failures counts them, and
they delay clients' streams only by a few tokens' work at an instance.

Short streams of known tokens for self-tests, made by the calls of a recovery.
"""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar, assert_never

import msgspec

from kvrs.config.cluster import Backend as Engine
from kvrs.core.fleet.self_tests import Standing
from kvrs.core.fleet.tested import (
    Continues,
    Generated,
    Likeness,
    RestoreTest,
    SelfTest,
    TokensTest,
    TransferTest,
)
from kvrs.core.model import actions as act
from kvrs.core.model.member import Health
from kvrs.errors import UpstreamError
from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.instance import Capability, InstanceInfo, LeaseUpdate, Role
from kvrs.protocol.openai.chunks import CHUNK, ReceivedChoice
from kvrs.protocol.openai.decoding import UNREADABLE
from kvrs.protocol.openai.fields import EMBEDDED
from kvrs.proxy.backends.backend import Backend, RefusedError
from kvrs.proxy.backends.bodies import Call, decode_call, prefill_call, store_load
from kvrs.proxy.streams.driver import Driver
from kvrs.proxy.wire.errors import EngineError
from kvrs.proxy.wire.journal import Journal
from kvrs.proxy.wire.requests import COMPLETIONS, read
from kvrs.proxy.wire.upstream import EventReader

log = logging.getLogger(__name__)

# Prefix of the streams' ids; the number behind it is as long as in the id of any other stream.
NAME = "selftest-"
TOKENS = 12
CUT = 5
# Tokens of the first, short stream: a process of other weights hardly generates the same ones.
GLIMPSED = 4
SEED = 20_26
# Token ids of the prompt: not special in usual vocabularies, and present in the smallest.
PROMPT_IDS = range(3, 35)
_PAGES = 2  # Number of full pages of the prompt, if the model has room for them.
_LISTED = 5  # Number of log probabilities that vLLM lists at each position.
# Prefix of a token's number where vLLM lists tokens by number instead of text.
_ID_PREFIX = "token_id:"


class KnownStreams:
    def __init__(self, driver: Driver, clock: Callable[[], float]) -> None:
        self._driver = driver
        self._control = driver.control
        self._clock = clock

    def backend(self, instance: InstanceId) -> Backend:
        """Return the backend of an instance. Raises UpstreamError: the instance was removed
        meanwhile.
        """
        found = self._driver.backends.get(instance)
        if found is None:
            raise UpstreamError("removed")
        return found

    def info(self, instance: InstanceId) -> InstanceInfo:
        info = self._control.instances.known[instance].info
        if info is None:
            raise UpstreamError("not up")
        return info

    def journal(
        self,
        instance: InstanceId,
        seed: int | None,
        tokens: int = TOKENS,
        *,
        prompt_tokens: int = 0,
        salt: str = "",
        lists: bool = False,
    ) -> Journal:
        """Make the journal of a stream of the known prompt, with a salt that keeps the stream out
        of other streams' caches. `prompt_tokens`: length of the prompt; 0: _PAGES pages. `lists`:
        with log probabilities.
        """
        info = self.info(instance)
        length = prompt_tokens or _PAGES * info.geometry.page_size_tokens + 1
        if info.max_model_len:
            length = max(1, min(length, info.max_model_len - tokens))
        prompt = [PROMPT_IDS[(index * index) % len(PROMPT_IDS)] for index in range(length)]
        backend = EMBEDDED if self._driver.engine is Engine.DISTSERVE else self._driver.engine
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
        elif lists and self._driver.engine is Engine.VLLM:
            fields |= {"logprobs": _LISTED, "return_tokens_as_token_ids": True}
        journal = Journal(
            stream=StreamId(NAME + secrets.token_hex(16)),
            parsed=read(COMPLETIONS, msgspec.json.encode(fields), backend),
            arrived_s=self._clock(),
            seed=seed,
            prompt_ids=prompt,
        )
        # The next attempt counts as a recovery: the embedded engine puts recoveries before new
        # requests. Behind long prompts a test would take minutes, during which no KV is fetched.
        journal.attempt = 1
        return journal

    async def prefill(
        self, instance: InstanceId, journal: Journal, *, has_rows: bool = False
    ) -> msgspec.Raw | None:
        journal.attempt += 1
        known = self._control.instances.known[instance]
        call = prefill_call(journal, journal.attempt, act.Plan(instance), known)
        if not has_rows:
            call.rows = None
        return (await self.backend(instance).prefill(call)).transfer

    async def stream(
        self,
        instance: InstanceId,
        journal: Journal,
        runs: Sequence[act.PageRange] = (),
        transfer: msgspec.Raw | None = None,
        drafts: Sequence[int] = (),
        *,
        has_rows: bool = False,
        in_store: bool = False,
        beside: InstanceId | None = None,
    ) -> tuple[Mapping[int, float], ...]:
        """Compute the rest of a stream and add its ids to the journal; return the log probabilities
        of the likeliest tokens at each position, if given. `beside`: the prefill instance called
        together with decode; None: any.
        """
        journal.attempt += 1
        known = self._control.instances.known[instance]
        plan = act.Plan(instance, runs=tuple(runs))
        call = decode_call(journal, journal.attempt, plan, known, transfer)
        if not has_rows:
            call.rows = None
        if known.info.joins_prefill:
            call.beside = self._beside(instance) if beside is None else self.backend(beside)
            call.keeper = self._driver.detached.keeper(instance)
        if drafts:
            call.fields["kvrs"].drafts = [*drafts]
        if in_store:
            page_size_tokens = self.info(instance).geometry.page_size_tokens
            call.rows = store_load(journal, journal.attempt, page_size_tokens)
        elif call.rows is not None and runs:
            call.rows.node = self._control.agents.known[runs[0].holder].node
        events = EventReader()
        await self.backend(instance).decode(call, events)
        likeliest = list[Mapping[int, float]]()
        for payload in events.payloads:
            if payload != b"[DONE]":
                for choice in _choices_of(payload):
                    journal.output_ids.extend(choice.token_ids or ())
                    likeliest += _likeliest(choice)
        if b"[DONE]" not in events.payloads:
            raise UpstreamError("ended without [DONE]")
        return tuple(likeliest)

    def _beside(self, instance: InstanceId) -> Backend:
        """Return the backend of a prefill instance that joins the instance's decode calls."""
        known = self._control.instances.known
        for other in known.values():
            if (
                other.abilities.prefills
                and other.health is Health.UP
                and known[instance].takes_from(other)
            ):
                return self.backend(other.id)
        raise UpstreamError("no prefill instance is up beside it")


def _choices_of(payload: bytes) -> list[ReceivedChoice]:
    try:
        chunk = CHUNK.decode(payload)
    except UNREADABLE:
        raise UpstreamError("sent an event that is not a completion chunk") from None
    if chunk.error is not None:
        raise UpstreamError("sent an error event")
    return chunk.choices or []


def _likeliest(choice: ReceivedChoice) -> list[Mapping[int, float]]:
    """Return the likeliest tokens at each position of an event, as log probabilities by id."""
    try:
        listed = choice.logprob_lists().get("top_logprobs") or []
        found = [msgspec.json.decode(each, type=dict[str, float] | None) or {} for each in listed]
    except UNREADABLE:  # Add an empty entry, which keeps the later positions in place.
        return [{} for _ in choice.token_ids or ()]
    return [
        {
            int(token.removeprefix(_ID_PREFIX)): logprob
            for token, logprob in each.items()
            if token.startswith(_ID_PREFIX) and token.removeprefix(_ID_PREFIX).isdigit()
        }
        for each in found
    ]


_TIMEOUT_S = 60.0  # Time limit of a test: the first request to a vLLM may take half a minute.
_AT_ONCE = 4
# Longest time until an engine publishes its counters after a request.
COUNTED_WITHIN_S = 3.0
_COUNT_PAUSE_S = 0.1
_ROWS = 2  # Number of full rows of the prompt, if the model has room for them.
# Number of attempts to load the rows: the last rows can be loaded only a moment after the answer.
_LOADS = 2
# Most tokens in one piece of a store, and the longest time until a piece is stored and counted.
_CHUNK_TOKENS = 256
_STORED_WITHIN_S = 1.0

Counted = TypeVar("Counted")

# Requests for features that engines compile or load on first use: without them a client's stream,
# and all other streams of the instance, would wait for that. Each is separate, since a server may
# refuse one.
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


class ShowsNothing(Exception):  # noqa: N818 - the test has not failed.
    """A test of rows has shown nothing, and must be repeated later."""


class _Place(NamedTuple):
    """Place where a test's target finds KV that the holder has computed."""

    what: str  # Description of the place for logs.
    row_tokens: int
    # Agent that serves the rows; None: the target finds the KV in a store.
    agent: InstanceId | None = None


class SelfTester:
    def __init__(self, driver: Driver, clock: Callable[[], float]) -> None:
        self._driver = driver
        self._control = driver.control
        self._tests = driver.control.self_tests
        self._clock = clock
        self._streams = KnownStreams(driver, clock)
        # Salt of the prompt that was stored last, by target of the test.
        self._stored: dict[InstanceId, str] = {}
        self._wake = driver.tests_wake

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
                    # A bug raises here and ends this task, which is then started again.
                    task.result()
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
            log.warning("self-test failed", extra={"instances": test.names, "cause": cause})
        except ShowsNothing as reason:
            assert isinstance(test, RestoreTest)
            self._tests.put_off(test, str(reason), self._clock())
        except BaseException:
            if isinstance(test, RestoreTest):
                self._tests.put_off(test, "it was ended", self._clock())
            else:
                self._tests.failed(test, "it was ended", self._clock())
            raise
        self._control.weights_known(test.names, self._clock())

    async def _outcome(self, test: SelfTest) -> None:
        facts: dict[str, Any]
        match test:
            case TokensTest(instance=instance) if self._streams.info(instance).role is Role.PREFILL:
                await self._first_tokens(test)
                self._tests.generated(test, None)
                weights = self._tests.standing(instance)
                facts = {"instance": instance, "weights": weights}
                fault = "its weights differ from the others'" if weights is Standing.OTHER else ""
            case TokensTest(instance=instance):
                found = await self._generate(test)
                self._tests.generated(test, found)
                facts = {"instance": instance, "continues": found.continues.value}
                fault = "" if found.name else "it continues nothing"
                if others := self._tests.different(instance)[0]:
                    fault = f"computes other tokens than {', '.join(others)}"
            case TransferTest(holder=holder, target=target):
                moved = await self._transfer(holder, target)
                self._tests.transferred(test, moved=moved)
                facts = {"from": holder, "to": target, "moves_kv": moved}
                fault = "no KV moved" if moved is False else ""
            case RestoreTest(holder=holder, target=target):
                fault, is_wrong = await self._restore(test)
                self._tests.restored(test, fault, self._clock(), is_wrong=is_wrong)
                kind = self._control.instances.known[target].store if test.in_store else None
                facts = {"from": holder, "to": target, "restores": not fault, "store": kind}
            case _:
                assert_never(test)
        if fault:
            log.warning("self-test", extra=facts | {"cause": fault})
        else:
            log.info("self-test", extra=facts)

    async def _counted(self, read: Callable[[], Awaitable[Counted | None]]) -> Counted | None:
        """Read an engine's counter until it has changed; return the change (None: no change within
        COUNTED_WITHIN_S).
        """
        until_s = self._clock() + COUNTED_WITHIN_S
        while (found := await read()) is None and self._clock() <= until_s:
            await asyncio.sleep(_COUNT_PAUSE_S)
        return found

    async def _generate(self, test: TokensTest) -> Generated:
        """Generate uncut streams: a greedy one first, which shows the weights, and one with a seed,
        which warms up the sampler's kernels. Then continue both at once from a cut, in one batch,
        as after the loss of an instance, and compare. An engine that refuses sampling counts as
        answering like the greedy stream. An engine with a source of drafts gets some drafts, one of
        them wrong.
        """
        instance = test.instance
        drafted = (await self._streams.backend(instance).load()).speculation is not None
        lists = await self._first_tokens(test)
        journals = [
            self._streams.journal(instance, None, lists=lists),
            self._streams.journal(instance, SEED),
        ]
        likeliest = await self._glimpse(test, journals[0])
        model = self._streams.info(instance).root
        if self._driver.engine is Engine.VLLM:
            await self._warm_up(instance)
        try:
            await self._streams.stream(instance, journals[1])
        except RefusedError:
            del journals[1]
        whole = [tuple(journal.output_ids) for journal in journals]
        try:
            rests = await asyncio.gather(
                *(self._continue(instance, journal, drafted=drafted) for journal in journals)
            )
        except RefusedError:
            return Generated(whole[0], whole[-1], Continues.NONE, likeliest, model)
        alike = [ids == rest for ids, rest in zip(whole, rests, strict=True)]
        continues = Continues.TEXT
        if alike[0]:
            continues = Continues.SEEDED if alike[-1] else Continues.GREEDY
        return Generated(whole[0], whole[-1], continues, likeliest, model)

    async def _first_tokens(self, test: TokensTest) -> bool:
        """Generate the first few tokens, which show the weights early; return whether the server
        lists log probabilities. It may allow fewer than are asked for (`--max-logprobs`).
        """
        for lists in (True, False):
            journal = self._streams.journal(test.instance, None, GLIMPSED, lists=lists)
            try:
                await self._glimpse(test, journal)
            except RefusedError:
                if not lists:
                    raise
            else:
                break
        return lists

    async def _glimpse(self, test: TokensTest, journal: Journal) -> tuple[Mapping[int, float], ...]:
        """Generate a greedy stream, and tell its tokens at once: they show the weights."""
        likeliest = await self._streams.stream(test.instance, journal)
        model = self._streams.info(test.instance).root
        greedy = tuple(journal.output_ids)
        self._tests.glimpsed(test, Generated(greedy, (), Continues.GREEDY, likeliest, model))
        self._control.weights_known((test.instance,), self._clock())
        return likeliest

    async def _warm_up(self, instance: InstanceId) -> None:
        """Let the server compile now what it compiles on first use. A server that refuses a request
        compiles nothing for it later.
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

    async def _transfer(self, holder: InstanceId, target: InstanceId) -> bool | None:
        """Test that the holder's KV of a history really reaches the target. None: the target does
        not count received KV.
        """
        joins = self._control.instances.known[target].info.joins_prefill
        counter = self._streams.backend(holder if joins else target)
        before = await counter.kv_received()
        if before is None:
            return None

        async def more() -> bool | None:
            after = await counter.kv_received()
            return True if after is not None and after > before else None

        journal = self._streams.journal(target, seed=None, tokens=CUT + 1)
        try:
            pulls = Capability.PULL_PAGES in self._streams.info(target).capabilities
            if pulls and self._control.instances.known[holder].abilities.retains:
                await self._migrate(holder, target, journal)
            elif joins:
                await self._streams.stream(target, journal, beside=holder)
            else:
                await self._hand_off(holder, target, journal)
        finally:
            await self._release(holder, journal)
        return await self._counted(more) is not None

    async def _migrate(self, holder: InstanceId, target: InstanceId, journal: Journal) -> None:
        """Continue a stream that was prefilled at the holder, at a target that fetches pages."""
        await self._streams.prefill(holder, journal)
        journal.output_ids.extend(list(PROMPT_IDS)[:CUT])
        info = self._streams.info(holder)
        pages = journal.prompt_tokens // info.geometry.page_size_tokens
        await self._streams.stream(target, journal, [act.PageRange(holder, 0, pages, info.epoch)])

    async def _hand_off(self, holder: InstanceId, target: InstanceId, journal: Journal) -> None:
        """Continue a stream at an engine that fetches no pages: the holder prefills the whole
        history, and hands its KV off.
        """
        transfer = await self._streams.prefill(holder, journal)
        await self._streams.stream(target, journal, transfer=transfer)
        del journal.output_ids[CUT:]
        transfer = await self._streams.prefill(holder, journal)
        await self._streams.stream(target, journal, transfer=transfer)

    async def _release(self, holder: InstanceId, journal: Journal) -> None:
        if self._control.instances.known[holder].abilities.retains:
            update = LeaseUpdate(1.0, release=[journal.stream])
            await self._streams.backend(holder).leases(update)

    async def _restore(self, test: RestoreTest) -> tuple[str, bool]:
        """Return why the target does not continue correctly from rows of the holder's agent or of a
        store, by the server's count of loads and by the tokens (empty: it does), and whether the
        tokens are the reason.

        A store's older contents are tested first: stores have been wrong about these after a
        restart, and right about everything new.
        """
        holder, target = test.holder, test.target
        place = self._store_of(test) if test.in_store else self._rows_of(holder)
        length, limit = _ROWS * place.row_tokens + 1, self._streams.info(target).max_model_len
        if limit and length > limit - TOKENS and (length := limit - TOKENS) <= place.row_tokens:
            return f"rows of {place.row_tokens} tokens; allowed for its model: {length - 1}", False
        own = self._tests.seen(target).generated
        assert own is not None  # Tests of tokens precede tests of rows.
        lists = bool(own.likeliest)
        whole = self._streams.journal(target, None, prompt_tokens=length, lists=lists)
        likeliest = await self._streams.stream(target, whole)
        computed = Generated(tuple(whole.output_ids), (), Continues.GREEDY, likeliest)
        former, salt = self._stored.get(target), secrets.token_hex(8)
        if test.in_store and former is not None:
            loaded, is_alike = await self._behind(test, place, length, computed, former)
            if loaded and not is_alike:
                return f"goes on with other tokens behind {place.what}, from before", True
        await self._save(test, length, salt)
        for _ in range(1 if test.in_store else _LOADS):
            loaded, is_alike = await self._behind(test, place, length, computed, salt)
            if loaded:
                break
        if not loaded:
            return f"loaded none of {place.what}", False
        if not is_alike:
            return f"goes on with other tokens behind {place.what}", True
        return "", False

    async def _save(self, test: RestoreTest, length: int, salt: str) -> None:
        """Let the holder compute the prompt, so that its KV is saved in rows or the store."""
        holder, target, has_rows = test.holder, test.target, not test.in_store
        saved = self._streams.journal(target, None, prompt_tokens=length, salt=salt)
        if self._streams.info(holder).role is not Role.PREFILL:
            await self._streams.stream(holder, saved, has_rows=has_rows)
        elif transfer := await self._streams.prefill(holder, saved, has_rows=has_rows):
            # A failure does no harm: the hand-off's lease ends later anyway.
            with suppress(UpstreamError, RefusedError):
                await self._streams.backend(target).free_hand_off(transfer, saved.prompt_ids or ())
        if test.in_store:
            self._stored[target] = salt

    async def _behind(
        self, test: RestoreTest, place: _Place, prompt_tokens: int, computed: Generated, salt: str
    ) -> tuple[int, bool]:
        """Return the number of the prompt's tokens that the target loads, and whether it continues
        behind them as it did without loading. Tokens are not compared if the holder is not known to
        continue exactly: the rows' namespace guarantees equal weights, but a store guarantees
        nothing.
        """
        target, in_store, runs = test.target, test.in_store, list[act.PageRange]()
        if place.agent is not None:
            pages = prompt_tokens // self._streams.info(target).geometry.page_size_tokens
            runs.append(act.PageRange(place.agent, 0, pages, 0))
        lists = bool(computed.likeliest)
        cut = self._streams.journal(
            target, None, prompt_tokens=prompt_tokens, salt=salt, lists=lists
        )
        cut.output_ids.extend(computed.greedy[:CUT])
        # Read the counters first, so that loads of earlier requests do not count for this stream.
        if in_store:
            await asyncio.sleep(_STORED_WITHIN_S)
            await self._streams.backend(target).load()
        found = await self._streams.stream(
            target, cut, runs, has_rows=not in_store, in_store=in_store
        )

        async def loaded() -> int | None:
            fetches = (await self._streams.backend(target).load()).fetches
            own = (fetch.loaded_tokens for fetch in fetches if fetch.stream == cut.stream)
            return next(own, None)

        if (loaded_tokens := await self._counted(loaded)) is None:
            # The server has counted the loads together with those of other streams.
            raise ShowsNothing("what it has loaded is not counted yet")
        began = self._tests.processes.get(test.holder)
        if not in_store and not self._tests.goes_on(began, target, sampled=False):
            return loaded_tokens, True
        likeliest = (*computed.likeliest[:CUT], *found)
        behind = Generated(tuple(cut.output_ids), (), Continues.GREEDY, likeliest)
        return loaded_tokens, computed.likeness(behind) is not Likeness.OTHER

    def _store_of(self, test: RestoreTest) -> _Place:
        kind = self._control.instances.known[test.target].store
        return _Place(f"what its store ({kind}) has of {test.holder}", _CHUNK_TOKENS)

    def _rows_of(self, holder: InstanceId) -> _Place:
        """Return the rows that the holder's agent serves.

        Raises:
            ShowsNothing: no agent serves rows of the holder, or their size in tokens is not known.
        """
        node = self._control.instances.known[holder].node
        if (agent := self._control.agents.by_node.get(node)) is not None and agent.report:
            for region in agent.report.rows.regions:
                if region.engine == holder and region.is_alive and region.row_tokens:
                    what = f"the rows that {agent.id} serves of {holder}"
                    return _Place(what, region.row_tokens, agent.id)
        raise ShowsNothing(f"no agent serves rows of {holder}")


def _with_a_wrong_one(ids: Sequence[int]) -> list[int]:
    """Return the ids with a wrong id in the middle, so that drafts before and behind it may be
    right.
    """
    drafts, middle = [*ids], len(ids) // 2
    if drafts:
        drafts[middle] = next(each for each in PROMPT_IDS if each != drafts[middle])
    return drafts
