"""How refusals of two servers are compared (tests/openai_cases.py)."""

from typing import Any

import pytest

from tests.openai_cases import Answer, refused_otherwise


def refusal(
    param: str | None, message: str = "it is wrong", code: str | int | None = None
) -> Answer:
    error: dict[str, Any] = {"message": message, "param": param, "code": code}
    return Answer(400, [{"error": error}])


@pytest.mark.parametrize(
    ("alone", "behind", "is_same"),
    [
        pytest.param(refusal("top_p"), refusal("top_p", "other words"), True, id="same"),
        pytest.param(refusal("messages"), refusal("messages[0].role"), True, id="a-part-of-it"),
        pytest.param(refusal("body.messages.0.role"), refusal("messages[0]"), True, id="by-place"),
        pytest.param(refusal("top_p"), refusal("top_k"), False, id="another"),
        pytest.param(refusal("top_p"), refusal(None), False, id="none-here"),
        pytest.param(refusal(None, "top_p must be"), refusal("top_p"), True, id="by-its-message"),
        pytest.param(refusal(None, "top_p must be"), refusal("top"), False, id="half-a-name"),
        pytest.param(refusal(None), refusal("top_p"), False, id="only-here"),
        pytest.param(refusal(None), refusal(None), True, id="none"),
        pytest.param(refusal("prompt", code="a"), refusal(None, code="a"), True, id="by-its-code"),
        pytest.param(
            refusal("prompt", code=400), refusal(None, code=400), False, id="a-status-is-no-code"
        ),
    ],
)
def test_a_refusal_names_the_field_that_the_server_alone_names(
    alone: Answer, behind: Answer, is_same: bool
) -> None:
    """By `param`, or in its message where that is null; or has its code, where that is OpenAI's."""
    assert (refused_otherwise(alone, behind) == []) is is_same
