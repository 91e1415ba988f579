"""What of a client's request goes on to an engine."""

from typing import Any

import msgspec
import pytest

from kvrs.errors import RequestError
from kvrs.protocol.openai.fields import VLLM
from kvrs.proxy.wire.requests import COMPLETIONS, read


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vllm_xargs", {"kv_transfer_params": "x"}),
        ("ec_transfer_params", {"peer": "x"}),
    ],
)
def test_fields_of_vllm_that_hold_those_of_proxies_are_refused(name: str, value: Any) -> None:
    """vLLM takes the first for `kv_transfer_params` where the proxy sends none, and a text there
    ends its engine.
    """
    with pytest.raises(RequestError, match="allowed: null") as refusal:
        read(COMPLETIONS, msgspec.json.encode({"prompt": "x", name: value}), VLLM)

    assert refusal.value.param == name
    absent = msgspec.json.encode({"prompt": "x", name: None})
    assert name not in read(COMPLETIONS, absent, VLLM).fields
