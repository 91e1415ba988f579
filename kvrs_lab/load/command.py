"""`kvrs lab replay`: send a trace to an OpenAI endpoint, inject faults if given, compare with a
clean run, and write the report.
"""

import asyncio
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import uvloop
from rich.console import Console

from kvrs.errors import ConfigError, MissingExtraError, check_extras, numbers_out_of_range
from kvrs.net.admin import AdminClient
from kvrs.net.origins import has_origin
from kvrs.net.tls import Certificates
from kvrs.tables import output
from kvrs_lab.faults.language import Fault, load_faults
from kvrs_lab.load.admin_port import AdminPort
from kvrs_lab.load.fitting import fitted, fitting_scale, served_tokens, too_long
from kvrs_lab.load.open_loop import Dialect
from kvrs_lab.load.passes import FaultInjector, Run, Target, run_pass
from kvrs_lab.load.progress import progress_bar
from kvrs_lab.report.output import claim_directory
from kvrs_lab.report.report import Report, build_report, write_report
from kvrs_lab.report.table import terminal_table
from kvrs_lab.traces.formats import load_trace
from kvrs_lab.traces.generator import generate
from kvrs_lab.traces.mooncake import (
    Trace,
    at_rate,
    check_lasts,
    replay_requests,
    scale_lengths,
    window,
)
from kvrs_lab.traces.presets import PRESETS
from kvrs_lab.traces.records import ReplayRequest

# Least vocabulary of any model; the first few tokens are often special.
SMALLEST_VOCAB_SIZE = 512
FIRST_ORDINARY_TOKEN = 4
_GENERATED_REQUESTS = 100
_BACK_UP_S = 60.0
_LOOK_AGAIN_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """The options of the command line."""

    url: str
    out: Path
    # Either `trace` or `preset`.
    trace: Path | None = None
    preset: str | None = None
    requests: int | None = None  # None: all of the trace, or 100 generated ones.
    rate: float | None = None  # Requests per second; None: the trace's own.
    length_scale: float = 1.0
    dialect: Dialect = Dialect()  # noqa: RUF009 - frozen
    seed: int = 0
    oracle: bool = False
    fault: Path | None = None
    admin: AdminClient | None = None  # Admin port of the proxy behind `url`.
    secret: bytes | None = None
    tls: Certificates | None = None


# Checks in advance whether faults can be carried out; see `kvrs_lab.cluster.fault_injection`.
Check = Callable[[list[Fault], AdminPort], Awaitable[None]]


def run_replay(options: ReplayOptions, inject_faults: FaultInjector, check: Check) -> bool:
    """Replay, and write report.json and report.html to `out`. Return whether every stream was
    complete, and exact with the oracle.

    `inject_faults` and `check` carry out and vet faults (`kvrs_lab.cluster.fault_injection`).

    Raises:
        ConfigError, TraceError: options or files are wrong; nothing was sent.
        AdminError, FaultError: the state cannot be read, or a fault cannot be carried out.
    """
    faults = _faults(options)
    console = output()
    _check(options)
    claim_directory(options.out)
    served = uvloop.run(served_tokens(options.url, options.dialect))
    requests = load_requests(options, console, served)
    report, interrupted = uvloop.run(
        _run_all(options, requests, faults, inject_faults, check, console)
    )
    if report["streams"] or not interrupted:
        _write(report, options.out, console)
    if interrupted:
        raise KeyboardInterrupt
    return not report["reasons"] and not report["faults_never_due"]


def _faults(options: ReplayOptions) -> list[Fault]:
    if options.fault is None:
        return []
    if options.admin is None:
        raise ConfigError(
            "--fault: missing --admin-url, whose state names the cluster's instances and processes"
        )
    return load_faults(options.fault)


def load_requests(
    options: ReplayOptions, console: Console | None = None, served: int | None = None
) -> list[ReplayRequest]:
    """Load the trace in the form to send. A message on the console describes how a preset was
    scaled to a server of `served` tokens.

    Raises:
        ConfigError, TraceError: options or the file are wrong.
    """
    _check(options)
    trace = _source(options)
    if options.rate is not None:
        trace = at_rate(trace, options.rate)
        check_lasts(trace, f"--rate: got {options.rate}")
    trace = _for_server(trace, options, served, console)
    return replay_requests(trace, SMALLEST_VOCAB_SIZE, options.seed, FIRST_ORDINARY_TOKEN)


def _for_server(
    trace: Trace, options: ReplayOptions, served: int | None, console: Console | None
) -> Trace:
    scale = options.length_scale
    scaled = scale_lengths(trace, scale) if scale != 1 else trace
    if served is None or not (long := too_long(scaled, served)):
        return scaled
    if options.preset is None or scale != 1:
        fits = fitting_scale(trace, served)
        raise ConfigError(
            f"--length-scale: got {scale:g}, at which {long} of {len(trace.requests)} requests are "
            f"longer than the {served:,} tokens that the server takes; allowed: "
            + (f"at most {fits:g}" if fits else "none, this trace has too many blocks")
        )
    scaled, words = fitted(trace, served)
    if console is not None:
        console.print(f"  {words}", style="yellow", markup=False, soft_wrap=True)
    return scaled


def _check(options: ReplayOptions) -> None:
    mistakes = [*_numbers_out_of_range(options)]
    if (options.trace is None) == (options.preset is None):
        mistakes.append("allowed: exactly one of --trace and --trace-preset")
    if options.preset is not None and options.preset not in PRESETS:
        mistakes.append(f"--trace-preset: got {options.preset!r}; allowed: {', '.join(PRESETS)}")
    if not has_origin(options.url):
        mistakes.append(f"--url: got {options.url!r}; allowed: http://HOST... or https://HOST...")
    if mistakes:
        raise ConfigError(mistakes)


def _numbers_out_of_range(options: ReplayOptions) -> Iterator[str]:
    yield from numbers_out_of_range([("--rate", options.rate)], zero=False)
    if not 0 < options.length_scale <= 1:
        yield f"--length-scale: got {options.length_scale}; allowed: above 0, up to 1"


def _source(options: ReplayOptions) -> Trace:
    if options.trace is not None:
        trace = load_trace(options.trace)
        return window(trace, options.requests or len(trace.requests))
    assert options.preset is not None
    count = options.requests or _GENERATED_REQUESTS
    return generate(replace(PRESETS[options.preset], requests=count), options.seed)


async def _run_all(
    options: ReplayOptions,
    requests: list[ReplayRequest],
    faults: list[Fault],
    inject_faults: FaultInjector,
    check: Check,
    console: Console,
) -> tuple[Report, bool]:
    """Return the report, and whether Ctrl-C ended the run with only some streams ended."""
    stop = asyncio.Event()
    async with AsyncExitStack() as stack:
        stack.enter_context(_on_interrupt(stop))
        port = None
        if options.admin is not None:
            port = await stack.enter_async_context(
                AdminPort(options.admin, options.secret, options.tls)
            )
            await check(faults, port)
        target = Target(options.url, options.dialect, port=port, inject_faults=inject_faults)
        run = await _pass(target, requests, faults, options.seed, console, "replay", stop)
        clean = None
        if options.oracle and not run.interrupted:
            await _all_up(port)
            clean = await _pass(target, requests, [], options.seed, console, "oracle", stop)
        if stop.is_set():
            return _report(options, requests, run, None, _part(run, requests)), True
        return _report(options, requests, run, clean), False


def _part(run: Run, requests: list[ReplayRequest]) -> str:
    ended = f"{len(run.records)} of {len(requests)} streams had ended"
    return ended if run.interrupted else f"{ended}, the oracle had not"


@contextmanager
def _on_interrupt(stop: asyncio.Event) -> Iterator[None]:
    """Let the first Ctrl-C set `stop`, and the second end the process."""
    loop = asyncio.get_running_loop()

    def first() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        stop.set()

    if threading.current_thread() is not threading.main_thread():
        yield  # Only the main thread can handle signals.
        return
    loop.add_signal_handler(signal.SIGINT, first)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


async def _pass(
    target: Target,
    requests: list[ReplayRequest],
    faults: list[Fault],
    seed: int,
    console: Console,
    title: str,
    stop: asyncio.Event,
) -> Run:
    with progress_bar(console, title, len(requests)) as show:
        return await run_pass(target, requests, faults, seed, show, stop)


async def _all_up(port: AdminPort | None) -> None:
    """Wait until killed processes are back, since the clean run needs a whole cluster."""
    if port is not None:
        await port.wait_all_up(_BACK_UP_S, _LOOK_AGAIN_S)


def _report(
    options: ReplayOptions,
    requests: list[ReplayRequest],
    run: Run,
    clean: Run | None,
    interrupted: str | None = None,
) -> Report:
    caches = "empty" if run.cold else "as they were found"
    settings = {
        "url": options.url,
        "trace": options.trace.name if options.trace else f"preset {options.preset}",
        "rate": options.rate,
        "length_scale": options.length_scale,
        # The values as sent, after any scaling to the server.
        "requests": len(requests),
        "longest_prompt_tokens": max((len(each.prompt_ids) for each in requests), default=None),
        "longest_output_tokens": max((each.max_tokens for each in requests), default=None),
        "model": options.dialect.model,
        "seed": options.seed,
        "fault": options.fault.name if options.fault else None,
        "caches_at_the_start": caches,
        "interrupted": interrupted,
    }
    records = None if clean is None else clean.records
    never_due = [fault.label for fault in run.never_due]
    return build_report(
        run.records,
        records,
        run.recoveries,
        run.faults,
        settings,
        never_due=never_due,
        proxy=run.proxy,
        cpu_pressures=[each.cpu_pressure for each in (run, clean) if each is not None],
        losses=run.losses,
    )


def _write(report: Report, out: Path, console: Console) -> None:
    write_report(report, out / "report.json")
    page = _write_page(report, out / "report.html")
    console.print(terminal_table(report))
    if report["compared"] == "text":
        console.print(
            "The endpoint does not return token ids, so only the text was compared.", style="yellow"
        )
    console.print(f"\nreport: {page} and {out / 'report.json'}", markup=False, soft_wrap=True)


def _write_page(report: Report, path: Path) -> str:
    """Write the HTML page; return its path, or the reason for a missing page."""
    try:
        check_extras("report")
    except MissingExtraError as error:
        return f"(no {path}: {error})"
    # matplotlib takes a second to load.
    from kvrs_lab.report.html import write_html

    write_html(report, path)
    return str(path)
