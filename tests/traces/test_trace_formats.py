"""Published trace formats, recognised by their first line."""

from pathlib import Path

import pytest

from kvrs.errors import TraceError
from kvrs_lab.traces.formats import load_trace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace"
    path.write_text(text)
    return path


def test_azure_rows_become_requests_that_share_nothing(tmp_path: Path) -> None:
    """Times count from the first request, seven digits of a second and a zone included; every
    prompt has blocks of its own.
    """
    rows = (
        "2024-05-10 00:00:01.5000000+00:00,1000,7\n",
        "2024-05-10 00:00:00.2500000+00:00,512,44\n",
        "2024-05-10 00:00:02+00:00,1,1\n",
    )
    trace = load_trace(written(tmp_path, AZURE + "".join(rows)))

    assert [(r.arrival_s, r.input_tokens, r.output_tokens) for r in trace.requests] == [
        (0, 512, 44),
        (1.25, 1000, 7),
        (1.75, 1, 1),
    ]
    assert [len(request.hash_ids) for request in trace.requests] == [1, 2, 1]
    assert len({hash_id for request in trace.requests for hash_id in request.hash_ids}) == 4


def test_burstgpt_rows_become_requests(tmp_path: Path) -> None:
    """Columns are found by name: releases differ in what else they have. A byte-order mark is no
    part of a name.
    """
    header = (
        "\ufeffTimestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total "
        "tokens,Log Type\n"
    )
    more = header + "5,x,1,GPT-4,9,2,11,API log\n"
    first = load_trace(
        written(
            tmp_path,
            BURST + "5,ChatGPT,472,18,490,Conversation log\n45.5,GPT-4,1087,230,1317,API log\n",
        )
    )

    assert [(r.arrival_s, r.input_tokens, r.output_tokens) for r in first.requests] == [
        (0, 472, 18),
        (40.5, 1087, 230),
    ]
    assert load_trace(written(tmp_path, more)).requests[0].input_tokens == 9


def test_a_mooncake_file_is_known_by_its_first_line(tmp_path: Path) -> None:
    """Whatever it is called."""
    path = written(
        tmp_path, '\n{"timestamp": 0, "input_length": 3, "output_length": 1, "hash_ids": [7]}\n'
    )

    assert load_trace(path).requests[0].hash_ids == (7,)


@pytest.mark.parametrize(
    "text",
    [
        "arrival,input,output\n2.5,30,4\n2,512,7\n",
        "output,id,arrival,input\n4,a,2.5,30\n7,b,2,512\n",
        "arrived_at,num_prefill_tokens,num_decode_tokens\n2,512,7\n2.5,30,4\n",
        "request_id,arrival_timestamp,prompt_size,token_size\n0,2,512,7\n1,2.5,30,4\n",
    ],
)
def test_plain_traces_are_arrival_input_and_output(tmp_path: Path, text: str) -> None:
    """In any order of columns, and in the forms of other simulators."""
    requests = load_trace(written(tmp_path, text)).requests

    assert [(r.arrival_s, r.input_tokens, r.output_tokens) for r in requests] == [
        (0, 512, 7),
        (0.5, 30, 4),
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            AZURE + "2023-11-16 18:15:46,1,1\nyesterday,1,1\n",
            ":3: TIMESTAMP: got 'yesterday'; allowed: a time",
        ),
        (AZURE + "2023-11-16 18:15:46,0,1\n", ":2: ContextTokens: got '0'; allowed: 1 to 16777216"),
        (
            BURST + "5,ChatGPT,472,0,472,API log\n",
            ":2: Response tokens: got '0'; allowed: 1 to 16777216",
        ),
        (BURST + "nan,ChatGPT,472,3,475,API log\n", ":2: Timestamp: got 'nan'; allowed: a time"),
        (BURST + "5,ChatGPT\n", ":2: 2 columns; allowed: at least 4"),
        (AZURE, ": no request in the file"),
        ("a,b\n1,2\n", ":1: no trace of a known format, it begins b'a,b'; allowed: Mooncake"),
        ("", ":1: no trace of a known format"),
        ("input,output\n3,4\n", ":1: no trace of a known format, it begins b'input,output'"),
    ],
)
def test_a_bad_line_is_named_with_file_line_and_what_is_allowed(
    tmp_path: Path, text: str, reason: str
) -> None:
    """Nothing is guessed and nothing is left out silently."""
    path = written(tmp_path, text)

    with pytest.raises(TraceError) as caught:
        load_trace(path)

    assert str(caught.value).startswith(f"{path}{reason}")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    """The reason comes from the system."""
    with pytest.raises(TraceError, match="No such file"):
        load_trace(tmp_path / "absent")
