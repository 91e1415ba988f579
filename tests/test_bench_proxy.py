"""The mock engines and the load client of experiments/bench_proxy: what they count as whole."""

import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from experiments.bench_proxy import lockstep, proxies, table
from experiments.bench_proxy.engines import (
    PAIR,
    VLLM_PAIR,
    Engines,
    Instance,
    Load,
    Programs,
    compile_programs,
    run_load,
)
from experiments.bench_proxy.texts import TEXTS, Text, as_sections
from kvrs.protocol.instance import Role

pytestmark = [pytest.mark.process, pytest.mark.network, pytest.mark.nightly]

FIRST = '{"choices":[{"text":"k0+1.5;","finish_reason":null}]}'
LAST = '{"choices":[{"text":"k1+1.6;","finish_reason":"length"}]}'
HEAD = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler (cc)")
    return compile_programs(tmp_path_factory.mktemp("bench"))


def chunked(*events: str) -> str:
    parts = [f"data: {event}\n\n" for event in events]
    return HEAD + "".join(f"{len(part):x}\r\n{part}\r\n" for part in parts) + "0\r\n\r\n"


@contextmanager
def answering(*answers: str) -> Iterator[int]:
    """A server that gives one connection after the other its answer, and closes it; its port."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            for answer in answers:
                connection, _ = server.accept()
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(answer.encode())

        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1]
        thread.join()


def one_stream(programs: Programs, port: int) -> dict[str, object]:
    options = {"tokens": 2, "restart": 0, "warm_ms": 0, "window_ms": 50, "limit_ms": 5000}
    return run_load(programs, port, options)


def test_streams_of_the_engine_are_whole_and_all_counted(programs: Programs) -> None:
    """Every stream that was begun is whole, and tokens come at the rate that was ordered."""
    with Engines(programs) as engines:
        options = {"streams": 8, "tokens": 20, "rate": 100_000, "warm_ms": 300, "window_ms": 1000}
        result = run_load(programs, engines.ports["d0"], options)

    assert result["broken"] == 0, result["fault"]
    assert result["whole"] == result["started"] > 8
    assert 0 < result["window_tokens"] <= 8 * 110
    assert result["transit_us"]["count"] == result["window_tokens"]


def test_a_burst_is_counted_token_by_token(programs: Programs) -> None:
    """Events with several ids count as many tokens as they have."""
    with Engines(programs) as engines:
        options = {"streams": 3, "tokens": 255, "burst": 250, "rate": 100_000, "restart": 0}
        result = run_load(programs, engines.ports["d0"], options | {"warm_ms": 0, "window_ms": 500})

    assert (result["whole"], result["broken"]) == (3, 0), result["fault"]
    assert result["window_tokens"] == 3 * 255


@pytest.mark.parametrize("instances", [PAIR, VLLM_PAIR], ids=["embedded", "vllm"])
def test_a_proxy_takes_the_mocks_for_engines(
    programs: Programs, instances: tuple[Instance, ...], tmp_path: Path
) -> None:
    """They prove their identity to it, and it hands streams off between them."""
    with (
        Engines(programs, instances) as engines,
        proxies.kvrs()(proxies.Bench(engines, tmp_path, tmp_path, None)) as running,
    ):
        options = {"streams": 4, "tokens": 20, "rate": 100_000, "warm_ms": 100, "window_ms": 400}
        result = run_load(programs, running.port, options, running.pids)

    assert result["broken"] == 0, result["fault"]
    assert result["whole"] == result["started"] > 4
    assert result["processes"][0]["cpu_s"] > 0


def test_mocks_are_as_many_as_a_large_cluster_has(programs: Programs) -> None:
    """64 instances, of which each has a port."""
    instances = [Instance(f"d{n}", Role.DECODE, f"n{n}") for n in range(64)]

    with Engines(programs, instances) as engines:
        ports = engines.ports

    assert len({*ports.values()}) == 64


def test_a_killed_instance_breaks_its_streams(programs: Programs) -> None:
    """A kill resets the connections of that instance, and of no other."""
    with Engines(programs) as engines:
        options = {"streams": 4, "tokens": 1000, "restart": 0, "window_ms": 100, "limit_ms": 9000}
        with Load(programs, engines.ports["d0"], options) as load:
            assert load.wait_open()
            killed = engines.order("kill d0")
            result = load.result()
        other = one_stream(programs, engines.ports["p0"])

    assert killed["streams"] == 4
    assert (result["whole"], result["broken"]) == (0, 4)
    assert other["whole"] == 1, other["fault"]


def test_a_whole_answer_is_whole(programs: Programs) -> None:
    """The counterpart of the broken ones below."""
    with answering(chunked(FIRST, LAST, "[DONE]")) as port:
        result = one_stream(programs, port)

    assert (result["whole"], result["broken"]) == (1, 0), result["fault"]


@pytest.mark.parametrize(
    "answer",
    [
        chunked(FIRST.replace("null", '"length"'), "[DONE]"),
        chunked(LAST, "[DONE]"),
        chunked(FIRST.replace("k0", "k1"), LAST.replace("k1", "k0"), "[DONE]"),
        chunked(FIRST, FIRST, LAST, "[DONE]"),
        chunked(FIRST, LAST.replace('"length"', "null"), "[DONE]"),
        chunked(FIRST, LAST),
        chunked(FIRST, '{"error":{"message":"no"}}', LAST, "[DONE]"),
        chunked(FIRST, LAST, "[DONE]", LAST),
        chunked(FIRST, LAST, "[DONE]")[:-5],
        chunked(FIRST, LAST, "[DONE]").replace("200 OK", "503 Busy"),
        "",
    ],
    ids=[
        *("lost-end", "lost-first", "swapped", "repeated", "no-finish", "no-done", "error"),
        *("after-done", "no-end-of-body", "status", "closed"),
    ],
)
def test_a_broken_answer_is_not_whole(programs: Programs, answer: str) -> None:
    """Whatever is missing or too much in it."""
    with answering(answer) as port:
        result = one_stream(programs, port)

    assert (result["whole"], result["broken"]) == (0, 1)
    assert result["fault"]


def test_a_broken_stream_does_not_break_the_next_one(programs: Programs) -> None:
    """Nothing of an answer that was cut within a chunk is left."""
    whole = chunked(FIRST, LAST, "[DONE]")
    options = {"tokens": 2, "warm_ms": 0, "window_ms": 2000, "pause_us": 1_200_000}
    with answering(whole[: len(HEAD) + 20], whole, whole) as port:
        result = run_load(programs, port, options)
        one_stream(programs, port)

    assert (result["whole"], result["broken"]) == (1, 1), result["fault"]


def test_the_fault_is_named(programs: Programs) -> None:
    """An error event or refusal of the proxy is in the result."""
    for answer in (
        chunked(FIRST, '{"error":{"message":"gone"}}'),
        chunked().replace("200 OK", "502 gone"),
    ):
        with answering(answer) as port:
            assert "gone" in str(one_stream(programs, port)["fault"])


@pytest.mark.parametrize("text", TEXTS, ids=[text.name for text in TEXTS])
def test_a_stream_by_hand_gives_a_token_for_each_step(
    programs: Programs, tmp_path: Path, text: Text
) -> None:
    """In lockstep nothing is sent that was not asked for, and texts come line by line."""
    lines = tmp_path / "texts"
    lines.write_text(as_sections())
    with Engines(programs, VLLM_PAIR, texts=lines) as engines:
        clients = [lockstep.Client(engines.ports["d0"]) for _ in range(2)]
        for number, client in enumerate(clients, 1):
            client.ask(2, text)
            assert engines.order(f"wait 0 {number}") == {"answers": 0, "streams": number}
        for count in (1, 2, 1):
            assert engines.order(f"step {count}") == {"written": count}
        assert engines.order("step 1") == {"written": 0}
        for client in clients:
            client.read_token()
            first = client.rest
            client.read_token()
            client.read_end()
            client.close()

    assert text.lines[0].encode() in first or text.lines[1].encode() in first


def test_lockstep_figures_are_judged_by_ratios_within_one_repetition() -> None:
    """A busy machine makes all proxies of one repetition dearer together."""
    parts = {
        "background ms/s": 1.0,
        "request of 4": 500.0,
        "to the first token": 90.0,
        "token, prose, 1": 50.0,
        "token, prose, 20": 17.0,
    }
    mine = [parts | lockstep.put_together(parts)] * 2
    theirs = [{what: value * by for what, value in mine[0].items()} for by in (1.0, 3.0)]

    rows = lockstep.judged({lockstep.PEER: theirs, "kvrs": mine})

    assert mine[0]["200 x 20/s"] == pytest.approx(50 + (500 - 4 * 50) / 60 + 0.25)
    assert mine[0]["256 x 200/s"] == pytest.approx(17 + (500 - 4 * 50) / 300 + 1e3 / 51_200)
    assert [row["value"] for row in rows[:3]] == pytest.approx([2 / 3] * 3)
    assert [row["met"] for row in rows] == [True] * 4


def row(subject: str, **figures: object) -> dict[str, object]:
    return {"scenario": "s200", "subject": subject, "started": 9, "broken": 0, **figures}


def verdicts(*rows: dict[str, object]) -> dict[str, str]:
    return {each["what"]: each["verdict"] for each in table.judged(rows) if not each["is_moonshot"]}


def test_a_bar_is_judged_by_the_ratio_of_medians() -> None:
    """The ratio is of kvrs and its peer, each over all rounds."""
    peer = [row("vllm-router P/D", cpu_s_per_million=value) for value in (30.0, 10.0, 20.0)]
    at_par = [row("kvrs", cpu_s_per_million=value) for value in (20.0, 99.0, 5.0)]
    above = [row("kvrs", cpu_s_per_million=value) for value in (20.1, 99.0, 5.0)]
    what = "CPU per token, 200 x 20/s, of vllm-router P/D"

    assert verdicts(*peer, *at_par)[what] == "met"
    assert verdicts(*peer, *above)[what] == "missed"
    assert verdicts(*at_par)[what] == "not measured"


def test_throughput_is_to_be_at_least_that_of_the_peer() -> None:
    """Where the other bars are upper ones."""
    peer = row("vllm-router P/D", tokens_per_s=100) | {"scenario": "s256"}
    what = "tokens/s, 256 streams, of vllm-router P/D"

    assert verdicts(peer, peer | {"subject": "kvrs"})[what] == "met"
    assert verdicts(peer, peer | {"subject": "kvrs", "tokens_per_s": 99})[what] == "missed"


@pytest.mark.parametrize(
    ("rows", "failed"),
    [
        ([row("kvrs")], False),
        ([row("kvrs", broken=1, fault="no [DONE]")], True),
        ([row("nginx", broken=1, fault="no [DONE]"), row("kvrs")], False),
        ([{"subject": "kvrs", "failed": "it did not start"}], True),
        ([{"subject": "nginx", "skipped": "not installed"}, row("kvrs")], False),
        ([{"scenario": "keyed", "subject": "kvrs", "ratio": 1.4, "started": 9}], True),
        ([{"scenario": "keyed", "subject": "kvrs", "ratio": 1.3, "started": 9}], False),
    ],
)
def test_a_run_fails_by_kvrs_alone(rows: list[dict[str, object]], failed: bool) -> None:
    """A missed bar, a broken stream or a proxy that does not start; never by a peer."""
    assert table.is_failed(rows) is failed


def test_the_text_names_what_is_not_in_the_figures() -> None:
    """Skipped peers with the reason, and streams that were not whole with the first fault."""
    text = table.shown(
        [
            {"subject": "nginx", "skipped": "not installed"},
            row("kvrs", broken=2, fault="no [DONE]"),
        ]
    )

    assert "skipped: all scenarios, nginx: not installed" in text
    assert "NOT WHOLE: 2 of 9 streams, s200, kvrs: no [DONE]" in text
