"""`kvrs lab replay` as a whole, against a server that answers what it was asked, or not quite."""

import asyncio
import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from rich.console import Console

from kvrs.errors import ConfigError, TraceError
from kvrs.net.admin import AdminClient, AdminError
from kvrs_lab.cluster.fault_injection import views
from kvrs_lab.faults.language import Fault
from kvrs_lab.load.admin_port import AdminPort
from kvrs_lab.load.command import ReplayOptions, load_requests, run_replay
from kvrs_lab.load.fitting import fitting_scale, too_long
from kvrs_lab.load.open_loop import Dialect
from kvrs_lab.load.passes import Injection
from kvrs_lab.report.compare import compare_reports
from kvrs_lab.report.measures import ReportError
from kvrs_lab.traces.mooncake import Trace, TraceRequest, scale_lengths

pytestmark = pytest.mark.network

OPTIONS = ReplayOptions(
    url="http://127.0.0.1:9", out=Path("unused"), preset="mooncake-conversation", requests=30
)


class Server:
    """An OpenAI endpoint, and the state of a kvrs proxy, in one: every token is a function of its
    prompt and place.
    """

    def __init__(self) -> None:
        self.says_ids = True
        self.spoiled: set[int] = set()  # Requests, counted from the first, that get a wrong token.
        self.seen = self.answered = 0
        self.answers: int | None = None  # So many; later requests wait for ever. None: all.
        self.busy = False
        self.max_model_len: int | None = None
        self.longest = 0  # Tokens of prompt and output of one request.
        self.recoveries: list[dict[str, Any]] = []
        self.incidents: list[dict[str, Any]] = []

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if self.busy:
            return web.json_response({"error": {"message": "come back later"}}, status=503)
        self.longest = max(self.longest, len(body["prompt"]) + body["max_tokens"])
        prompt = json.dumps(body["prompt"])
        number, self.seen = self.seen, self.seen + 1
        if self.answers is not None and number >= self.answers:
            await asyncio.Event().wait()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for position in range(body["max_tokens"]):
            token = (len(prompt) + position) % 97
            if number in self.spoiled and position == 0:
                token += 100  # That of no other place, whichever request has come at this number.
            last = position + 1 == body["max_tokens"]
            choice: dict[str, Any] = {
                "text": f"{token} ",
                "finish_reason": "length" if last else None,
            }
            if self.says_ids and body.get("return_token_ids"):
                choice["token_ids"] = [token]
            await response.write(
                f"data: {json.dumps({'id': f'cmpl-s{number}', 'choices': [choice]})}\n\n".encode()
            )
        await response.write(b"data: [DONE]\n\n")
        self.answered += 1
        return response

    async def models(self, request: web.Request) -> web.Response:
        model: dict[str, Any] = {"id": "m", "object": "model"}
        if self.max_model_len is not None:
            model["max_model_len"] = self.max_model_len
        return web.json_response({"object": "list", "data": [model]})

    async def state(self, request: web.Request) -> web.Response:
        up = {
            "id": "d0",
            "role": "decode",
            "node": "n0",
            "url": "http://127.0.0.1:9",
            "pid": 1,
            "health": "up",
        }
        return web.json_response({"instances": [up], "streams": [], "recoveries": self.recoveries})

    async def overview(self, request: web.Request) -> web.Response:
        found = {"instances": [], "streams": {}, "incidents": self.incidents, "policy": {}}
        return web.json_response(found)


@contextmanager
def serving(server: Server) -> Iterator[str]:
    """In a thread of its own, because the command brings its own event loop."""
    loop = asyncio.new_event_loop()
    app = web.Application()
    app.router.add_post("/v1/completions", server.complete)
    app.router.add_get("/kvrs/v1/state", server.state)
    app.router.add_get("/kvrs/v1/overview", server.overview)
    app.router.add_get("/v1/models", server.models)
    runner = web.AppRunner(app, shutdown_timeout=1)
    loop.run_until_complete(runner.setup())
    loop.run_until_complete(web.TCPSite(runner, "127.0.0.1", 0).start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def no_faults(injection: Injection) -> None:
    raise AssertionError("no fault was requested")


async def no_check(faults: list[Fault], port: AdminPort) -> None:
    assert not faults


def small(url: str, out: Path, **more: Any) -> ReplayOptions:
    options = ReplayOptions(
        url=url,
        out=out,
        preset="mooncake-conversation",
        requests=12,
        rate=200.0,
        length_scale=0.02,
        oracle=True,
    )
    return replace(options, **more)


def report_of(out: Path) -> Any:
    return json.loads((out / "report.json").read_text())


def test_a_replay_with_oracle_writes_an_exact_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same requests again, compared token by token; both files are there, and both say that
    the second run had the first one's prefixes.
    """
    with serving(Server()) as url:
        assert run_replay(small(url, tmp_path), no_faults, no_check)

    report = report_of(tmp_path)
    assert (report["exact"], report["compared"], report["streams"], report["completed"]) == (
        True,
        "tokens",
        12,
        12,
    )
    assert report["settings"]["caches_at_the_start"] == "as they were found"
    page = (tmp_path / "report.html").read_text()
    assert "<svg" in page
    for shown in (capsys.readouterr().out, page):
        assert "The second run found the prefix caches" in " ".join(shown.split())


def test_one_wrong_token_fails_the_command(tmp_path: Path) -> None:
    """An oracle that lets one pass is none."""
    server = Server()
    server.spoiled = {3}
    with serving(server) as url:
        assert not run_replay(small(url, tmp_path), no_faults, no_check)

    assert report_of(tmp_path)["tokens_different"] == 1


def test_an_endpoint_without_token_ids_is_compared_by_text_and_reported_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the report and in the terminal; a wrong text still fails."""
    server = Server()
    server.says_ids = False
    with serving(server) as url:
        assert run_replay(small(url, tmp_path, dialect=Dialect(plain=True)), no_faults, no_check)
        server.spoiled = {server.seen + 2}
        assert not run_replay(small(url, tmp_path / "2"), no_faults, no_check)

    assert report_of(tmp_path)["compared"] == "text"
    assert report_of(tmp_path / "2")["text_different"] == 1
    assert "does not return token ids, so only the text was compared" in capsys.readouterr().out


def test_without_an_oracle_nothing_is_called_exact(tmp_path: Path) -> None:
    """The report shows that nothing was compared; complete streams are a success."""
    with serving(Server()) as url:
        assert run_replay(small(url, tmp_path, oracle=False), no_faults, no_check)

    report = report_of(tmp_path)
    assert (report["exact"], report["compared"], report["runs"]["clean"], report["impact"]) == (
        None,
        "nothing",
        None,
        None,
    )
    assert "Nothing was compared" in (tmp_path / "report.html").read_text()


def test_reports_of_replays_can_be_compared(tmp_path: Path) -> None:
    """Each measure beside its ratio to that of the first report."""
    with serving(Server()) as url:
        for name in ("a", "b"):
            assert run_replay(small(url, tmp_path / name, oracle=False), no_faults, no_check)

    out = StringIO()
    Console(file=out, width=160).print(
        compare_reports([tmp_path / "a", tmp_path / "b" / "report.json"])
    )
    assert re.search(r"TTFT mean +[0-9.]+ ms +[0-9.]+ ms +[0-9.]+", out.getvalue())
    assert out.getvalue().splitlines()[0].split() == ["a", "b", "/", "a"]


def test_faults_go_to_the_striker_and_those_that_never_came_due_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The injector gets the schedule, what was sent so far, and where to note what it did; what is
    left is named everywhere.
    """
    (tmp_path / "f.yaml").write_text(
        "- {when: {at_s: 0}, what: kill, whom: {id: d0}}\n- {when: {at_s: 999}, what: "
        "kill, whom: {id: d0}}\n"
    )
    checked: list[int] = []

    async def check(faults: list[Fault], port: AdminPort) -> None:
        checked.append(len(faults))

    async def inject_faults(injection: Injection) -> None:
        while injection.requests_sent() < 3:
            await asyncio.sleep(0.001)
        (due,) = injection.schedule.due(
            1.0, injection.requests_sent(), views(await injection.port.state())
        )
        injection.carried_out.append({"at_s": 0.01, "what": "kill", "whom": due.whom, "phases": {}})
        noticed_s = time.time() - (time.monotonic() - injection.start_s) + 1000
        server.incidents = [
            {"subject": "d0", "is_loss": True, "at_s": noticed_s + 900},
            {"subject": "d0", "is_loss": True, "at_s": noticed_s},
            {"subject": "d0", "is_loss": False, "at_s": noticed_s - 900},
        ]

    server = Server()
    with serving(server) as url:
        options = small(url, tmp_path, fault=tmp_path / "f.yaml", admin=AdminClient(url))
        assert not run_replay(options, inject_faults, check)

    assert checked == [2]
    (fault,) = report_of(tmp_path)["faults"]
    assert fault["whom"] == "d0"
    assert fault["notice_s"] == pytest.approx(1000, abs=500)
    assert report_of(tmp_path)["faults_never_due"] == ["kill d0 (at_s 999.0)"]
    assert "A fault never came due: kill d0 (at_s 999.0)" in capsys.readouterr().out
    assert "A fault never came due: kill d0 (at_s 999.0)" in (tmp_path / "report.html").read_text()


def test_a_striker_that_fails_ends_the_run(tmp_path: Path) -> None:
    """A fault that cannot be carried out is no experiment: the load is not finished first."""
    (tmp_path / "f.yaml").write_text("- {when: {at_s: 0}, what: kill, whom: {id: d0}}\n")

    async def inject_faults(injection: Injection) -> None:
        raise AdminError("http://127.0.0.1:9", "cannot")

    async def check(faults: list[Fault], port: AdminPort) -> None:
        return None

    with serving(Server()) as url, pytest.raises(AdminError, match="cannot"):
        run_replay(
            small(url, tmp_path, rate=0.1, fault=tmp_path / "f.yaml", admin=AdminClient(url)),
            inject_faults,
            check,
        )


def test_an_admin_url_that_is_none_is_named(tmp_path: Path) -> None:
    """Before anything is sent."""
    server = Server()
    with (
        serving(server) as url,
        pytest.raises(AdminError, match="/nowhere/kvrs/v1/state: HTTP 404"),
    ):
        run_replay(
            small(url, tmp_path, admin=AdminClient(f"{url}/nowhere")), no_faults, check_state
        )

    assert server.seen == 0


async def check_state(faults: list[Fault], port: AdminPort) -> None:
    await port.state()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"preset": None}, "exactly one of --trace and --trace-preset"),
        ({"preset": "moon"}, "--trace-preset: got 'moon'; allowed: mooncake-conversation, "),
        ({"url": "localhost"}, "--url: got 'localhost'"),
        ({"url": "http://"}, "--url: got 'http://'"),
        ({"url": "http://h:99999"}, "--url: got 'http://h:99999'"),
        ({"rate": 0.0}, "--rate: got 0.0; allowed: above 0"),
        ({"rate": float("nan")}, "--rate: got nan; allowed: above 0"),
        (
            {"rate": 1e-300},
            "--rate: got 1e-300, by which the last request arrives after ",
        ),
        ({"length_scale": 2}, "--length-scale: got 2; allowed: above 0, up to 1"),
    ],
)
def test_options_that_contradict_are_refused(change: dict[str, Any], reason: str) -> None:
    """Before anything is read or sent."""
    with pytest.raises(ConfigError) as caught:
        load_requests(replace(OPTIONS, **change))

    assert reason in str(caught.value)


def test_faults_need_the_admin_url(tmp_path: Path) -> None:
    """The endpoint alone does not publish processes."""
    with pytest.raises(ConfigError, match="--fault: missing --admin-url"):
        run_replay(replace(OPTIONS, fault=tmp_path / "f.yaml"), no_faults, no_check)


def test_times_and_lengths_are_changed_as_asked() -> None:
    """At a rate, and shorter."""
    options = replace(OPTIONS, requests=20, rate=5.0, length_scale=0.01)

    requests = load_requests(options)

    assert requests == load_requests(options)
    assert requests[-1].arrival_s == pytest.approx(19 / 5)
    assert max(len(request.prompt_ids) for request in requests) < 1300
    assert all(4 <= token < 512 for request in requests for token in request.prompt_ids)


def test_the_first_requests_of_a_file_can_be_asked_for(tmp_path: Path) -> None:
    """Without a number they are all sent; more than there are is an error, not a shorter run."""
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival,input,output\n0,8,2\n1,8,3\n2,8,4\n")
    options = replace(OPTIONS, preset=None, trace=trace, requests=None)

    whole, first = load_requests(options), load_requests(replace(options, requests=2))

    assert [request.max_tokens for request in whole] == [2, 3, 4]
    assert first == whole[:2]
    with pytest.raises(TraceError, match="has 3 requests, 4 were asked for"):
        load_requests(replace(options, requests=4))


def test_a_place_that_cannot_be_written_to_is_named_before_anything_is_sent(
    tmp_path: Path,
) -> None:
    """A run takes minutes; its result must not be lost to a wrong path at the end."""
    (tmp_path / "file").write_text("")
    server = Server()

    with serving(server) as url, pytest.raises(ConfigError) as caught:
        run_replay(small(url, out=tmp_path / "file" / "under"), no_faults, no_check)

    assert str(caught.value).startswith(
        f"--out: {tmp_path / 'file' / 'under'}: Not a directory; allowed: "
    )
    assert server.seen == 0


def test_errors_are_listed_by_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Counts by kind with the first message of each, in the terminal and in the page."""
    server = Server()
    server.busy = True
    with serving(server) as url:
        assert not run_replay(small(url, tmp_path, oracle=False), no_faults, no_check)

    assert "http: 12 streams, first number 0: come back later" in " ".join(
        capsys.readouterr().out.split()
    )
    assert "come back later" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not JSON"),
        pytest.param("[" * 100_000, "not JSON", id="nested"),
        ("[]", "schema_version None"),
        ('{"schema_version": 1}', "schema_version 1; allowed: 5"),
        ('{"schema_version": 5}', "missing required field `exact`"),
        (
            '{"schema_version": 5, "exact": null, "streams": 1, "completed": 1, '
            '"recoveries": {}, "settings": {}, "measures": {"goodput_per_s": "fast"}}',
            "goodput_per_s",
        ),
    ],
)
def test_what_is_no_report_of_this_version_is_not_compared(
    tmp_path: Path, text: str, reason: str
) -> None:
    """Numbers of another version may mean something else."""
    (tmp_path / "report.json").write_text(text)

    with pytest.raises(ReportError, match=reason):
        compare_reports([tmp_path, tmp_path])


def test_a_server_that_does_not_answer_is_named_before_the_schedule_runs(tmp_path: Path) -> None:
    """Not one failed stream per request."""
    with pytest.raises(ConfigError, match=r"--url: got 'http://127\.0\.0\.1:9', .*; allowed: a s"):
        run_replay(small("http://127.0.0.1:9", tmp_path), no_faults, no_check)


def test_a_preset_is_scaled_to_what_the_server_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first replay needs no options of length; what was done is said."""
    server = Server()
    server.max_model_len = 256
    options = small("", tmp_path, oracle=False, length_scale=1.0)
    with serving(server) as url:
        assert run_replay(replace(options, url=url), no_faults, no_check)

    assert 64 < server.longest <= 256
    settings = report_of(tmp_path)["settings"]
    assert settings["requests"] == 12
    longest = settings["longest_prompt_tokens"] + settings["longest_output_tokens"]
    assert server.longest <= longest <= 256
    shown = " ".join(capsys.readouterr().out.split())
    assert "12 of 12 requests are longer than the 256 tokens that the server takes" in shown
    assert re.search(r"block of 512 tokens of a prompt to \d+; the last \d+ of \d+ blocks", shown)


def test_lengths_that_were_chosen_and_do_not_fit_are_refused_with_the_scale_that_fits(
    tmp_path: Path,
) -> None:
    """Lengths of a file, or given by an option, are not changed unasked; nothing is sent."""
    server = Server()
    server.max_model_len = 32
    with serving(server) as url:
        options = small(url, tmp_path, oracle=False)
        with pytest.raises(ConfigError, match="requests are longer than the 32 tokens") as caught:
            run_replay(options, no_faults, no_check)
        assert server.seen == 0
        scale = float(str(caught.value).rpartition("at most ")[2])
        assert run_replay(replace(options, length_scale=scale), no_faults, no_check)

    assert 0 < server.longest <= 32


def test_the_scale_that_fits_is_the_largest() -> None:
    """Scales have two digits; a trace whose blocks of one token are too many has none."""
    trace = Trace((TraceRequest(0.0, 1000, 24, (1, 2)),))
    long = Trace((TraceRequest(0.0, 512 * 100, 1, tuple(range(100))),))

    assert fitting_scale(trace, 512) == 0.5
    assert not too_long(scale_lengths(trace, 0.5), 512)
    assert too_long(scale_lengths(trace, 0.51), 512)
    assert fitting_scale(long, 50) is None


def interrupted(options: ReplayOptions, server: Server, answers: int) -> None:
    """A replay that gets SIGINT when the server has had one request more than it answers."""
    server.answers = answers

    def watch() -> None:
        while server.seen <= answers or server.answered < answers:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    watcher = threading.Thread(target=watch)
    with serving(server) as url:
        watcher.start()
        with pytest.raises(KeyboardInterrupt):
            run_replay(replace(options, url=url), no_faults, no_check)
        watcher.join()


def test_ctrl_c_keeps_the_part_that_has_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Report and table are those of the streams that had ended, and say so."""
    server = Server()

    interrupted(small("", tmp_path, rate=20.0), server, 6)

    report = report_of(tmp_path)
    assert 0 < report["streams"] < 12
    assert report["completed"] == report["streams"]
    assert report["exact"] is None
    said = f"{report['streams']} of 12 streams had ended"
    assert report["settings"]["interrupted"] == said
    assert f"Interrupted: {said}" in capsys.readouterr().out
    assert said in (tmp_path / "report.html").read_text()


def test_ctrl_c_in_the_oracle_keeps_the_run(tmp_path: Path) -> None:
    """The run is whole, and compared with nothing."""
    interrupted(small("", tmp_path, rate=40.0), Server(), 15)

    report = report_of(tmp_path)
    assert (report["streams"], report["completed"], report["exact"]) == (12, 12, None)
    assert report["settings"]["interrupted"] == "12 of 12 streams had ended, the oracle had not"
