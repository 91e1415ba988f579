"""What of a client's request goes on to an engine."""

from typing import Any

import msgspec
import pytest

from kvrs.errors import RequestError
from kvrs.proxy.forms import COMPLETIONS, read


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vllm_xargs", {"kv_transfer_params": "x"}),
        ("ec_transfer_params", {"peer": "x"}),
        ("thinking_token_budget", 5),
        ("repetition_detection", {"max_pattern_size": 3}),
    ],
)
def test_what_only_vllm_knows_and_nobody_can_continue_is_refused(name: str, value: Any) -> None:
    """vLLM takes the first for `kv_transfer_params` where the proxy sends none, and a text there ends its engine."""
    with pytest.raises(RequestError, match="allowed: null") as refusal:
        read(COMPLETIONS, msgspec.json.encode({"prompt": "x", name: value}))

    assert refusal.value.param == name
    assert name not in read(COMPLETIONS, msgspec.json.encode({"prompt": "x", name: None})).fields
