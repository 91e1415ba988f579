"""The CPU that metrics, logs and traces cost a proxy, and that the page on its admin port costs.

    python -m experiments.telemetry_cost.run                  # about ten minutes
    python -m experiments.telemetry_cost.run --tokens 300     # of longer answers; about twelve
    python -m experiments.telemetry_cost.run --part page      # about five
    python -m experiments.telemetry_cost.run --quick          # one short round, for a look

Mock engines and load client of bench_proxy. Exit status 1: a bar is missed; 2: void.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from experiments.bench_proxy import proxies
from experiments.bench_proxy.engines import PAIR, BenchError, Instance, Load, compile_programs
from experiments.bench_proxy.proxies import Running
from experiments.bench_proxy.steady import S200, Cores, Row, Setting, figures
from experiments.record import Record
from experiments.telemetry_cost.observers import SCRAPE, Asker, Collector, asking, get
from kvrs.protocol.instance import Role
from kvrs.report.student import Interval, interval

OUT = Path(__file__).parent / "results"
TOKENS = S200.options["tokens"]
STREAMS = 400  # Of all proxies together.
# Of a proxy with 200 streams in a second: what happens every second does so once for as many.
TOKENS_OF_SECOND = 4000
ROUNDS = 16
WINDOW_MS = 20_000
QUICK_WINDOW_MS = 2_000
BAR_TELEMETRY = 0.03
LOGS = {"logs": {"format": "json", "access": True}}
_OTEL = "OTEL_"

INSTANCES = tuple(
    Instance(f"{role.value[0]}{n}", role, f"n{n}")
    for n in range(32)
    for role in (Role.PREFILL, Role.DECODE)
)
PAGE_ROUNDS = 6
BAR_PAGE = 0.01
MOST_PAGE_BYTES = 100_000
# For the page's one request per second so many, that the cost of one can be told from noise.
ASKED = 20


@dataclass(frozen=True, slots=True)
class Subject:
    """How a proxy is observed."""

    name: str
    is_scraped: bool = False
    is_logged: bool = False
    traced: float = 0.0  # Share of the requests.
    asked: int = 0  # Times a second, for what the page shows.

    def environment(self, collector: str) -> dict[str, str]:
        if not self.traced:
            return {}
        sampler = {
            "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
            "OTEL_TRACES_SAMPLER_ARG": str(self.traced),
        }
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": collector} | (sampler if self.traced < 1 else {})


NONE = Subject("none")
CONTROL = Subject("control")  # As `none`: what differs between them is the method's error.
ALL = Subject("all", is_scraped=True, is_logged=True, traced=1)
SAMPLED = replace(ALL, name="sampled", traced=0.1)
EACH = (
    Subject("metrics", is_scraped=True),
    Subject("logs", is_logged=True),
    Subject("traces", traced=1),
)
PAGE = Subject("page", asked=ASKED)


@dataclass(slots=True)
class Observed:
    """One proxy that runs, and where what it tells goes."""

    subject: Subject
    setting: Setting
    running: Running
    collector: Collector
    whole: int = 0
    scrapes: int = 0

    @contextmanager
    def loaded(self, options: Mapping[str, int]) -> Iterator[Load]:
        """While it is observed."""
        askers: list[Asker] = []
        port, setting = self.running.admin_port, self.setting
        per_s = options["streams"] * options["rate"] / 1000 / TOKENS_OF_SECOND
        with ExitStack() as stack:
            if self.subject.is_scraped:
                askers.append(stack.enter_context(asking(port, "/metrics", per_s, SCRAPE)))
            if (times := self.subject.asked) > 0:
                stack.enter_context(asking(port, "/kvrs/v1/overview", times * per_s))
            load = Load(
                setting.programs,
                self.running.port,
                {"seed": setting.seed, **options},
                self.running.pids,
                setting.cores.mocks,
            )
            yield stack.enter_context(load)
        self.scrapes += sum(asker.answers for asker in askers)

    def measured(self, load: Load) -> Row:
        """Raises BenchError: a stream is broken."""
        result = load.result()
        if result["broken"]:
            raise BenchError(f"{self.subject.name}: a stream is not whole: {result['fault']}")
        self.whole += result["whole"]
        return figures(result)

    def told(self) -> dict[str, int]:
        """Counts of everything that has arrived, once the proxy has ended."""
        return {
            "requests": self.whole,
            "scrapes": self.scrapes,
            "lines": self._lines(),
            # Besides, the client's port was asked whether it is ready.
            "spans": sum(name != "GET" for name in self.collector.span_names()),
        }

    def _lines(self) -> int:
        """Access lines of the load's requests, in the proxy's log."""
        (log,) = self.setting.directory.glob("kvrs-*.log")
        found = 0
        for line in log.read_text().splitlines():
            if line.startswith("{"):
                row = json.loads(line)
                found += row["logger"] == "kvrs.access" and row["path"] == "/v1/completions"
        return found


@contextmanager
def observed(
    setting: Setting, subject: Subject, instances: Sequence[Instance] = PAIR
) -> Iterator[Observed]:
    """The subject's proxy, in front of engines of its own."""
    directory = Path(tempfile.mkdtemp(prefix=f"{subject.name}-", dir=setting.directory))
    own = replace(setting, directory=directory)
    with ExitStack() as stack:
        collector = stack.enter_context(Collector())
        engines = stack.enter_context(own.engines(instances))
        start = proxies.kvrs(
            sections=LOGS if subject.is_logged else {},
            environment=subject.environment(collector.url),
        )
        running = stack.enter_context(start(own.bench(engines)))
        yield Observed(subject, own, running, collector)


def measure(all_observed: Sequence[Observed], options: Mapping[str, int]) -> dict[str, float]:
    """CPU seconds per million tokens of each subject: all have their load at the same time."""
    with ExitStack() as stack:
        loads = [stack.enter_context(each.loaded(options)) for each in all_observed]
        rows = [each.measured(load) for each, load in zip(all_observed, loads, strict=True)]
    return {
        each.subject.name: row["cpu_s_per_million"]
        for each, row in zip(all_observed, rows, strict=True)
    }


def in_order(subjects: Sequence[Subject], number: int) -> list[Subject]:
    """In which those of a round start: over the rounds each is at each place as often."""
    first = number // 2 % len(subjects)
    turned = [*subjects[first:], *subjects[:first]]
    return turned[::-1] if number % 2 else turned


def compared(
    setting: Setting,
    rounds: int,
    subjects: Sequence[Subject],
    tokens: int = TOKENS,
    instances: Sequence[Instance] = PAIR,
) -> dict[str, Any]:
    """CPU by round and subject. `tokens`: of each answer."""
    window_ms = QUICK_WINDOW_MS if setting.quick else WINDOW_MS
    options = S200.options | {"streams": STREAMS // len(subjects), "tokens": tokens}
    options |= {"window_ms": window_ms, "limit_ms": 3 * window_ms + 60_000}
    rows: list[dict[str, float]] = []
    seen: dict[str, dict[str, int]] = {each.name: {} for each in subjects}
    sizes: dict[str, int] = {}
    for number in range(rounds):
        of_round = replace(setting, seed=setting.seed + number)
        with ExitStack() as stack:
            running = [
                stack.enter_context(observed(of_round, each, instances))
                for each in in_order(subjects, number)
            ]
            row = measure(running, options)
            if PAGE in subjects:
                port = running[0].running.admin_port
                paths = {"page_bytes": "/ui", "overview_bytes": "/kvrs/v1/overview"}
                sizes = {name: len(get(port, path)) for name, path in paths.items()}
        for each in running:
            told = each.told()
            check(each.subject, told)
            before = seen[each.subject.name]
            seen[each.subject.name] = {
                key: value + before.get(key, 0) for key, value in told.items()
            }
        rows.append({each.name: row[each.name] for each in subjects})
        print(f"round {number + 1}: {rows[-1]}", flush=True)
    return {
        "cpu_s_per_million": rows,
        "seen": seen,
        "tokens": tokens,
        "streams": options["streams"],
        **sizes,
    }


def check(subject: Subject, told: Mapping[str, int]) -> None:
    """A comparison with a proxy that told nothing would show nothing.

    Raises:
        BenchError: less was told than was to be, or more.
    """
    # A request is a span with two calls to instances.
    all_spans = 3 * told["requests"]
    is_right = {
        "scrapes": bool(told["scrapes"]) == subject.is_scraped,
        "lines": told["lines"] == (told["requests"] if subject.is_logged else 0),
        "spans": told["spans"] == all_spans * subject.traced
        or (0 < subject.traced < 1 and 0 < told["spans"] < all_spans and not told["spans"] % 3),
    }
    for name, right in is_right.items():
        if not right:
            raise BenchError(f"{subject.name}: {told[name]} {name} of {told['requests']} requests")


def added(rows: Sequence[Mapping[str, float]], name: str) -> Interval:
    """The extra cost of a subject, as a share, in each round beside those that are not observed."""
    if name == CONTROL.name:
        found = interval([row[name] / row[NONE.name] - 1 for row in rows])
    else:
        found = interval(
            [row[name] / fmean((row[NONE.name], row[CONTROL.name])) - 1 for row in rows]
        )
    assert found is not None
    return found


def error_of(control: Interval, bar: float) -> str | None:
    """Why the method cannot tell the bar, for which the interval is narrow."""
    if control.half_width is None:
        return "one round has no interval"
    if abs(control.mean) > control.half_width:
        return f"two proxies that are not observed differ: {shown(control)}"
    if control.half_width > bar / 2:
        return f"two proxies that are not observed: {shown(control)}; at most ± {bar / 2:.1%}"
    return None


def shown(found: Interval) -> str:
    half = "" if found.half_width is None else f" ± {found.half_width:.1%}"
    return f"{found.mean:+.1%}{half}"


def telemetry_text(found: Mapping[str, Any]) -> tuple[bool, str]:
    rows = found["cpu_s_per_million"]
    tokens = found["tokens"]
    lines = [
        f"each proxy {found['streams']} streams x 20 tokens/s, {tokens} tokens each, all at the "
        f"same time; {len(rows)} rounds",
        f"{'':10}{'CPU s/M':>10}{'added':>16}{'a request, us':>15}{'requests':>10}{'scrapes':>9}"
        f"{'lines':>9}{'spans':>9}",
    ]
    base = fmean(row[name] for row in rows for name in (NONE.name, CONTROL.name))
    for name, told in found["seen"].items():
        mean = fmean(row[name] for row in rows)
        share = added(rows, name)
        more = "" if name == NONE.name else f"{shown(share):>16}"
        a_request = "" if name in (NONE.name, CONTROL.name) else f"{share.mean * base * tokens:.0f}"
        counts = f"{told['requests']:>10}{told['scrapes']:>9}{told['lines']:>9}{told['spans']:>9}"
        lines.append(f"{name:10}{mean:>10.1f}{more:>16}{a_request:>15}{counts}")
    cost = added(rows, ALL.name)
    passed = cost.mean <= BAR_TELEMETRY
    verdict = f"metrics, logs and traces together: {shown(cost)}; bar {BAR_TELEMETRY:.0%}"
    return passed, "\n".join([*lines, "", verdict, "PASSED" if passed else "FAILED"])


def page_text(found: Mapping[str, Any]) -> tuple[bool, str]:
    rows = found["cpu_s_per_million"]
    asked, control = (added(rows, each.name) for each in (PAGE, CONTROL))
    mean = asked.mean / ASKED
    passed = mean <= BAR_PAGE and found["page_bytes"] < MOST_PAGE_BYTES
    half = "" if asked.half_width is None else f" ± {asked.half_width / ASKED:.2%}"
    return passed, "\n".join(
        [
            f"{len(INSTANCES)} instances; each proxy {found['streams']} streams x 20 tokens/s, "
            f"{found['tokens']} tokens each, all at the same time; {len(rows)} rounds",
            "CPU seconds per million tokens: "
            + ", ".join(f"{name} {fmean(row[name] for row in rows):.1f}" for name in rows[0]),
            f"{ASKED} requests for the overview in the time of {TOKENS_OF_SECOND:,} tokens: "
            f"{shown(asked)}; "
            f"none, beside none: {shown(control)}",
            f"one request: {mean:.2%}{half} of the proxy's CPU; bar {BAR_PAGE:.0%}",
            f"the page {found['page_bytes']:,} bytes, bar {MOST_PAGE_BYTES:,}; an overview "
            f"{found['overview_bytes']:,}",
            "PASSED" if passed else "FAILED",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=("telemetry", "page"), default="telemetry")
    parser.add_argument("--each", action="store_true", help="also metrics, logs, traces alone")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of each answer")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--quick", action="store_true", help="one round of short windows")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    is_page = arguments.part == "page"
    rounds = arguments.rounds or (1 if arguments.quick else PAGE_ROUNDS if is_page else ROUNDS)
    for name in [name for name in os.environ if name.startswith(_OTEL)]:
        del os.environ[name]
    cores = sorted(os.sched_getaffinity(0))
    placed = Cores(cores[0], cores[1]) if len(cores) > 1 else Cores(None, None)
    if placed.mocks is not None:
        os.sched_setaffinity(0, {placed.mocks})
    record = Record(arguments.seed)
    with tempfile.TemporaryDirectory(prefix="kvrs-telemetry-") as name:
        try:
            programs = compile_programs(Path(name))
            setting = Setting(
                programs, placed, Path(name), Path(name), arguments.seed, arguments.quick
            )
            if is_page:
                found = compared(setting, rounds, (NONE, CONTROL, PAGE), instances=INSTANCES)
                passed, text = page_text(found)
            else:
                subjects = (NONE, CONTROL, *(EACH if arguments.each else ()), SAMPLED, ALL)
                found = compared(setting, rounds, subjects, arguments.tokens)
                passed, text = telemetry_text(found)
        except BenchError as error:
            sys.exit(str(error))
    print(text)
    name = "page" if is_page else "telemetry_cost"
    if not is_page and arguments.tokens != TOKENS:
        name += f"_{arguments.tokens}"
    bar = ASKED * BAR_PAGE if is_page else BAR_TELEMETRY
    if why := error_of(added(found["cpu_s_per_million"], CONTROL.name), bar):
        record.void(why)
    is_void = record.keep(arguments.out, name, found | {"passed": passed}, text)
    return 2 if is_void else 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
