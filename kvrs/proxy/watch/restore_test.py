"""Tests of rows: an instance goes on with a stream behind rows of another one's engine."""

import asyncio
import secrets
from collections.abc import Callable
from contextlib import suppress

from kvrs.core.fleet.generated import Continues, Generated, Likeness
from kvrs.core.model import actions as act
from kvrs.errors import UpstreamError
from kvrs.ids import InstanceId
from kvrs.protocol.instance import Role
from kvrs.proxy.backends.backend import RefusedError
from kvrs.proxy.streams.driver import Driver
from kvrs.proxy.watch.known_streams import CUT, TOKENS, KnownStreams
from kvrs.proxy.wire.journal import Journal

_ROWS = 2  # Full ones of the prompt, where the model has room for them.
_LOADS = 2  # Tries to load them.
# Counters of an engine may be published a moment after the answer.
COUNTED_WITHIN_S = 3.0
COUNT_PAUSE_S = 0.1


class ShowsNothing(Exception):  # noqa: N818 - it is no error.
    """A test of rows has shown nothing, and is to be carried out later."""


class RestoreTester:
    def __init__(self, streams: KnownStreams, driver: Driver, clock: Callable[[], float]) -> None:
        self._streams = streams
        self._control = driver.control
        self._tests = driver.control.self_tests
        self._clock = clock

    async def outcome(self, holder: InstanceId, target: InstanceId) -> tuple[str, bool]:
        """Why the target does not go on rightly with rows that the holder's agent serves, by the
        server's own count of them and by the tokens (empty: it does), and whether that is for the
        tokens.
        """
        agent, row_tokens = self._rows_of(holder)
        length, limit = _ROWS * row_tokens + 1, self._streams.info(target).max_model_len
        if limit and length > limit - TOKENS and (length := limit - TOKENS) <= row_tokens:
            return f"rows of {row_tokens} tokens; allowed for its model: {length - 1}", False
        lists, salt = bool(self._seen(target).likeliest), secrets.token_hex(8)
        whole = self._streams.journal(target, None, prompt_tokens=length, lists=lists)
        wanted = await self._streams.stream(target, whole)
        saved = self._streams.journal(target, None, prompt_tokens=length, salt=salt)
        if self._streams.info(holder).role is Role.PREFILL:
            if (transfer := await self._streams.prefill(holder, saved, has_rows=True)) is not None:
                with suppress(UpstreamError, RefusedError):  # The hand-off ends by itself, later.
                    await self._streams.backend(target).free_hand_off(
                        transfer, saved.prompt_ids or ()
                    )
        else:
            await self._streams.stream(holder, saved, has_rows=True)
        pages = length // self._streams.info(target).geometry.page_size_tokens
        for _ in range(_LOADS):  # The last rows are there a moment after the answer.
            cut = self._streams.journal(target, None, prompt_tokens=length, salt=salt, lists=lists)
            cut.output_ids[:] = whole.output_ids[:CUT]
            run = act.PageRange(agent, 0, pages, 0)
            found = await self._streams.stream(target, cut, [run], has_rows=True)
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
            ShowsNothing: no agent serves any, or their size in tokens is not told.
        """
        node = self._control.instances.known[holder].node
        if (agent := self._control.agents.by_node.get(node)) is not None and agent.report:
            for region in agent.report.rows.regions:
                if region.engine == holder and region.is_alive and region.row_tokens:
                    return agent.id, region.row_tokens
        raise ShowsNothing(f"no agent serves rows of {holder}")

    async def _loaded_tokens(self, target: InstanceId, journal: Journal) -> int:
        """Raises ShowsNothing: the server's counters are still shared with other streams."""
        until_s = self._clock() + COUNTED_WITHIN_S
        while True:
            for fetch in (await self._streams.backend(target).load()).fetches:
                if fetch.stream == journal.stream:
                    return fetch.loaded_tokens
            if self._clock() > until_s:
                raise ShowsNothing("what it has loaded is not counted yet")
            await asyncio.sleep(COUNT_PAUSE_S)
