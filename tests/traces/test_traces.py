"""Reading, cutting and scaling traces, and the tokens made from them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrs.errors import TraceError
from kvrs_lab.traces.mooncake import (
    Trace,
    TraceRequest,
    at_rate,
    jitter,
    load_mooncake,
    prompt_token_ids,
    replay_requests,
    scale,
    window,
)
from kvrs_testkit.examples import examples
from tests.traces.hit_ratio import prefix_hit_ratio

TRACES = Path(__file__).parents[2].parent / "shared" / "data" / "traces"
GOOD = '{"timestamp": 1500, "input_length": 600, "output_length": 7, "hash_ids": [3, 4]}'


def written(tmp_path: Path, *lines: str | bytes) -> Path:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"\n".join(line.encode() if isinstance(line, str) else line for line in lines))
    return path


def test_a_good_line_becomes_a_request_in_seconds(tmp_path: Path) -> None:
    """Mooncake's timestamps are milliseconds."""
    trace = load_mooncake(written(tmp_path, GOOD, ""))

    assert trace == Trace((TraceRequest(1.5, 600, 7, (3, 4)),))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[1]", "object"),
        (GOOD.replace("600", '"600"').encode(), "input_length: Expected `int`"),
        (GOOD.replace("600", "true").encode(), "input_length: Expected `int`"),
        (GOOD.replace("600", "0").encode(), "input_length: Expected `int` >= 1"),
        (GOOD.replace("600", "1e400").encode(), "input_length: Number out of range"),
        (GOOD.replace("1500", "-1").encode(), "timestamp: Expected `float` >= 0"),
        (GOOD.replace("[3, 4]", "[3, -4]").encode(), "hash_ids[1]: Expected `int` >= 0"),
        (GOOD.replace("[3, 4]", "[3]").encode(), "hash_ids: got 1; input_length 600 needs 2"),
        (
            GOOD.replace(', "output_length": 7', "").encode(),
            "missing required field `output_length`",
        ),
    ],
)
def test_a_bad_line_is_named_with_file_line_and_reason(
    tmp_path: Path, line: bytes, reason: str
) -> None:
    """A trace that is half wrong must not be replayed in part without a report."""
    path = written(tmp_path, GOOD, line, GOOD)

    with pytest.raises(TraceError) as caught:
        load_mooncake(path)

    assert str(caught.value).startswith(f"{path}:2: ")
    assert reason in str(caught.value)


def test_a_file_without_requests_is_an_error(tmp_path: Path) -> None:
    """Nothing to replay is never what was wanted."""
    with pytest.raises(TraceError, match="no request"):
        load_mooncake(written(tmp_path, ""))
    with pytest.raises(TraceError, match="No such file"):
        load_mooncake(tmp_path / "absent.jsonl")


def test_the_published_conversation_trace_loads_with_its_statistics() -> None:
    """The numbers by which the trace is known."""
    path = TRACES / "conversation_trace.jsonl"
    if not path.exists():
        pytest.skip(f"the public trace is not there: {path}")

    requests = load_mooncake(path).requests

    assert len(requests) == 12_031
    assert round(sum(request.input_tokens for request in requests) / len(requests)) == 12_035
    assert round(sum(request.output_tokens for request in requests) / len(requests)) == 343
    assert round(prefix_hit_ratio(Trace(requests)), 3) == 0.366


def test_requests_are_sorted_by_arrival(tmp_path: Path) -> None:
    """Open-loop replay and windows go by time."""
    trace = load_mooncake(written(tmp_path, GOOD, GOOD.replace("1500", "20")))

    assert [request.arrival_s for request in trace.requests] == [0.02, 1.5]


def arrivals(*at_s: float) -> Trace:
    return Trace(tuple(TraceRequest(t, 1, 1, (i,)) for i, t in enumerate(at_s)))


def test_a_window_starts_at_zero_and_never_comes_short() -> None:
    """Asking for more requests than there are is an error, not a smaller experiment."""
    trace = arrivals(1.0, 3.0, 7.0)

    assert [request.arrival_s for request in window(trace, 2, first=1).requests] == [0.0, 4.0]
    with pytest.raises(TraceError, match="3 requests, 4 were asked"):
        window(trace, 4)


def test_a_rate_changes_the_speed_but_not_the_shape_of_arrivals() -> None:
    """n requests at rate r span (n - 1) / r seconds."""
    trace = at_rate(arrivals(0.0, 3.0, 4.0), requests_per_s=8.0)

    assert [request.arrival_s for request in trace.requests] == pytest.approx([0.0, 0.1875, 0.25])
    with pytest.raises(TraceError, match="no rate"):
        at_rate(arrivals(2.0, 2.0), 1.0)


def test_jitter_spreads_a_batch_and_depends_on_its_seed_only() -> None:
    """Mooncake logged arrivals in batches of 3 s."""
    batch = arrivals(*[0.0] * 50)

    spread_s = [request.arrival_s for request in jitter(batch, 3.0, seed=1).requests]

    assert spread_s == sorted(spread_s)
    assert len(set(spread_s)) == 50
    assert spread_s[0] == 0.0
    assert spread_s[-1] < 3.0
    assert jitter(batch, 3.0, seed=1) == jitter(batch, 3.0, seed=1) != jitter(batch, 3.0, seed=2)


def chains() -> st.SearchStrategy[Trace]:
    """Traces whose ids form a tree, as hashes of prefixes do; the last block of a request may be
    partial.
    """

    def build(paths: list[tuple[list[int], int]]) -> Trace:
        ids: dict[tuple[int, ...], int] = {}
        requests = []
        for steps, last in paths:
            prefixes = [tuple(steps[: i + 1]) for i in range(len(steps))]
            names = tuple(ids.setdefault(prefix, len(ids)) for prefix in prefixes)
            requests.append(TraceRequest(0.0, (len(steps) - 1) * 512 + last, 1 + last, names))
        return Trace(tuple(requests))

    path = st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=8), st.integers(1, 512))
    return st.lists(path, min_size=1, max_size=8).map(build)


@given(chains(), st.integers(8, 200), st.integers(0, 3))
@examples(80)
def test_scaled_prompts_share_exactly_the_blocks_that_the_hash_ids_share(
    trace: Trace, max_tokens: int, seed: int
) -> None:
    """Equal hash-id prefixes are equal token prefixes and the other way round, block by block."""
    scaled = scale(trace, max_tokens, 16)
    prompts = [
        prompt_token_ids(request, scaled.block_tokens, 512, seed, floor=3)
        for request in scaled.requests
    ]
    b = scaled.block_tokens

    for left, left_tokens in zip(scaled.requests, prompts, strict=True):
        assert len(left_tokens) == left.input_tokens
        for right, right_tokens in zip(scaled.requests, prompts, strict=True):
            for i in range(min(len(left_tokens), len(right_tokens)) // b):
                same_tokens = left_tokens[: (i + 1) * b] == right_tokens[: (i + 1) * b]
                assert same_tokens == (left.hash_ids[: i + 1] == right.hash_ids[: i + 1])


@given(chains(), st.integers(8, 5000), st.integers(1, 600), st.integers(1, 5000))
@examples(80)
def test_scaled_requests_fit_and_keep_their_blocks(
    trace: Trace, max_input: int, max_output: int, longest: int
) -> None:
    """Nothing is longer than the model takes, nothing is empty, and ids still count the blocks; a
    prompt of more blocks than the model has tokens is refused.
    """
    if -(-longest // trace.block_tokens) > max_input:
        with pytest.raises(TraceError):
            scale(trace, max_input, max_output, longest)
        return
    scaled = scale(trace, max_input, max_output, longest)

    for before, after in zip(trace.requests, scaled.requests, strict=True):
        assert 1 <= after.input_tokens <= min(max_input, before.input_tokens)
        assert 1 <= after.output_tokens <= min(max_output, before.output_tokens)
        assert len(after.hash_ids) == -(-after.input_tokens // scaled.block_tokens)
        assert after.hash_ids == before.hash_ids[: len(after.hash_ids)]


def test_a_partial_last_block_keeps_its_ratio() -> None:
    """Half a block stays half a block."""
    scaled = scale(
        Trace((TraceRequest(0, 512 + 256, 10, (0, 1)), TraceRequest(0, 1024, 20, (0, 2)))), 64, 5
    )

    assert scaled.block_tokens == 32
    assert [(request.input_tokens, request.output_tokens) for request in scaled.requests] == [
        (48, 2),
        (64, 5),
    ]


def test_a_prompt_of_more_blocks_than_tokens_is_refused() -> None:
    """Below one token per block no sharing is left to keep."""
    with pytest.raises(TraceError, match="allowed: at least 3"):
        scale(Trace((TraceRequest(0, 1500, 1, (0, 1, 2)),)), 2, 1)


@given(st.integers(2, 64), st.integers(1, 12), st.integers(0, 99), st.data())
@examples(100)
def test_different_ids_make_different_blocks(
    letters: int, block: int, seed: int, data: st.DataObject
) -> None:
    """By construction, as long as there are that many different blocks at all."""
    below = letters ** min(block, 8)
    ids = data.draw(st.lists(st.integers(0, below - 1), unique=True, max_size=40))

    blocks = {
        tuple(prompt_token_ids(TraceRequest(0, block, 1, (i,)), block, letters + 3, seed, 3))
        for i in ids
    }

    assert len(blocks) == len(ids)
    assert all(3 <= token < letters + 3 for tokens in blocks for token in tokens)


@pytest.mark.process
def test_prompt_tokens_are_the_same_in_every_process() -> None:
    """The oracle run and the faulted run may be made by different processes."""
    code = (
        "from kvrs_lab.traces.mooncake import *;print(prompt_token_ids(TraceRequest(0, 40, 1, "
        "(5, 70000)), 20, 512, 9, 3))"
    )
    other = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout

    assert other.strip() == str(prompt_token_ids(TraceRequest(0, 40, 1, (5, 70000)), 20, 512, 9, 3))


def test_replay_requests_carry_arrival_prompt_and_length() -> None:
    """The trace as something that can be sent."""
    [request] = replay_requests(
        Trace((TraceRequest(2.0, 5, 9, (1,)),), block_tokens=8), 100, seed=0, floor=10
    )

    assert (
        request.arrival_s,
        len(request.prompt_ids),
        request.max_tokens,
        request.temperature,
    ) == (2.0, 5, 9, 0.0)
    assert min(request.prompt_ids) >= 10


def bailian(tokens: int, ids: int, at_s: float) -> str:
    line = {"chat_id": 1, "parent_chat_id": -1, "timestamp": at_s, "input_length": tokens}
    return json.dumps(line | {"output_length": 3, "turn": 1, "hash_ids": list(range(ids))})


def test_other_block_sizes_are_told_by_the_number_of_ids(tmp_path: Path) -> None:
    """Bailian's blocks have 16 tokens, and its times are seconds."""
    trace = load_mooncake(written(tmp_path, bailian(16, 1, 0.0), bailian(521, 33, 61.114)))

    assert trace.block_tokens == 16
    assert [request.arrival_s for request in trace.requests] == [0.0, 61.114]
    assert len(prompt_token_ids(trace.requests[1], 16, 512, seed=0)) == 521


def test_a_line_of_another_block_size_is_bad(tmp_path: Path) -> None:
    """The size of most lines counts."""
    lines = (bailian(521, 33, 0.0), bailian(521, 33, 1.0), bailian(521, 2, 2.0))

    with pytest.raises(TraceError, match=r":3: hash_ids: got 2; input_length 521 needs 33, one"):
        load_mooncake(written(tmp_path, *lines))
