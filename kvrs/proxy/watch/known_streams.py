"""Short streams of known tokens for self-tests, made by the calls of a recovery."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from kvrs.config.cluster import Backend as Engine
from kvrs.core.model import actions as act
from kvrs.core.model.member import Health
from kvrs.errors import UpstreamError
from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.instance import InstanceInfo
from kvrs.protocol.openai.chunks import CHUNK, ReceivedChoice
from kvrs.protocol.openai.decoding import UNREADABLE
from kvrs.protocol.openai.fields import EMBEDDED
from kvrs.proxy.backends.backend import Backend
from kvrs.proxy.backends.bodies import decode_call, prefill_call, store_load
from kvrs.proxy.streams.driver import Driver
from kvrs.proxy.wire.journal import Journal
from kvrs.proxy.wire.requests import COMPLETIONS, read
from kvrs.proxy.wire.upstream import EventReader

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
