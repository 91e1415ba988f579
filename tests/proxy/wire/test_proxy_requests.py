"""The part of a client's request that goes on to an engine."""

import sys
from typing import Any

import msgspec
import pytest

from kvrs.errors import RequestError
from kvrs.net.connections import ByteBudget
from kvrs.protocol.openai.fields import VLLM
from kvrs.protocol.openai.requests import packed
from kvrs.proxy.wire.requests import COMPLETIONS, RequestUsage, read


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


def test_what_is_kept_of_a_tokenised_request_is_small_and_has_all_other_fields() -> None:
    """Nothing of it lies in the body, which may have megabytes of prompt."""
    given = {"model": "m", "temperature": 0.5, "user": "u", "stop": ["a", "b"], "seed": 7}
    body = msgspec.json.encode({"prompt": "word " * 1000, **given})
    parsed = read(COMPLETIONS, body)

    parsed.hold(RequestUsage(ByteBudget(1 << 20, len(body))))
    parsed.tokenised(packed(range(10)))
    parsed.pack()

    fields = {name: msgspec.json.decode(value) for name, value in parsed.fields.items()}
    assert fields == given
    assert dict(parsed.fields) == dict(parsed.fields.items())
    assert (parsed.fields["seed"], len(parsed.fields)) == (msgspec.Raw(b"7"), len(given))
    assert sum(map(len, parsed.fields.values())) < 100
    assert sys.getrefcount(body) == 2  # Its name here, and the argument.
