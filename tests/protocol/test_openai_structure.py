"""The limits of a body's structure."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrs.errors import RequestError
from kvrs.protocol.openai import decoding
from kvrs.protocol.openai.decoding import (
    MAX_DEPTH,
    MAX_ELEMENTS,
    MAX_VALUES,
    bytes_within,
    check_structure,
    elements_within,
)

VALUES = st.recursive(
    st.none() | st.integers() | st.text(alphabet='a,:[]{}"\\é\n', max_size=12),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=30,
)


def counted(value: Any) -> int:
    """Containers, and the values in them beyond the first."""
    if not isinstance(value, list | dict):
        return 0
    inner = list(value.values()) if isinstance(value, dict) else value
    return 1 + max(0, len(inner) - 1) + sum(map(counted, inner))


@given(value=VALUES, limit=st.integers(0, 40), step=st.integers(1, 20), ascii_only=st.booleans())
def test_exactly_what_is_in_no_string_is_counted(
    value: Any, limit: int, step: int, ascii_only: bool
) -> None:
    """However the text is cut into steps: within an escape, too."""
    text = json.dumps(value, ensure_ascii=ascii_only).encode()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "_STEP_BYTES", step)
        try:
            check_structure(text, max_values=limit)
            refused = False
        except RequestError:
            refused = True

    assert refused == (counted(value) > limit)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("[" + ",".join(["{}"] * MAX_ELEMENTS) + "]", "objects and lists"),
        ('{"a":[' + ",".join(['""'] * (2 * MAX_ELEMENTS)) + "]}", "keys and strings"),
        ("[" + ",".join(["1"] * (MAX_VALUES + 1)) + "]", "values"),
        ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "levels"),
        ("[" * 1000, "levels"),
        ("[" * 4_000_000, "objects and lists"),
    ],
)
def test_what_takes_long_to_decode_is_refused(text: str, what: str) -> None:
    """One value too many of each kind; also of what is no JSON."""
    with pytest.raises(RequestError, match=what):
        check_structure(text.encode())


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"prompt": '[{",\\' * 400_000}),
        "[" + ",".join(["7"] * (MAX_VALUES - 1)) + "]",
        "[" * MAX_DEPTH + "]" * MAX_DEPTH,
    ],
)
def test_long_text_and_long_prompts_of_ids_pass(text: str) -> None:
    """Only structure is limited here."""
    check_structure(text.encode())


@pytest.mark.parametrize(("longest", "allowed"), [(1, 1025), (8192, 9216), (1 << 20, 1 << 16)])
def test_a_body_has_as_many_elements_as_its_model_takes_tokens(longest: int, allowed: int) -> None:
    """Each object or list takes a token of the prompt at least; a large model has the limit of
    all.
    """
    limit = elements_within(longest)
    assert limit == allowed

    check_structure(b"[" + b",".join([b"{}"] * (limit - 1)) + b"]", max_elements=limit)
    with pytest.raises(RequestError, match=f"at most {limit}"):
        check_structure(b"[" + b",".join([b"{}"] * limit) + b"]", "tools", max_elements=limit)


def test_a_body_has_room_for_the_longest_prompt_however_it_is_written() -> None:
    """All of it escaped, and something around it."""
    prompt = "\u00e9" * (2048 * 10)

    body = json.dumps({"prompt": prompt, "max_tokens": 5}).encode()

    assert len(body) > 6 * len(prompt)
    assert len(body) <= bytes_within(2048, 10) < len(body) + (1 << 17)
