"""Tests of rows: an instance continues a stream from rows of another engine, which an agent serves
or a store has.
"""

import asyncio
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

from kvrs.core.fleet.generated import Continues, Generated, Likeness
from kvrs.core.fleet.tested import RestoreTest
from kvrs.core.model import actions as act
from kvrs.errors import UpstreamError
from kvrs.ids import InstanceId
from kvrs.protocol.instance import Role
from kvrs.proxy.backends.backend import RefusedError
from kvrs.proxy.streams.driver import Driver
from kvrs.proxy.watch.known_streams import CUT, TOKENS, KnownStreams
from kvrs.proxy.wire.journal import Journal

_ROWS = 2  # Full rows of the prompt, if the model has room for them.
_LOADS = 2  # Attempts to load the rows: the last ones are available only a moment after the answer.
# Largest piece of a store, and the time within which it is stored and counted.
_CHUNK_TOKENS = 256
_STORED_WITHIN_S = 1.0
# Time within which an engine publishes its counters.
COUNTED_WITHIN_S = 3.0
COUNT_PAUSE_S = 0.1


class ShowsNothing(Exception):  # noqa: N818 - it is no error.
    """A test of rows has shown nothing, and must be repeated later."""


class _Place(NamedTuple):
    """Place where the target finds the holder's KV."""

    what: str  # Description for people.
    row_tokens: int
    # Agent that serves the rows; None: the target finds them in a store.
    agent: InstanceId | None = None


class _Whole(NamedTuple):
    """A stream that the target has computed without loaded KV."""

    journal: Journal
    likeliest: tuple[Mapping[int, float], ...]


class RestoreTester:
    def __init__(self, streams: KnownStreams, driver: Driver, clock: Callable[[], float]) -> None:
        self._streams = streams
        self._control = driver.control
        self._tests = driver.control.self_tests
        self._clock = clock
        # Salt of the latest stored prompt, by target of the test.
        self._stored: dict[InstanceId, str] = {}

    async def outcome(self, test: RestoreTest) -> tuple[str, bool]:
        """Reason why the target does not continue correctly from rows of the holder's agent or of a
        store, by the server's count of loads and by the tokens (empty: it does); and whether the
        tokens are the reason.

        A store's older contents are tested first: stores have been wrong about these after a
        restart, and right about everything new.
        """
        holder, target = test.holder, test.target
        place = self._store_of(test) if test.in_store else self._rows_of(holder)
        length, limit = _ROWS * place.row_tokens + 1, self._streams.info(target).max_model_len
        if limit and length > limit - TOKENS and (length := limit - TOKENS) <= place.row_tokens:
            return f"rows of {place.row_tokens} tokens; allowed for its model: {length - 1}", False
        lists = bool(self._seen(target).likeliest)
        whole = self._streams.journal(target, None, prompt_tokens=length, lists=lists)
        computed = _Whole(whole, await self._streams.stream(target, whole))
        if test.in_store and (former := self._stored.get(target)) is not None:
            loaded, is_alike = await self._behind(test, place, computed, former)
            if loaded and not is_alike:
                return f"goes on with other tokens behind {place.what}, from before", True
        salt = secrets.token_hex(8)
        await self._save(test, length, salt)
        for _ in range(1 if test.in_store else _LOADS):
            loaded, is_alike = await self._behind(test, place, computed, salt)
            if loaded:
                break
        if not loaded:
            return f"loaded none of {place.what}", False
        if not is_alike:
            return f"goes on with other tokens behind {place.what}", True
        return "", False

    async def _save(self, test: RestoreTest, length: int, salt: str) -> None:
        """Let the holder compute the prompt."""
        holder, target, has_rows = test.holder, test.target, not test.in_store
        saved = self._streams.journal(target, None, prompt_tokens=length, salt=salt)
        if self._streams.info(holder).role is not Role.PREFILL:
            await self._streams.stream(holder, saved, has_rows=has_rows)
        elif transfer := await self._streams.prefill(holder, saved, has_rows=has_rows):
            with suppress(UpstreamError, RefusedError):  # The hand-off's lease ends later anyway.
                await self._streams.backend(target).free_hand_off(transfer, saved.prompt_ids or ())
        if test.in_store:
            self._stored[target] = salt

    async def _behind(
        self, test: RestoreTest, place: _Place, whole: _Whole, salt: str
    ) -> tuple[int, bool]:
        """Tokens of the prompt that the target loads, and whether it continues them as it did
        without loading. Tokens are not compared if the holder is not known to continue exactly: the
        rows' namespace guarantees equal weights, but a store guarantees nothing.
        """
        target, journal, in_store = test.target, whole.journal, test.in_store
        prompt_tokens, runs = len(journal.prompt_ids or ()), list[act.PageRange]()
        if place.agent is not None:
            pages = prompt_tokens // self._streams.info(target).geometry.page_size_tokens
            runs.append(act.PageRange(place.agent, 0, pages, 0))
        cut = self._streams.journal(
            target,
            None,
            prompt_tokens=prompt_tokens,
            salt=salt,
            lists=bool(whole.likeliest),
        )
        cut.output_ids[:] = journal.output_ids[:CUT]
        # Read the counters first, so that loads of earlier requests do not count for this one.
        if in_store:
            await asyncio.sleep(_STORED_WITHIN_S)
            await self._streams.backend(target).load()
        found = await self._streams.stream(
            target, cut, runs, has_rows=not in_store, in_store=in_store
        )
        loaded = await self._loaded_tokens(target, cut)
        holder = self._tests.processes.get(test.holder)
        if not in_store and not self._tests.goes_on(holder, target, sampled=False):
            return loaded, True
        computed, behind = (
            Generated(tuple(ids), (), Continues.GREEDY, likeliest=likeliest)
            for ids, likeliest in (
                (journal.output_ids, whole.likeliest),
                (cut.output_ids, (*whole.likeliest[:CUT], *found)),
            )
        )
        return loaded, computed.likeness(behind) is not Likeness.OTHER

    def _seen(self, target: InstanceId) -> Generated:
        """Tokens of the target, which are tested before rows."""
        generated = self._tests.seen(target).generated
        assert generated is not None
        return generated

    def _store_of(self, test: RestoreTest) -> _Place:
        kind = self._control.instances.known[test.target].store
        return _Place(f"what its store ({kind}) has of {test.holder}", _CHUNK_TOKENS)

    def _rows_of(self, holder: InstanceId) -> _Place:
        """Raises:
        ShowsNothing: no agent serves any, or their size in tokens is not told.
        """
        node = self._control.instances.known[holder].node
        if (agent := self._control.agents.by_node.get(node)) is not None and agent.report:
            for region in agent.report.rows.regions:
                if region.engine == holder and region.is_alive and region.row_tokens:
                    what = f"the rows that {agent.id} serves of {holder}"
                    return _Place(what, region.row_tokens, agent.id)
        raise ShowsNothing(f"no agent serves rows of {holder}")

    async def _loaded_tokens(self, target: InstanceId, journal: Journal) -> int:
        """Tokens that the target has loaded. Raises ShowsNothing: other streams share the server's
        counters.
        """
        until_s = self._clock() + COUNTED_WITHIN_S
        while True:
            for fetch in (await self._streams.backend(target).load()).fetches:
                if fetch.stream == journal.stream:
                    return fetch.loaded_tokens
            if self._clock() > until_s:
                raise ShowsNothing("what it has loaded is not counted yet")
            await asyncio.sleep(COUNT_PAUSE_S)
