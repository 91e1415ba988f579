"""Records what vLLM's own serving layer streams for the scripts, without a model.

Run in an environment with vLLM, in the root of the repository:

    .venv-vllm/bin/python -m kvrs_testkit.engine_streams.record_vllm [NAME ...]

The engine behind the serving layer is replaced: its outputs are the ids of a script, as vLLM's own
detokenizer turns them into text. The parsers, the generators of the stream and of the whole answer,
and all models of the answer are vLLM's.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import vllm
from vllm.entrypoints.generate.base.protocol import RequestResponseMetadata
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.parser import ParserManager
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

from kvrs_testkit.engine_streams.recorder import run
from kvrs_testkit.engine_streams.scripts import Script
from kvrs_testkit.engine_streams.vocabulary import end_id
from kvrs_testkit.engine_streams.writing import (
    Heard,
    packs,
    same_every_time,
    spelled,
)


def record(script: Script, loaded: Any) -> Heard:
    """Let vLLM answer one script, as a stream and whole."""
    heard = Heard(vllm.__version__.split("+")[0])
    asyncio.run(_stream(script, loaded, heard))
    heard.whole = asyncio.run(_whole(script, loaded))
    return heard


def _serving(script: Script, loaded: Any) -> Any:
    """The handler of chats of vLLM without an engine behind it: only what its answers depend on."""
    serving: Any = object.__new__(OpenAIServingChat)
    serving.model_config = SimpleNamespace(
        model="tiny",
        architecture="",
        hf_config=SimpleNamespace(model_type="tiny"),
        hf_text_config=SimpleNamespace(model_type="tiny"),
        tokenizer_mode="auto",
    )
    serving.response_role = "assistant"
    serving.system_fingerprint = None
    serving.enable_log_outputs, serving.request_logger = False, None
    serving.enable_auto_tools = script.tool_parser is not None
    serving._include_reasoning_tokens_details = script.reasoning_parser is not None
    serving.parser_cls = ParserManager.get_parser(
        tool_parser_name=script.tool_parser,
        reasoning_parser_name=script.reasoning_parser or "",
        enable_auto_tools=serving.enable_auto_tools,
        model_name="tiny",
        tokenizer=loaded,
    )
    serving.enable_force_include_usage = False
    serving.enable_prompt_tokens_details = False
    serving.enable_per_request_metrics = False
    serving.return_tokens_as_token_ids = False
    serving.chat_template, serving.chat_template_content_format = None, "auto"
    serving.default_chat_template_kwargs = {}
    return serving


def _request(script: Script, stream: bool) -> Any:
    fields = script.asked | {"stream": stream}
    return ChatCompletionRequest.model_validate(fields)


async def _stream(script: Script, loaded: Any, heard: Heard) -> None:
    serving, request = _serving(script, loaded), _request(script, True)
    templated = serving._effective_chat_template_kwargs(request)
    request = serving._make_parser(request, loaded, templated).adjust_request(request)
    made = 0

    async def outputs() -> AsyncIterator[Any]:
        nonlocal made
        async for one in _outputs(script, request, loaded):
            made += len(one.outputs[0].token_ids)
            yield one

    same_every_time(script)
    async for event in serving.chat_completion_stream_generator(
        request,
        outputs(),
        "chatcmpl-recorded",
        "tiny",
        [],
        loaded,
        RequestResponseMetadata(request_id="chatcmpl-recorded"),
        chat_template_kwargs=templated,
    ):
        data = event.removeprefix("data: ").removesuffix("\n\n")
        if data != "[DONE]":
            heard.events.append(data)
            # The first event comes with the first token, but has none.
            heard.covered.append(made if len(heard.events) > 1 else 0)


async def _whole(script: Script, loaded: Any) -> str:
    serving, request = _serving(script, loaded), _request(script, False)
    templated = serving._effective_chat_template_kwargs(request)
    parser = serving._make_parser(request, loaded, templated)
    request = parser.adjust_request(request)
    written = spelled(script)

    async def outputs() -> AsyncIterator[Any]:
        text = ""
        async for one in _outputs(script, request, loaded):
            text += one.outputs[0].text
        one.outputs[0].text, one.outputs[0].token_ids = text, written.ids
        yield one

    same_every_time(script)
    answer = await serving.chat_completion_full_generator(
        request,
        outputs(),
        "chatcmpl-recorded",
        "tiny",
        [],
        loaded,
        RequestResponseMetadata(request_id="chatcmpl-recorded"),
        parser=parser,
    )
    # As the route does, whose JSONResponse keeps the order and the nulls of this.
    choice = answer.model_dump()["choices"][0]
    return json.dumps(choice, ensure_ascii=False, separators=(",", ":"))


async def _outputs(script: Script, request: Any, loaded: Any) -> AsyncIterator[Any]:
    """The outputs of the engine: the ids of the script, `tokens_per_event` in each."""
    written = spelled(script)
    params = request.to_sampling_params(len(written.ids), {})
    asked = SimpleNamespace(
        request_id="recorded", prompt_token_ids=written.prompt_ids, sampling_params=params
    )
    text = FastIncrementalDetokenizer(loaded, asked)
    given = 0
    for piece in packs(written.ids, script.tokens_per_event):
        given += len(piece)
        is_last = given == len(written.ids)
        text.update([each for each in piece if each != end_id()], stop_terminated=False)
        output = CompletionOutput(
            index=0,
            text=text.get_next_output_text(is_last, delta=True),
            token_ids=piece,
            cumulative_logprob=None,
            logprobs=None,
            finish_reason="stop" if is_last else None,
        )
        yield RequestOutput(
            request_id="recorded",
            prompt=None,
            prompt_token_ids=written.prompt_ids,
            prompt_logprobs=None,
            outputs=[output],
            finished=is_last,
        )


def registered() -> dict[str, list[str]]:
    """The names of vLLM's parsers."""
    return {
        "tools": sorted(ToolParserManager.list_registered()),
        "thought": sorted(ReasoningParserManager.list_registered()),
    }


if __name__ == "__main__":
    run("vllm", registered, record)
