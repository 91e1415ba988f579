"""The scripts that the recordings play: what a model writes, and which parsers read it.

Everything in them is invented. No engine is imported here.
"""

# ruff: noqa: RUF001 - the bars in the marks of several models are of full width.

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from kvrs_testkit.engine_streams import formats
from kvrs_testkit.engine_streams.formats import Call, Format

ToolChoice = Literal["auto", "required", "named", "none"]
Engine = Literal["vllm", "sglang"]

CALLS: tuple[Call, ...] = (
    ("delete_files", {"files": ["a.tmp", "b.tmp", "c.tmp"], "recursive": False}),
    ("send_note", {"to": "Jürgen", "text": "Done 🎉 ok", "urgent": True}),
)
CONTENT = "I tidy up, für dich."
THOUGHT = "Three files, Vorsicht 🤔 only temporary ones."
ANSWER = "They are gone. Grüße 🎉"
PROMPT = "user: Tidy up.\nassistant: "

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "delete_files",
            "parameters": {
                "type": "object",
                "properties": {
                    "files": {"type": "array", "items": {"type": "string"}},
                    "recursive": {"type": "boolean"},
                },
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "send_note",
            "parameters": {
                "type": "object",
                "properties": {
                    "to": {"type": "string"},
                    "text": {"type": "string"},
                    "urgent": {"type": "boolean"},
                },
            },
        },
    },
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """One output of a model, with the parsers and the request that it belongs to."""

    engine: Engine
    text: str
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    tool_choice: ToolChoice = "none"  # None: the request has no tools.
    tokens_per_event: int = 1
    prompt: str = PROMPT
    # What a client should have of it.
    content: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    fields: tuple[tuple[str, Any], ...] = ()  # More fields of the request.

    @property
    def name(self) -> str:
        """The name of the recording, which is that of its file."""
        parts: list[str] = [self.engine]
        if self.tool_parser is not None:
            parts += ["tools", self.tool_parser]
        if self.reasoning_parser is not None:
            parts += ["thought", self.reasoning_parser]
        if self.tool_choice not in ("auto", "none"):
            parts.append(self.tool_choice)
        if self.tokens_per_event > 1:
            parts.append(f"by{self.tokens_per_event}")
        return "-".join(parts)

    @property
    def request(self) -> dict[str, Any]:
        """The chat request, but for its messages and its tools, which are `TOOLS`."""
        asked: dict[str, Any] = {"model": "tiny", "temperature": 0.0, "stream": True}
        if self.engine == "vllm":
            asked["return_token_ids"] = True
        if self.tool_choice != "none":
            choice: Any = self.tool_choice
            if choice == "named":
                choice = {"type": "function", "function": {"name": CALLS[0][0]}}
            asked |= {"tool_choice": choice}
        return asked | dict(self.fields)

    @property
    def asked(self) -> dict[str, Any]:
        """The whole chat request."""
        messages = [{"role": "user", "content": "Tidy up."}]
        tools = {} if self.tool_choice == "none" else {"tools": TOOLS}
        return self.request | {"messages": messages} | tools


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How the output for a tool parser looks."""

    write: Format
    before: str = f"{CONTENT}\n"  # What is written before the calls.
    after: str = ""
    calls: int = len(CALLS)
    prompt: str = PROMPT
    # The grammar of a forced call: the format of the parser, or JSON of the server.
    forced: Literal["own", "json"] = "own"
    content: str | None = None  # None: `before`.


@dataclass(frozen=True, slots=True)
class ThoughtFormat:
    """How the output for a reasoning parser looks."""

    before: str = ""
    end: str = "</think>"
    after: str = ""
    prompt: str = PROMPT
    fields: tuple[tuple[str, Any], ...] = ()
    content: str = ANSWER
    reasoning: str = THOUGHT


_HERMES = formats.tagged("<tool_call>", "</tool_call>")
_LLAMA3 = formats.objects("", "; ", "parameters")
_QWEN3_CODER = formats.functions("<tool_call>", "</tool_call>")
_GLM = formats.keys_and_values()
_THINKS = PROMPT + "<think>\n"  # The template opens the thought.

VLLM_TOOLS: dict[str, ToolFormat] = {
    "apertus": ToolFormat(formats.apertus, forced="json"),
    "deepseek_v3": ToolFormat(formats.deepseek_v3),
    "deepseek_v31": ToolFormat(formats.deepseek_v31),
    "deepseek_v32": ToolFormat(formats.dsml("function_calls")),
    "deepseek_v4": ToolFormat(formats.dsml("tool_calls")),
    "deepseek_v41": ToolFormat(formats.dsml("calls", " ")),
    "dots": ToolFormat(formats.invokes("<dots_function_call>", "</dots_function_call>")),
    "ernie45": ToolFormat(_HERMES, forced="json"),
    "functiongemma": ToolFormat(formats.functiongemma, forced="json"),
    "gemma4": ToolFormat(formats.gemma4),
    "gigachat3": ToolFormat(
        formats.objects("<|message_sep|>\n\nfunction call<|role_sep|>\n", "", "arguments"),
        before=CONTENT,
        calls=1,
        forced="json",
    ),
    "glm47": ToolFormat(formats.keys_and_values(sep="")),
    "granite": ToolFormat(formats.listed("<|tool_call|>"), before="", forced="json"),
    "granite-20b-fc": ToolFormat(
        formats.objects("<function_call> ", "<function_call> ", "arguments"),
        before="",
        forced="json",
    ),
    "granite4": ToolFormat(_HERMES, forced="json"),
    "hermes": ToolFormat(_HERMES),
    "hunyuan_a13b": ToolFormat(
        formats.listed("<tool_calls>", "</tool_calls>"), before="", forced="json"
    ),
    "hy_v3": ToolFormat(formats.hunyuan_v3),
    "hy_v4": ToolFormat(formats.hunyuan_v4),
    "inkling": ToolFormat(
        formats.inkling,
        before=f"<|message_model|><|content_text|>{CONTENT}<|end_message|>",
        content=CONTENT,
    ),
    "internlm": ToolFormat(
        formats.objects("<|action_start|><|plugin|>\n", "", "parameters"),
        after="<|action_end|>",
        calls=1,
        forced="json",
    ),
    "jamba": ToolFormat(formats.listed("<tool_calls>", "</tool_calls>"), forced="json"),
    "k2_horizon": ToolFormat(formats.k2_horizon),
    "kimi_k2": ToolFormat(formats.kimi_k2),
    "kimi_k3": ToolFormat(
        formats.kimi_k3,
        before=f"<|open|>response<|sep|>{CONTENT}<|close|>response<|sep|>",
        after="<|close|>message<|sep|>",
        content=CONTENT,
    ),
    "lfm2": ToolFormat(
        formats.pythonic("<|tool_call_start|>[", "]<|tool_call_end|>"), forced="json"
    ),
    "ling3": ToolFormat(_GLM),
    "llama3_json": ToolFormat(_LLAMA3, before=""),
    "llama4_pythonic": ToolFormat(
        formats.pythonic("<|python_start|>[", "]<|python_end|>"), before="", forced="json"
    ),
    "longcat": ToolFormat(formats.tagged("<longcat_tool_call>", "</longcat_tool_call>")),
    "mimo": ToolFormat(formats.functions("<tool_call>", "</tool_call>", "")),
    "minicpm5": ToolFormat(formats.minicpm5, forced="json"),
    "minimax_m2": ToolFormat(formats.invokes("<minimax:tool_call>", "</minimax:tool_call>")),
    "minimax_m3": ToolFormat(formats.minimax_m3),
    "mistral": ToolFormat(formats.mistral_v11, before=CONTENT),
    "muse_glimmer": ToolFormat(
        formats.muse_glimmer,
        before=f" to=user<|message|>{CONTENT}<|eom|><|start|>assistant to=tools<|message|>",
        after="<|eot|>",
        content=CONTENT,
    ),
    "olmo3": ToolFormat(
        formats.pythonic("<function_calls>", "</function_calls>", "\n"), before="", forced="json"
    ),
    "phi4_mini_json": ToolFormat(formats.listed("functools"), before="", forced="json"),
    "plamo3": ToolFormat(formats.plamo3),
    "poolside_v1": ToolFormat(_GLM),
    "pythonic": ToolFormat(formats.pythonic(), before="", forced="json"),
    "qwen3_coder": ToolFormat(_QWEN3_CODER),
    "seed_oss": ToolFormat(formats.functions("<seed:tool_call>", "</seed:tool_call>", "")),
    "step3": ToolFormat(formats.step3, forced="json"),
    "step3p5": ToolFormat(_QWEN3_CODER),
    "xlam": ToolFormat(formats.listed(""), before="", forced="json"),
}
VLLM_THOUGHTS: dict[str, ThoughtFormat] = {
    "deepseek_r1": ThoughtFormat(prompt=_THINKS),
    "deepseek_v3": ThoughtFormat(
        prompt=_THINKS, fields=(("chat_template_kwargs", {"thinking": True}),)
    ),
    "deepseek_v4": ThoughtFormat(
        prompt=_THINKS, fields=(("chat_template_kwargs", {"thinking": True}),)
    ),
    "deepseek_v41": ThoughtFormat(
        prompt=_THINKS, fields=(("chat_template_kwargs", {"thinking": True}),)
    ),
    "ernie45": ThoughtFormat(
        prompt=_THINKS, end="\n</think>\n\n<response>\n", after="\n</response>\n"
    ),
    "gemma4": ThoughtFormat(
        before="<|channel>thought\n",
        end="<channel|>",
        fields=(("chat_template_kwargs", {"enable_thinking": True}),),
    ),
    "glm45": ThoughtFormat(prompt=PROMPT + "<think>"),
    "granite": ThoughtFormat(before="Here is my thought process:", end="Here is my response:"),
    "granite_thinking_parser": ThoughtFormat(prompt=_THINKS),
    "holo2": ThoughtFormat(prompt=_THINKS),
    "hy_v3": ThoughtFormat(prompt=PROMPT + "<think>", fields=(("reasoning_effort", "high"),)),
    "hy_v4": ThoughtFormat(prompt=PROMPT + "<think>", fields=(("reasoning_effort", "high"),)),
    "inkling": ThoughtFormat(
        before="<|message_model|><|content_thinking|>",
        end="<|end_message|><|message_model|><|content_text|>",
        after="<|end_message|>",
    ),
    "k2_horizon": ThoughtFormat(prompt=PROMPT + "<ifm|think>", end="</ifm|think>"),
    "kimi_k2": ThoughtFormat(before="<think>"),
    "kimi_k3": ThoughtFormat(
        prompt=PROMPT + "<|open|>think<|sep|>",
        end="<|close|>think<|sep|><|open|>response<|sep|>",
        after="<|close|>response<|sep|><|close|>message<|sep|>",
    ),
    "ling3": ThoughtFormat(prompt=PROMPT + "<think>"),
    "mimo": ThoughtFormat(before="<think>\n"),
    "minicpmv": ThoughtFormat(prompt=_THINKS),
    "minimax_m2": ThoughtFormat(prompt=_THINKS),
    "minimax_m2_append_think": ThoughtFormat(
        prompt=_THINKS, reasoning="", content=f"<think>{THOUGHT}</think>{ANSWER}"
    ),
    "minimax_m3": ThoughtFormat(before="<mm:think>", end="</mm:think>"),
    "mistral": ThoughtFormat(before="[THINK]", end="[/THINK]"),
    "muse_glimmer": ThoughtFormat(
        before=" to=self<|message|>",
        end="<|eom|><|start|>assistant to=user<|message|>",
        after="<|eot|>",
    ),
    "nemotron_v3": ThoughtFormat(prompt=_THINKS),
    "olmo3": ThoughtFormat(prompt=PROMPT + "<think>"),
    "plamo3": ThoughtFormat(before="<|plamo:begin_think:plamo|>", end="<|plamo:end_think:plamo|>"),
    "poolside_v1": ThoughtFormat(
        prompt="user: Tidy up.\n<assistant><think>",
        fields=(("chat_template_kwargs", {"enable_thinking": True}),),
    ),
    "qwen3": ThoughtFormat(prompt=_THINKS),
    "seed_oss": ThoughtFormat(before="<seed:think>", end="</seed:think>"),
    "step3": ThoughtFormat(prompt=_THINKS),
    "step3p5": ThoughtFormat(prompt=_THINKS),
}
# Reasoning parser and tool parser of common models.
VLLM_PAIRS = (
    ("qwen3", "hermes"),
    ("qwen3", "qwen3_coder"),
    ("deepseek_r1", "hermes"),
    ("deepseek_r1", "llama3_json"),
    ("deepseek_r1", "pythonic"),
    ("deepseek_v3", "deepseek_v31"),
    ("glm45", "glm47"),
    ("kimi_k2", "kimi_k2"),
    ("minimax_m2", "minimax_m2"),
    ("mistral", "mistral"),
    ("step3", "step3"),
)
VLLM_FORCED = (
    "hermes",
    "llama3_json",
    "qwen3_coder",
    "mistral",
    "deepseek_v31",
    "kimi_k2",
    "pythonic",
    "jamba",
    "glm47",
)
SGLANG_TOOLS: dict[str, ToolFormat] = {
    "apertus2509": ToolFormat(formats.apertus),
    "cohere_command4": ToolFormat(
        formats.cohere,
        before=f"<|START_TEXT|>{CONTENT}<|END_TEXT|>",
        content=CONTENT,
        forced="json",
    ),
    "deepseekv3": ToolFormat(formats.deepseek_v3),
    "deepseekv31": ToolFormat(formats.deepseek_v31),
    "deepseekv32": ToolFormat(formats.dsml("function_calls")),
    "deepseekv4": ToolFormat(formats.dsml("tool_calls")),
    "deepseekv41": ToolFormat(formats.dsml("calls", " ")),
    "dots": ToolFormat(
        formats.tagged("<dots_function_call>", "</dots_function_call>"), forced="json"
    ),
    "gemma4": ToolFormat(formats.gemma4, forced="json"),
    "gigachat3": ToolFormat(
        formats.objects("<|message_sep|>\n\nfunction call<|role_sep|>\n", "", "arguments"),
        before=CONTENT,
        calls=1,
        forced="json",
    ),
    "gigachat35": ToolFormat(formats.gcml, forced="json"),
    "glm45": ToolFormat(_GLM, forced="json"),
    "glm47": ToolFormat(formats.keys_and_values(sep="")),
    "gpt-oss": ToolFormat(
        formats.harmony,
        before=f"<|channel|>commentary<|message|>{CONTENT}<|end|><|start|>assistant",
        content=CONTENT,
    ),
    "hermes": ToolFormat(_HERMES),
    "hunyuan": ToolFormat(formats.hunyuan_v3, forced="json"),
    "inkling": ToolFormat(
        formats.inkling,
        before=f"<|message_model|><|content_text|>{CONTENT}<|end_message|>",
        content=CONTENT,
    ),
    "interns1": ToolFormat(
        formats.objects("<|action_start|> <|plugin|>\n", "", "parameters"),
        after="<|action_end|>",
        calls=1,
    ),
    "iquest_q1": ToolFormat(
        formats.keys_and_values("<iquest_tool_call>", "</iquest_tool_call>"), forced="json"
    ),
    "k2_horizon": ToolFormat(formats.k2_horizon, forced="json"),
    "kimi_k2": ToolFormat(formats.kimi_k2),
    "kimi_k3": ToolFormat(
        formats.kimi_k3,
        before=f"<|open|>response<|sep|>{CONTENT}<|close|>response<|sep|>",
        after="<|close|>message<|sep|>",
        content=CONTENT,
    ),
    "lfm2": ToolFormat(
        formats.pythonic("<|tool_call_start|>[", "]<|tool_call_end|>"), forced="json"
    ),
    "ling3": ToolFormat(_GLM),
    "llama3": ToolFormat(formats.objects("<|python_tag|>", ";", "parameters"), before=CONTENT),
    "mimo": ToolFormat(formats.functions("<tool_call>", "</tool_call>", ""), forced="json"),
    "minicpm5": ToolFormat(formats.minicpm5, forced="json"),
    "minimax-m2": ToolFormat(
        formats.invokes("<minimax:tool_call>", "</minimax:tool_call>"), forced="json"
    ),
    "minimax-m3": ToolFormat(formats.minimax_m3, forced="json"),
    "mistral": ToolFormat(formats.listed("[TOOL_CALLS] "), before=CONTENT),
    "muse": ToolFormat(
        formats.muse_glimmer,
        before=f" to=user<|message|>{CONTENT}<|eom|><|start|>assistant to=tools<|message|>",
        after="<|eot|>",
        content=CONTENT,
        forced="json",
    ),
    "poolside_v1": ToolFormat(_GLM, forced="json"),
    "pythonic": ToolFormat(formats.pythonic(), before="", forced="json"),
    "qwen25": ToolFormat(_HERMES),
    "qwen3_coder": ToolFormat(_QWEN3_CODER),
    "spark25": ToolFormat(formats.keys_and_values(within=""), forced="json"),
    "step3": ToolFormat(formats.step3, forced="json"),
    "trinity": ToolFormat(_HERMES),
}
SGLANG_THOUGHTS: dict[str, ThoughtFormat] = {
    "apertus2509": ThoughtFormat(before="<|inner_prefix|>", end="<|inner_suffix|>"),
    "cohere_command4": ThoughtFormat(
        before="<|START_THINKING|>",
        end="<|END_THINKING|><|START_TEXT|>",
        after="<|END_TEXT|>",
    ),
    "deepseek-r1": ThoughtFormat(prompt=_THINKS),
    "deepseek-v3": ThoughtFormat(
        prompt=_THINKS, fields=(("chat_template_kwargs", {"thinking": True}),)
    ),
    "deepseek-v4": ThoughtFormat(
        prompt=_THINKS, fields=(("chat_template_kwargs", {"thinking": True}),)
    ),
    "gemma4": ThoughtFormat(
        before="<|channel>thought\n",
        end="<channel|>",
        fields=(("chat_template_kwargs", {"enable_thinking": True}),),
    ),
    "glm45": ThoughtFormat(before="<think>"),
    "gpt-oss": ThoughtFormat(
        before="<|channel|>analysis<|message|>",
        end="<|end|><|start|>assistant<|channel|>final<|message|>",
        after="<|return|>",
    ),
    "granite_thinking_parser": ThoughtFormat(prompt=_THINKS),
    "hunyuan": ThoughtFormat(prompt=PROMPT + "<think>", fields=(("reasoning_effort", "high"),)),
    "inkling": ThoughtFormat(
        before="<|message_model|><|content_thinking|>",
        end="<|end_message|><|message_model|><|content_text|>",
        after="<|end_message|>",
    ),
    "iquest_q1": ThoughtFormat(prompt=_THINKS),
    "k2_horizon": ThoughtFormat(prompt=PROMPT + "<ifm|think>", end="</ifm|think>"),
    "kimi": ThoughtFormat(before="◁think▷", end="◁/think▷"),
    "kimi_k2": ThoughtFormat(before="<think>"),
    "kimi_k3": ThoughtFormat(
        prompt=PROMPT + "<|open|>think<|sep|>",
        end="<|close|>think<|sep|><|open|>response<|sep|>",
        after="<|close|>response<|sep|><|close|>message<|sep|>",
    ),
    "ling3": ThoughtFormat(prompt=PROMPT + "<think>"),
    "mimo": ThoughtFormat(before="<think>"),
    "minimax-append-think": ThoughtFormat(
        prompt=_THINKS, reasoning="", content=f"<think>{THOUGHT}</think>{ANSWER}"
    ),
    "minimax-m3": ThoughtFormat(before="<mm:think>", end="</mm:think>"),
    "mistral": ThoughtFormat(
        before="[THINK]", end="[/THINK]", fields=(("reasoning_effort", "high"),)
    ),
    "muse": ThoughtFormat(
        before=" to=self<|message|>",
        end="<|eom|><|start|>assistant to=user<|message|>",
        after="<|eot|>",
    ),
    "nemotron_3": ThoughtFormat(prompt=_THINKS),
    "poolside_v1": ThoughtFormat(
        prompt="user: Tidy up.\n<assistant><think>",
        fields=(("chat_template_kwargs", {"enable_thinking": True}),),
    ),
    "qwen3": ThoughtFormat(prompt=_THINKS),
}
SGLANG_PAIRS = (
    ("qwen3", "qwen25"),
    ("qwen3", "qwen3_coder"),
    ("deepseek-r1", "hermes"),
    ("deepseek-r1", "llama3"),
    ("deepseek-v3", "deepseekv31"),
    ("glm45", "glm47"),
    ("kimi_k2", "kimi_k2"),
)
SGLANG_FORCED = ("qwen25", "hermes", "llama3", "qwen3_coder", "pythonic", "glm47", "kimi_k2")
# Several tokens per event.
PACKED = 4

SPECIAL_MARKERS = (
    "[TOOL_CALLS]",
    "[ARGS]",
    "[THINK]",
    "[/THINK]",
    "<|python_tag|>",
    "<|python_start|>",
    "<|python_end|>",
    "<|action_start|>",
    "<|action_end|>",
    "<|plugin|>",
    "<|tool_call_start|>",
    "<|tool_call_end|>",
    "<|im_start|>",
    "<|message_sep|>",
    "<|role_sep|>",
    "<|tools_prefix|>",
    "<|tools_suffix|>",
    "<|message_model|>",
    "<|content_text|>",
    "<|content_thinking|>",
    "<|content_invoke_tool_json|>",
    "<|content_invoke_tool_text|>",
    "<|content_tool_error|>",
    "<|content_model_end_sampling|>",
    "<|end_message|>",
    "<|channel>",
    "<channel|>",
    "<|tool_call>",
    "<tool_call|>",
    '<|"|>',
    "<|turn>",
    "<turn|>",
    "<|tool_response>",
    "<|open|>",
    "<|close|>",
    "<|sep|>",
    "<|start|>",
    "<|message|>",
    "<|eom|>",
    "<|eot|>",
    "<|channel|>",
    "<|constrain|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
    "<|inner_prefix|>",
    "<|inner_suffix|>",
)
MARKERS = (
    "<think>",
    "</think>",
    "<mm:think>",
    "</mm:think>",
    "<seed:think>",
    "</seed:think>",
    "<seed:tool_call>",
    "</seed:tool_call>",
    "<ifm|think>",
    "</ifm|think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_calls>",
    "</tool_calls>",
    "<tool_sep>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<|tool_call|>",
    "<longcat_tool_call>",
    "</longcat_tool_call>",
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    "]<]minimax[>[",
    "<function_calls>",
    "</function_calls>",
    "<start_function_call>",
    "<end_function_call>",
    "<escape>",
    "<response>",
    "</response>",
    "<assistant>",
    "</assistant>",
    "<0x0A>",
    "<dots_function_call>",
    "</dots_function_call>",
    "<ifm|tool_calls>",
    "</ifm|tool_calls>",
    "<ifm|tool_call>",
    "</ifm|tool_call>",
    "<ifm|arg_key>",
    "</ifm|arg_key>",
    "<ifm|arg_value>",
    "</ifm|arg_value>",
    "｜DSML｜",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "<｜tool_calls_begin｜>",
    "<｜tool_calls_end｜>",
    "<｜tool_call_begin｜>",
    "<｜tool_call_end｜>",
    "<｜tool_sep｜>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|plamo:begin_tool_requests:plamo|>",
    "<|plamo:end_tool_requests:plamo|>",
    "<|plamo:begin_tool_request:plamo|>",
    "<|plamo:end_tool_request:plamo|>",
    "<|plamo:begin_tool_name:plamo|>",
    "<|plamo:end_tool_name:plamo|>",
    "<|plamo:begin_tool_arguments:plamo|>",
    "<|plamo:end_tool_arguments:plamo|>",
    "<|plamo:constrain|>",
    "<|plamo:msg|>",
    "<|plamo:tag|>",
    "<|plamo:begin_think:plamo|>",
    "<|plamo:end_think:plamo|>",
    "<|START_THINKING|>",
    "<|END_THINKING|>",
    "<|START_TEXT|>",
    "<|END_TEXT|>",
    "<|START_ACTION|>",
    "<|END_ACTION|>",
    "◁think▷",
    "◁/think▷",
    "<iquest_tool_call>",
    "</iquest_tool_call>",
)


def _tools(engine: Engine, parser: str, form: ToolFormat, tokens_per_event: int = 1) -> Script:
    calls = CALLS[: form.calls]
    return Script(
        engine=engine,
        text=form.before + form.write(calls) + form.after,
        tool_parser=parser,
        tool_choice="auto",
        tokens_per_event=tokens_per_event,
        prompt=form.prompt,
        content=form.before if form.content is None else form.content,
        calls=calls,
    )


def _forced(
    engine: Engine, parser: str, form: ToolFormat, choice: Literal["required", "named"]
) -> Script:
    calls = CALLS[: 1 if choice == "named" else form.calls]
    text = form.write(calls) + form.after
    if form.forced == "json":
        is_bare = choice == "named" and engine == "vllm"
        text = (formats.only_arguments if is_bare else formats.forced_list)(calls)
    return Script(engine=engine, text=text, tool_parser=parser, tool_choice=choice, calls=calls)


def _thought(engine: Engine, parser: str, form: ThoughtFormat) -> Script:
    return Script(
        engine=engine,
        text=f"{form.before}{THOUGHT}{form.end}{ANSWER}{form.after}",
        reasoning_parser=parser,
        prompt=form.prompt,
        content=form.content,
        reasoning=form.reasoning,
        fields=form.fields,
    )


def _pair(
    engine: Engine, thought: tuple[str, ThoughtFormat], tool: tuple[str, ToolFormat]
) -> Script:
    (reasoning_parser, before), (tool_parser, form) = thought, tool
    calls = CALLS[: form.calls]
    return Script(
        engine=engine,
        text=(f"{before.before}{THOUGHT}{before.end}{form.before}{form.write(calls)}{form.after}"),
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
        tool_choice="auto",
        prompt=before.prompt,
        content=form.before if form.content is None else form.content,
        reasoning=THOUGHT,
        calls=calls,
        fields=before.fields,
    )


def _scripts() -> Iterator[Script]:
    tables: tuple[tuple[Engine, Any, Any, Any, Any], ...] = (
        ("vllm", VLLM_TOOLS, VLLM_THOUGHTS, VLLM_PAIRS, VLLM_FORCED),
        ("sglang", SGLANG_TOOLS, SGLANG_THOUGHTS, SGLANG_PAIRS, SGLANG_FORCED),
    )
    for engine, tools, thoughts, pairs, forced in tables:
        for parser, form in tools.items():
            yield _tools(engine, parser, form)
            yield _tools(engine, parser, form, PACKED)
        for parser, thought in thoughts.items():
            yield _thought(engine, parser, thought)
        for parser, tool in pairs:
            yield _pair(engine, (parser, thoughts[parser]), (tool, tools[tool]))
        for parser in forced:
            yield _forced(engine, parser, tools[parser], "required")
            yield _forced(engine, parser, tools[parser], "named")


SCRIPTS: tuple[Script, ...] = tuple(_scripts())

# Why a registered parser has no recording, by engine and kind; `=NAME`: NAME's class reads it too.
LEFT_OUT: dict[tuple[Engine, Literal["tools", "thought"]], dict[str, str]] = {
    ("vllm", "tools"): {
        "cohere_command3": "needs the library cohere-melody",
        "cohere_command4": "needs the library cohere-melody",
        "glm45": "=glm47",
        "hf": "needs a tokenizer with a response template",
        "llama4_json": "=llama3_json",
        "openai": "needs the vocabulary of gpt-oss, which its library downloads",
        "qwen3_json": "=hermes",
        "qwen3_xml": "=qwen3_coder",
    },
    ("vllm", "thought"): {
        "cohere_command3": "needs the library cohere-melody",
        "cohere_command4": "needs the library cohere-melody",
        "glm47": "=glm45",
        "hf": "needs a tokenizer with a response template",
        "hunyuan_a13b": "compares ids with those of its own model's vocabulary",
        "openai_gptoss": "needs the vocabulary of gpt-oss, which its library downloads",
    },
    ("sglang", "tools"): {
        "beam": "needs a tokenizer with a response template",
        "glm": "=glm45",
        "nanbeige": "=qwen3_coder",
        "qwen": "=qwen25",
        "response_template": "needs a tokenizer with a response template",
        "step3p5": "=qwen3_coder",
    },
    ("sglang", "thought"): {
        "beam": "needs a tokenizer with a response template",
        "deepseek-v41": "=deepseek-v4",
        "dots": "=qwen3",
        "gigachat35": "=deepseek-r1",
        "interns1": "=qwen3",
        "minimax": "=qwen3",
        "nanbeige": "=qwen3",
        "qwen3-thinking": "=qwen3",
        "response_template": "needs a tokenizer with a response template",
        "step3": "=deepseek-r1",
        "step3p5": "=deepseek-r1",
    },
}
_LOST = "text in one event with the start of a call is lost"
# Recordings whose stream says something else than the model has written, and what the engine does.
DIFFERS: dict[str, str] = {
    "vllm-tools-apertus-by4": _LOST,
    "vllm-tools-deepseek_v3-by4": "the last brace of the arguments is lost",
    "vllm-tools-functiongemma": "each argument but the last is followed by a brace for a comma",
    "vllm-tools-functiongemma-by4": f"as one by one, and {_LOST}",
    "vllm-tools-hunyuan_a13b": "the start of the calls is content",
    "vllm-tools-hunyuan_a13b-by4": "the arguments of the last call come twice",
    "vllm-tools-jamba": "quotes of the arguments are lost, or the arguments come twice",
    "vllm-tools-jamba-by4": f"quotes of the arguments are lost, and {_LOST}",
    "vllm-tools-minicpm5": "the first call is content too",
    "vllm-tools-minicpm5-by4": "the first call is content too",
    "vllm-tools-phi4_mini_json": "a list in the arguments hides all calls",
    "vllm-tools-phi4_mini_json-by4": "a list in the arguments hides all calls",
    "vllm-tools-step3": "a list in the arguments is a string",
    "vllm-tools-step3-by4": "a list in the arguments is a string",
    "vllm-tools-step3-thought-step3": "a list in the arguments is a string",
    "vllm-tools-xlam": "the arguments of the last call come twice",
    "vllm-tools-xlam-by4": "the last call's arguments begin with two braces",
    "vllm-thought-ernie45": "the tags around the answer are content",
    "vllm-thought-inkling": "the tag behind the answer is content",
    "sglang-tools-cohere_command4": "the tags around the text are content",
    "sglang-tools-cohere_command4-by4": "the tags around the text are content",
    "sglang-tools-deepseekv3-by4": _LOST,
    "sglang-tools-deepseekv31-by4": _LOST,
    "sglang-tools-glm45-by4": _LOST,
    "sglang-tools-hermes-by4": "the end of a call is content",
    "sglang-tools-ling3-by4": _LOST,
    "sglang-tools-llama3-by4": _LOST,
    "sglang-tools-mistral": "the second call is content",
    "sglang-tools-mistral-by4": "the second call is content",
    "sglang-tools-qwen25-by4": _LOST,
    "sglang-tools-trinity-by4": _LOST,
    "sglang-thought-cohere_command4": "the tag before the thought is reasoning",
}
