"""Admission of a request: its history, the holders of its KV, and the limits of this engine."""

import asyncio
import secrets
from functools import partial
from math import inf

from kvrs.errors import RequestError
from kvrs.ids import InstanceId, StreamId
from kvrs.process.large_work import LargeWork
from kvrs.protocol.frames import MAX_NAME_BYTES
from kvrs.protocol.instance import KvrsParams, KvTransferParams
from kvrs.protocol.openai.chunks import TOO_LONG
from kvrs.protocol.openai.requests import ChatRequest, CompletionRequest
from kvrs.transfer.peers import TrafficClass
from kvrs_engine.engine.grammars import Grammars
from kvrs_engine.engine.requests import GenerationRun, make_run
from kvrs_engine.engine.served import ServedInstance
from kvrs_engine.scheduling.sequences import Sequence
from kvrs_engine.scheduling.sources import PullSource

# Longer texts take milliseconds to tokenise, and are tokenised off the event loop.
_QUICKLY_TOKENISED_CHARACTERS = 10_000

# Longer outputs are replayed into the text machine off the event loop: each token takes about ten
# microseconds, and the streams of a lost instance arrive all at once.
_QUICKLY_REPLAYED_TOKENS = 256


class Admission:
    """Creates runs from requests. Hosts and ports in a request are ignored; peers are looked up in
    the instance's registry.
    """

    def __init__(self, instance: ServedInstance) -> None:
        self._instance = instance
        self.large = LargeWork()
        longest_token = max(
            map(len, instance.vocabulary.tokenizer.get_vocab(with_added_tokens=True))
        )
        self._max_characters = instance.max_model_len * longest_token
        vocabulary = instance.vocabulary
        self._grammars = Grammars(
            vocabulary.tokenizer, vocabulary.vocab_size, vocabulary.eos_token_ids
        )

    async def admit(self, asked: CompletionRequest | ChatRequest) -> GenerationRun:
        """Return a run that can be submitted.

        Raises:
            RequestError: this engine cannot serve the request.
        """
        _refuse_proxys_work(asked)
        self._instance.refuse(asked)
        ids, written_here = await self._history(asked)
        if not ids:
            raise RequestError("prompt must not be empty", param="prompt")
        self._check_ids(ids, "prompt")
        self._check_ids(asked.stop_token_ids, "stop_token_ids")
        params = asked.kvrs or KvrsParams(
            stream=StreamId(secrets.token_hex(16)), attempt=1, prompt_tokens=0
        )
        # A text is the client's whole prompt, whose length is known only now.
        prompt_tokens = (
            len(ids) if written_here else min(params.prompt_tokens or len(ids), len(ids))
        )
        transfer = asked.kv_transfer_params or KvTransferParams()
        _check_name(params.stream, "kvrs.stream")
        _check_name(transfer.remote_request_id or "", "kv_transfer_params.remote_request_id")
        max_tokens = self._max_tokens(
            asked, prompt_tokens, len(ids), prefill_only=transfer.do_remote_decode
        )
        sources = self._sources(transfer, params)
        sequence = Sequence(
            stream=params.stream,
            attempt=(params.owner_epoch, params.attempt),
            token_ids=list(ids),
            prompt_tokens=prompt_tokens,
            root=self._instance.root(asked.cache_salt),
            prefill_only=transfer.do_remote_decode,
            pulls=tuple(source.pages for source in sources if source.pages),
            pull_tail=any(source.handoff is not None for source in sources),
        )
        # Prefill checks the grammar too, so that the client gets errors at once.
        grammar = None
        if bytes(memoryview(asked.response_format)[:1]) != b"n":
            grammar = await asyncio.to_thread(self._grammars.grammar, asked.response_format)
        made = partial(
            make_run, asked, max_tokens, sequence, sources, self._instance.vocabulary, grammar
        )
        if sequence.prefill_only or len(ids) - prompt_tokens <= _QUICKLY_REPLAYED_TOKENS:
            return made()
        return await asyncio.to_thread(made)

    async def _history(self, asked: CompletionRequest | ChatRequest) -> tuple[list[int], bool]:
        """Return the prompt and the output so far, and whether this engine tokenised it."""
        instance = self._instance
        given = asked.kvrs.token_ids if asked.kvrs is not None else None
        if isinstance(asked, CompletionRequest):
            if given is not None:
                raise RequestError("a completion's history is its prompt", param="kvrs.token_ids")
            if isinstance(asked.prompt, str):
                return await self._tokenised(asked.prompt, "prompt", special_tokens=True), True
            return asked.prompt, False
        if given is not None:
            return given, False
        if instance.chat_template is None:
            raise RequestError(
                f"model {instance.model} has no chat template; allowed: /v1/completions",
                param="messages",
            )
        render = partial(instance.chat_template.render, asked)
        prompt = await self.large.run(asked.template_bytes, render)
        # The template contains the special tokens.
        return await self._tokenised(prompt, "messages", special_tokens=False), True

    async def _tokenised(self, text: str, name: str, *, special_tokens: bool) -> list[int]:
        # Check the size first, because counting the tokens would take seconds.
        if len(text) > self._max_characters:
            raise RequestError(
                f"the prompt has {len(text)} characters, which are more than "
                f"{self._instance.max_model_len} tokens",
                param=name,
                code=TOO_LONG,
            )
        try:
            text.encode()
        except UnicodeEncodeError:
            # The JSON in the arguments of a tool call may contain them.
            raise RequestError(
                "the prompt contains half a surrogate pair, which is no character", param=name
            ) from None
        encode = self._instance.vocabulary.tokenizer.encode
        if len(text) <= _QUICKLY_TOKENISED_CHARACTERS:
            return encode(text, add_special_tokens=special_tokens).ids
        encoded = await asyncio.to_thread(encode, text, add_special_tokens=special_tokens)
        # Check the length first, because a list of millions of ids takes long to create.
        self._check_length(len(encoded))
        return encoded.ids

    def _check_length(self, tokens: int) -> None:
        if tokens > self._instance.max_model_len:
            raise RequestError(
                f"the prompt has {tokens} tokens; allowed: at most "
                f"{self._instance.max_model_len - 1}",
                param="prompt",
                code=TOO_LONG,
            )

    def _check_ids(self, token_ids: list[int], name: str) -> None:
        vocab_size = self._instance.vocabulary.vocab_size
        for wrong in (min(token_ids, default=0), max(token_ids, default=0)):
            if not 0 <= wrong < vocab_size:
                raise RequestError(
                    f"token ids must be in [0, {vocab_size - 1}], got {wrong}", param=name
                )

    def _max_tokens(
        self,
        asked: CompletionRequest | ChatRequest,
        prompt_tokens: int,
        history_tokens: int,
        *,
        prefill_only: bool,
    ) -> int:
        longest = self._instance.max_model_len
        max_tokens = (
            max(1, longest - prompt_tokens) if asked.max_tokens is None else asked.max_tokens
        )
        if prompt_tokens >= longest:
            raise RequestError(
                f"the prompt has {prompt_tokens} tokens; allowed: at most {longest - 1}",
                param="prompt",
                code=TOO_LONG,
            )
        if max(prompt_tokens + max_tokens, history_tokens) > longest:
            raise RequestError(
                f"prompt ({prompt_tokens} tokens) and max_tokens ({max_tokens}) together "
                f"must be at most {longest} tokens",
                param="max_tokens",
                code=TOO_LONG,
            )
        if history_tokens > prompt_tokens + max_tokens and not prefill_only:
            raise RequestError(
                f"the output so far has more than max_tokens ({max_tokens}) tokens",
                param="max_tokens",
            )
        return max_tokens

    def _sources(self, transfer: KvTransferParams, params: KvrsParams) -> tuple[PullSource, ...]:
        """Return the sources of the history's pages: the prefill instance of a hand-off, or the
        holders for a recovery.
        """
        if transfer.do_remote_prefill and transfer.remote_engine_id is not None:
            known = self._known(InstanceId(transfer.remote_engine_id), "kv_transfer_params")
            handoff = (
                StreamId(transfer.remote_request_id)
                if transfer.remote_request_id is not None
                else None
            )
            return (
                PullSource(
                    known,
                    None,
                    range(len(transfer.remote_block_ids or [])),
                    TrafficClass.HANDOFF,
                    handoff,
                ),
            )
        sources: list[PullSource] = []
        for run in sorted(params.sources, key=lambda run: run.first_page):
            pages = range(run.first_page, run.first_page + run.pages)
            sources.append(
                PullSource(
                    self._known(run.id, "kvrs.sources"),
                    run.generation,
                    pages,
                    TrafficClass.RECOVERY if run.within_s is None else TrafficClass.HANDOFF,
                    within_s=inf if run.within_s is None else run.within_s,
                )
            )
        return tuple(sources)

    def _known(self, peer: InstanceId, param: str) -> InstanceId:
        if peer not in self._instance.registry:
            allowed = ", ".join(self._instance.registry)
            raise RequestError(f"{peer!r} is not in the registry; allowed: {allowed}", param=param)
        return peer


def _check_name(name: str, param: str) -> None:
    """Raises RequestError if a stream's name does not fit into a frame."""
    if (size := len(name.encode())) > MAX_NAME_BYTES:
        raise RequestError(
            f"a name of {size} bytes; allowed: at most {MAX_NAME_BYTES}", param=param
        )


def _refuse_proxys_work(asked: CompletionRequest | ChatRequest) -> None:
    """Refuse several choices or prompts: the proxy opens a stream for each, so that each is
    recovered separately.
    """
    if asked.n != 1:
        raise RequestError(f"n={asked.n} is the proxy's work; allowed here: 1", param="n")
    if isinstance(asked, CompletionRequest) and asked.echo:
        raise RequestError("echo=true is the proxy's work; allowed here: false", param="echo")
