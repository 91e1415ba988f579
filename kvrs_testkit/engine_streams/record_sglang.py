r"""Records what SGLang's own serving layer streams for the scripts, without a model.

Run in an environment with SGLang, in the root of the repository:

    PYTHONPATH=tests/sglang/stand_ins .venv-sglang/bin/python \
        -m kvrs_testkit.engine_streams.record_sglang [NAME ...]

The engine behind the serving layer is replaced: its outputs are the ids of a script, as SGLang's
own detokenizer turns them into text. The parsers and the generators of the answers are SGLang's.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import sglang
from sglang.srt.entrypoints.openai import serving_chat
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.managers.detokenizer_manager import DetokenizerManager, tool_close_token_ids
from sglang.srt.parser.reasoning_parser import ReasoningParser

from kvrs_testkit.engine_streams.recorder import run
from kvrs_testkit.engine_streams.scripts import Script
from kvrs_testkit.engine_streams.vocabulary import end_id
from kvrs_testkit.engine_streams.writing import (
    Heard,
    packs,
    same_every_time,
    spelled,
)

# The defaults of the server's flags that its answers depend on.
_FLAGS = SimpleNamespace(
    stream_response_default_include_usage=False,
    incremental_streaming_output=False,
    enable_cache_report=False,
    return_input_ids=False,
    return_output_ids=False,
)


def record(script: Script, loaded: Any) -> Heard:
    """Let SGLang answer one script, as a stream and whole."""
    serving_chat.get_serving = lambda: _FLAGS
    heard = Heard(sglang.__version__)
    asyncio.run(_stream(script, loaded, heard))
    heard.whole = _whole(script, loaded)
    return heard


def _serving(script: Script, loaded: Any) -> Any:
    """SGLang's handler of chats without an engine behind it: only what its answers depend on."""
    serving: Any = object.__new__(serving_chat.OpenAIServingChat)
    serving.tokenizer_manager = SimpleNamespace(tokenizer=loaded)
    serving.template_manager = SimpleNamespace(force_reasoning=False, reasoning_config=None)
    serving.tool_call_parser = script.tool_parser
    serving.reasoning_parser = script.reasoning_parser
    serving._reasoning_detector = None
    if script.reasoning_parser is not None:
        parser = ReasoningParser(
            model_type=script.reasoning_parser, stream_reasoning=True, tokenizer=loaded
        )
        serving._reasoning_detector = parser.detector
    serving.is_gpt_oss = "gpt-oss" in (script.tool_parser, script.reasoning_parser)
    serving.is_gemma4 = "gemma4" in (script.tool_parser, script.reasoning_parser)
    serving.is_minimax_m3 = False
    serving.chat_encoding_spec, serving._encoding_adapter = None, None
    serving.default_chat_template_kwargs = {}
    return serving


def _request(script: Script, serving: Any, stream: bool) -> Any:
    """The request, with the changes that the server makes before it generates."""
    request = ChatCompletionRequest.model_validate(script.asked | {"stream": stream})
    if serving.is_gpt_oss or serving.is_gemma4 or serving._tool_call_parsing_active(request):
        request.skip_special_tokens = False
    serving._patch_reasoning_skip_special_tokens(request)
    return request


async def _stream(script: Script, loaded: Any, heard: Heard) -> None:
    serving = _serving(script, loaded)
    request = _request(script, serving, True)
    made = 0

    async def outputs(*_: Any) -> AsyncIterator[dict[str, Any]]:
        nonlocal made
        for output in _outputs(script, request, loaded):
            made = output["meta_info"]["completion_tokens"]
            yield output

    serving.tokenizer_manager.generate_request = outputs
    same_every_time(script)
    async for event in serving._generate_chat_stream(None, request, None):
        data = event.removeprefix("data: ").removesuffix("\n\n")
        if data != "[DONE]":
            heard.events.append(data)
            # The first event comes with the first token, but has none.
            heard.covered.append(made if len(heard.events) > 1 else 0)


def _whole(script: Script, loaded: Any) -> str:
    serving = _serving(script, loaded)
    request = _request(script, serving, False)
    *_, last = _outputs(script, request, loaded)
    same_every_time(script)
    answer = serving._build_chat_response(request, [last], 1_700_000_000)
    choice = json.loads(answer.model_dump_json())["choices"][0]
    return json.dumps(choice, ensure_ascii=False, separators=(",", ":"))


def _outputs(script: Script, request: Any, loaded: Any) -> Iterator[dict[str, Any]]:
    """The outputs of the tokenizer manager: all text until now, `tokens_per_event` more in each."""
    written = spelled(script)
    manager: Any = object.__new__(DetokenizerManager)
    manager.decode_status, manager.vocab_size, manager.tokenizer = {}, None, loaded
    manager.disable_tokenizer_batch_decode = True
    manager.is_tool_call_parser_gpt_oss = script.tool_parser == "gpt-oss"
    manager.tool_close_token_ids = tool_close_token_ids(script.tool_parser, loaded)
    text, given = "", 0
    for piece in packs(written.ids, script.tokens_per_event):
        given += len(piece)
        reason = {"type": "stop", "matched": end_id()} if given == len(written.ids) else None
        text += manager._decode_batch_token_id_output(
            SimpleNamespace(
                rids=["recorded"],
                decoded_texts=[""],
                decode_ids=[piece],
                read_offsets=[0],
                finished_reasons=[reason],
                no_stop_trim=[False],
                skip_special_tokens=[request.skip_special_tokens],
                spaces_between_special_tokens=[request.skip_special_tokens],
            )
        )[0]
        yield {
            "text": text,
            "output_ids": written.ids[:given],
            "meta_info": {
                "id": "chatcmpl-recorded",
                "finish_reason": reason,
                "prompt_tokens": len(written.prompt_ids),
                "completion_tokens": given,
                "cached_tokens": 0,
                "weight_version": "default",
            },
        }


def registered() -> dict[str, list[str]]:
    """The names of SGLang's parsers."""
    return {
        "tools": sorted(FunctionCallParser.ToolCallParserEnum),
        "thought": sorted(ReasoningParser.DetectorMap),
    }


if __name__ == "__main__":
    run("sglang", registered, record)
