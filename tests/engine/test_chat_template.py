"""Chats become the prompts that the model's own template makes of them."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvrs.errors import ConfigError, RequestError
from kvrs.protocol.openai.requests import ChatRequest, parse_chat_request
from kvrs.text.output import load_tokenizer
from kvrs_engine.engine.chat import ChatTemplate, load_chat_template

USER = {"role": "user", "content": "hällo <b> & 🙂"}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Ä <tag>", "parameters": {"type": "object"}},
}
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Zürich"}'},
}
CHATS = [
    {"messages": [USER]},
    {
        "messages": [
            {"role": "system", "content": "Be brief."},
            USER,
            {"role": "assistant", "content": "no"},
            USER,
        ]
    },
    {"messages": [USER], "tools": [TOOL]},
    {"messages": [USER], "tools": [TOOL], "chat_template_kwargs": {"enable_thinking": True}},
    {
        "messages": [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "sunny"},
        ]
    },
]
# The shape of widespread templates: loops with controls, namespaces, filters, macros, checks,
# dates.
QWEN_LIKE = """\
{%- macro say(role, text) %}
    {{- '<|im_start|>' + role + '\\n' + text + '<|im_end|>\\n' }}
{%- endmacro %}
{%- if messages[0].role == 'system' %}
    {{- say('system', messages[0].content | trim) }}
{%- endif %}
{%- if tools %}
    {{- "# Tools\\n" }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=2) }}
    {%- endfor %}
{%- endif %}
{%- set ns = namespace(last=-1, seen=0) %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'user' %}
        {%- set ns.last = (messages | length - 1) - loop.index0 %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{% for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant', 'tool'] %}
        {{- raise_exception('unknown role ' + message.role) }}
    {%- endif %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {%- if message.tool_calls %}
        {%- for call in message.tool_calls %}
            {{- '<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
            {{- call.function.arguments | tojson ~ '}\\n' }}
        {%- endfor %}
    {%- endif %}
    {{- say(message.role, message.content) }}
{%- endfor %}
{{- ns.last }} {{ strftime_now('%Y') }} {{ bos_token }} {{ dict(a=1) | tojson }}
    {%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""


def request_of(**fields: Any) -> ChatRequest:
    return parse_chat_request(msgspec.json.encode(fields))


def template_of(source: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, {"bos_token": "<|begin|>"}, Path("somewhere"))


def as_transformers_wants(chat: dict[str, Any]) -> dict[str, Any]:
    """The chat as users of transformers pass it: arguments as objects, and no missing content."""
    messages = json.loads(json.dumps(chat["messages"]))
    for message in messages:
        message["content"] = message["content"] or ""
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return {
        "conversation": messages,
        "tools": chat.get("tools"),
        **chat.get("chat_template_kwargs", {}),
    }


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("source", [None, QWEN_LIKE])
def test_prompts_are_those_of_transformers(
    tiny_model: Path, chat: dict[str, Any], source: str | None
) -> None:
    """The library for which templates are written is the judge of text and ids."""
    from transformers import AutoTokenizer

    judge = AutoTokenizer.from_pretrained(tiny_model)
    template = load_chat_template(tiny_model) if source is None else template_of(source)
    assert template is not None

    prompt = template.render(request_of(**chat))

    wanted = {**as_transformers_wants(chat), "add_generation_prompt": True, "chat_template": source}
    assert prompt == judge.apply_chat_template(**wanted, tokenize=False)
    ids = load_tokenizer(tiny_model).encode(prompt, add_special_tokens=False).ids
    assert ids == judge.apply_chat_template(**wanted, tokenize=True, return_dict=False)


@pytest.mark.parametrize("opens", [True, False])
def test_documents_and_the_opening_are_those_of_transformers(tiny_model: Path, opens: bool) -> None:
    """The template gets what the client gave, or would have by default."""
    from transformers import AutoTokenizer

    judge = AutoTokenizer.from_pretrained(tiny_model)
    source = "{%- for each in documents or [] %}{{ each.title }}: {{ each.text }}\n{% endfor %}"
    source += QWEN_LIKE
    documents = [{"title": "a", "text": "é"}, {"title": "b", "text": "c"}]
    chat = {"messages": [USER], "documents": documents, "add_generation_prompt": opens}

    prompt = template_of(source).render(request_of(**chat))

    assert "a: é\nb: c" in prompt
    assert prompt == judge.apply_chat_template(
        [USER],
        documents=documents,
        add_generation_prompt=opens,
        chat_template=source,
        tokenize=False,
    )


def test_parts_of_text_become_one_text(tiny_model: Path) -> None:
    """OpenAI allows a list of parts where templates know strings only."""
    template = load_chat_template(tiny_model)
    assert template is not None
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]

    in_parts = template.render(request_of(messages=[{"role": "user", "content": parts}]))

    assert in_parts == template.render(
        request_of(messages=[{"role": "user", "content": "one\ntwo"}])
    )


def test_an_assistant_may_have_said_nothing(tiny_model: Path) -> None:
    """Engines answer so where there is only reasoning, and clients send the answer back."""
    template = load_chat_template(tiny_model)
    assert template is not None

    prompts = [
        template.render(request_of(messages=[USER, {"role": "assistant"} | said, USER]))
        for said in ({}, {"content": None}, {"content": ""})
    ]

    assert prompts[0] == prompts[1] == prompts[2]


def test_tools_that_may_not_be_called_are_not_shown(tiny_model: Path) -> None:
    """With `tool_choice: none` no tool is offered to the model."""
    template = load_chat_template(tiny_model)
    assert template is not None

    assert "weather" not in template.render(
        request_of(messages=[USER], tools=[TOOL], tool_choice="none")
    )


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]",
            "type 'text'",
        ),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "null is not supported; allowed"),
        (
            {"messages": [{"role": "user", "content": None}]},
            "messages[0].content",
            "allowed: a string or a list of parts",
        ),
        (
            {"messages": [{"role": "user", "content": {"a": "private"}}]},
            "messages[0].content",
            "an object is not supported; allowed: a string or a list of parts",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
            "messages[0].tool_calls[0]",
            "function with a name",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": 3}]}, "messages[0].tool_calls", "list"),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"name": "f", "arguments": "{"}}],
                    }
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
            "JSON",
        ),
        ({"messages": [{"role": "clown", "content": ""}]}, "messages", "unknown role clown"),
        (
            {"messages": [USER], "chat_template_kwargs": {"messages": []}},
            "chat_template_kwargs",
            "'messages'",
        ),
    ],
)
def test_messages_that_a_template_cannot_take_are_refused(
    fields: dict[str, Any], param: str, message: str
) -> None:
    """With the place, and in the template's own words where it has some."""
    with pytest.raises(RequestError, match=message) as refusal:
        template_of(QWEN_LIKE).render(request_of(**fields))

    assert refusal.value.param == param
    assert "private" not in str(refusal.value)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}{{ ''.__class__.__subclasses__() }}",
        "{% set ns = namespace(x=1) %}{% set ns._x = 2 %}",
        "{{ messages.append(1) }}",
        "{{ namespace(**{'_a': 1}) }}",
    ],
)
def test_a_template_stays_in_its_sandbox(source: str) -> None:
    """Models are downloaded, and their templates are programs."""
    with pytest.raises(RequestError, match="refuses these messages"):
        template_of(source).render(request_of(messages=[USER]))


def test_where_templates_are_found(tmp_path: Path) -> None:
    """In a file of their own, in tokenizer_config.json, there also several by name; or nowhere."""
    config = tmp_path / "tokenizer_config.json"

    def render(**fields: Any) -> str | None:
        template = load_chat_template(tmp_path)
        return None if template is None else template.render(request_of(messages=[USER], **fields))

    assert render() is None
    config.write_text("{}")
    assert render() is None
    config.write_text(
        json.dumps({"bos_token": {"content": "<s>"}, "chat_template": "{{ bos_token }}one"})
    )
    assert render() == "<s>one"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert (render(), render(tools=[TOOL])) == ("plain", "tools")
    (tmp_path / "chat_template.jinja").write_text("own file")
    assert render() == "own file"


@pytest.mark.parametrize(
    "content",
    ['{"chat_template": 3}', '{"chat_template": "{% if %}"}', '{"chat_template": [{}]}', "{"],
)
def test_a_broken_template_is_refused_by_name(tmp_path: Path, content: str) -> None:
    """At the start, and not at the first request."""
    (tmp_path / "tokenizer_config.json").write_text(content)

    with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
        load_chat_template(tmp_path)
