"""Rows of prompts with pictures: their keys have the digest of the picture, whose tokens all have
one id.
"""

import base64
import io
import json
import re
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from kvrs_testkit.vllm_rows import KVRS, RowServers
from kvrs_testkit.vllm_servers import PAGE_TOKENS
from tests.vllm.marks import REAL_VLLM
from tests.vllm.test_vllm_kinds import written

pytestmark = REAL_VLLM

TOKENS, CUT = 200, 120
WORD = re.compile("Ġ[a-z]+")  # As a tokenizer has a word behind a space.
WORDS = "What is in this picture, and what is not? " * 6


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RowServers]:
    directory = tmp_path_factory.mktemp("images")
    written("images", directory / "images")
    with RowServers(directory, model=directory / "images") as servers:
        servers.options |= {"lookup_s": 5.0, "load_s": 20.0}  # Also on a busy machine.
        servers.start_all()
        yield servers


def words_of(model: Path) -> list[int]:
    """Ids of whole words, so that a text of these has the same ids again."""
    vocabulary = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    return [each for text, each in vocabulary.items() if WORD.fullmatch(text)]


def picture(red: int) -> str:
    """A picture as a URL."""
    file = io.BytesIO()
    Image.new("RGB", (32, 32), (red, 90, 30)).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def asked(red: int, said: str = "") -> dict[str, Any]:
    """The fields of a chat with a picture, of which this much is answered already."""
    shown = {"type": "image_url", "image_url": {"url": picture(red)}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [shown, {"type": "text", "text": WORDS}]}
    ]
    if not said:
        return {"messages": messages}
    messages.append({"role": "assistant", "content": said})
    return {
        "messages": messages,
        "add_generation_prompt": False,
        "continue_final_message": True,
    }


class Answer:
    """The ids and the text that a client has of a chat."""

    def __init__(self) -> None:
        self.prompt: list[int] = []
        self.ids: list[int] = []
        self.text = ""

    def add(self, event: dict[str, Any]) -> None:
        self.prompt = event.get("prompt_token_ids") or self.prompt
        for choice in event["choices"]:
            self.ids += choice.get("token_ids") or []
            self.text += choice["delta"].get("content") or ""


def chat(
    servers: RowServers,
    name: str,
    fields: dict[str, Any],
    tokens: int,
    more: Callable[[Answer], None] = lambda _: None,
) -> Answer:
    body = servers.sealed(
        name,
        {
            "model": servers.model,
            "max_tokens": tokens,
            "stream": True,
            "temperature": 0,
            "return_token_ids": True,
            "ignore_eos": True,
            "allowed_token_ids": words_of(Path(servers.model)),
        }
        | fields,
    )
    request = urllib.request.Request(
        servers.url(name) + "/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    answer = Answer()
    with suppress(OSError, HTTPException), urllib.request.urlopen(request, timeout=120) as events:
        for line in events:
            if line.startswith(b"data: {"):
                answer.add(json.loads(line[6:]))
                more(answer)
    return answer


def test_a_chat_with_a_picture_goes_on_from_the_rows_of_a_killed_server(
    servers: RowServers,
) -> None:
    """A chat with another picture finds none of them, though its ids are the same."""
    calm = chat(servers, "d1", asked(200) | {"cache_salt": "calm"}, TOKENS)
    of_other = chat(servers, "d1", asked(20) | {"cache_salt": "calm"}, TOKENS)

    def kill(answer: Answer) -> None:
        if len(answer.ids) >= CUT:
            servers.kill("d0")

    got = chat(servers, "d0", asked(200) | KVRS, TOKENS, kill)
    before = servers.loaded_tokens("d1")
    rest = chat(servers, "d1", asked(200, got.text) | KVRS, TOKENS - len(got.ids))
    loaded = servers.loaded_tokens("d1") - before
    other = chat(servers, "d1", asked(20) | KVRS, TOKENS)

    assert CUT <= len(got.ids) < TOKENS
    assert rest.prompt == got.prompt + got.ids
    assert got.ids + rest.ids == calm.ids
    assert loaded >= (len(rest.prompt) // PAGE_TOKENS - 1) * PAGE_TOKENS, servers.said()
    assert other.prompt == got.prompt
    assert other.ids == of_other.ids != calm.ids
    assert servers.loaded_tokens("d1") - before == loaded
