"""The CPU that metrics, logs and traces cost a proxy, and that the page on its admin port costs.

    python -m experiments.telemetry_cost.run                  # about seven minutes
    python -m experiments.telemetry_cost.run --tokens 300     # of longer answers
    python -m experiments.telemetry_cost.run --part page      # about six
    python -m experiments.telemetry_cost.run --quick          # one short round, for a look

Mock engines and load client of bench_proxy. Exit status 1: a bar is missed; 2: void.
"""

import argparse
import json
import os
import random
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from experiments.bench_proxy import proxies
from experiments.bench_proxy.engines import BenchError, Instance, compile_programs
from experiments.bench_proxy.proxies import Running
from experiments.bench_proxy.steady import S200, Cores, Row, Setting, figures
from experiments.record import Record
from experiments.telemetry_cost.observers import SCRAPE, Collector, asking, get
from kvrs.protocol.instance import Role
from kvrs.report.student import Interval, interval

OUT = Path(__file__).parent / "results"
ROUNDS = 6
TOKENS = S200.options["tokens"]
WINDOW_MS = 10_000
QUICK_WINDOW_MS = 2_000
BAR_TELEMETRY = 0.03
LOGS = {"logs": {"format": "json", "access": True}}
_OTEL = "OTEL_"

PAIRS = 32  # 64 instances.
BAR_PAGE = 0.01
MOST_PAGE_BYTES = 100_000
# Of the page's one request per second so many, that the cost of one can be told from noise.
ASKED_PER_S = 20.0


@dataclass(frozen=True, slots=True)
class Subject:
    """How a proxy is observed."""

    name: str
    is_scraped: bool = False
    is_logged: bool = False
    is_traced: bool = False


NONE = Subject("none")
ALL = Subject("all", is_scraped=True, is_logged=True, is_traced=True)
EACH = (
    Subject("metrics", is_scraped=True),
    Subject("logs", is_logged=True),
    Subject("traces", is_traced=True),
)


@dataclass(slots=True)
class Observed:
    """One proxy that runs, and where what it tells goes."""

    subject: Subject
    setting: Setting
    running: Running
    collector: Collector
    whole: int = 0
    scrapes: int = 0

    def measure(self, options: Mapping[str, int]) -> Row:
        with ExitStack() as stack:
            asker = None
            if self.subject.is_scraped:
                port = self.running.admin_port
                asker = stack.enter_context(asking(port, "/metrics", 1.0, SCRAPE))
            result = self.setting.load(self.running, options)
        if result["broken"]:
            raise BenchError(f"{self.subject.name}: a stream is not whole: {result['fault']}")
        self.whole += result["whole"]
        self.scrapes += asker.answers if asker is not None else 0
        return figures(result)

    def told(self) -> dict[str, int]:
        """What has arrived, once the proxy has ended."""
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
def observed(setting: Setting, subject: Subject) -> Iterator[Observed]:
    """The subject's proxy, in front of engines of its own."""
    directory = Path(tempfile.mkdtemp(prefix=f"{subject.name}-", dir=setting.directory))
    own = replace(setting, directory=directory)
    with ExitStack() as stack:
        collector = stack.enter_context(Collector())
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url} if subject.is_traced else {}
        engines = stack.enter_context(own.engines())
        start = proxies.kvrs(sections=LOGS if subject.is_logged else {}, environment=environment)
        running = stack.enter_context(start(own.bench(engines)))
        yield Observed(subject, own, running, collector)


def telemetry(
    setting: Setting, rounds: int, subjects: Sequence[Subject], tokens: int
) -> dict[str, Any]:
    """CPU by round and subject: all of them run, one has the load; the order turns around.
    `tokens`: of each answer.
    """
    options = of_window(setting) | {"tokens": tokens}
    draw = random.Random(setting.seed)
    rows: list[dict[str, float]] = []
    seen: dict[str, dict[str, int]] = {}
    for number in range(rounds):
        with ExitStack() as stack:
            running = [stack.enter_context(observed(setting, each)) for each in subjects]
            taken: dict[str, list[float]] = {each.name: [] for each in subjects}
            order = draw.sample(running, len(running))
            for each in [*order, *reversed(order)]:
                taken[each.subject.name].append(each.measure(options)["cpu_s_per_million"])
        for each in running:
            told = each.told()
            check(each.subject, told)
            seen[each.subject.name] = {
                key: value + seen.get(each.subject.name, {}).get(key, 0)
                for key, value in told.items()
            }
        rows.append({name: fmean(values) for name, values in taken.items()})
        print(f"round {number + 1}: {rows[-1]}", flush=True)
    return {"cpu_s_per_million": rows, "seen": seen, "tokens": tokens}


def check(subject: Subject, told: Mapping[str, int]) -> None:
    """A comparison with a proxy that told nothing would show nothing.

    Raises:
        BenchError: less was told than was to be, or more.
    """
    # A request is a span with two calls to instances.
    due = {
        "scrapes": subject.is_scraped,
        "lines": told["requests"] if subject.is_logged else 0,
        "spans": 3 * told["requests"] if subject.is_traced else 0,
    }
    for name, count in due.items():
        is_right = bool(told[name]) == count if name == "scrapes" else told[name] == count
        if not is_right:
            raise BenchError(f"{subject.name}: {told[name]} {name}, due: {count}")


def of_window(setting: Setting) -> dict[str, int]:
    return S200.options | {
        "window_ms": QUICK_WINDOW_MS if setting.quick else WINDOW_MS,
        "limit_ms": 60_000,
    }


def page(setting: Setting, rounds: int) -> dict[str, Any]:
    """CPU of a proxy of 64 instances with and without a page that asks it, by round."""
    options = of_window(setting)
    instances = [
        Instance(f"{role.value[0]}{n}", role, f"n{n}")
        for n in range(PAIRS)
        for role in (Role.PREFILL, Role.DECODE)
    ]
    rows, sizes = [], {}
    for number in range(rounds):
        with ExitStack() as stack:
            engines = stack.enter_context(setting.engines(instances))
            running = stack.enter_context(proxies.kvrs()(setting.bench(engines)))
            taken: dict[bool, list[Row]] = {True: [], False: []}
            order = (True, False, False, True) if number % 2 else (False, True, True, False)
            for is_asked in order:
                with ExitStack() as while_loaded:
                    if is_asked:
                        while_loaded.enter_context(
                            asking(running.admin_port, "/kvrs/v1/overview", ASKED_PER_S)
                        )
                    result = setting.load(running, options)
                if result["broken"]:
                    raise BenchError(f"a stream is not whole: {result['fault']}")
                taken[is_asked].append(figures(result))
            sizes = {
                "page_bytes": len(get(running.admin_port, "/ui")),
                "overview_bytes": len(get(running.admin_port, "/kvrs/v1/overview")),
            }
        quiet, asked = (
            fmean(row["cpu_s_per_million"] for row in taken[key]) for key in (False, True)
        )
        rows.append({"quiet": quiet, "asked": asked})
        print(f"round {number + 1}: {rows[-1]}", flush=True)
    return {"cpu_s_per_million": rows, "asked_per_s": ASKED_PER_S, **sizes}


def shown(found: Interval) -> str:
    half = "" if found.half_width is None else f" ± {found.half_width:.1%}"
    return f"{found.mean:+.1%}{half}"


def telemetry_text(found: dict[str, Any]) -> tuple[bool, str]:
    rows = found["cpu_s_per_million"]
    tokens = found["tokens"]
    lines = [
        f"200 streams x 20 tokens/s, {tokens} tokens each; {len(rows)} rounds, each subject twice "
        "in each; CPU seconds per million tokens",
        f"{'':10}{'CPU s/M':>10}{'added':>16}{'a request, us':>15}{'requests':>10}{'scrapes':>9}"
        f"{'lines':>9}{'spans':>9}",
    ]
    passed = False
    for name, told in found["seen"].items():
        mean = fmean(row[name] for row in rows)
        more = interval([row[name] / row[NONE.name] - 1 for row in rows])
        assert more is not None
        added_us = fmean(row[name] - row[NONE.name] for row in rows) * tokens
        added = "" if name == NONE.name else f"{shown(more):>16}{added_us:>15.0f}"
        counts = f"{told['requests']:>10}{told['scrapes']:>9}{told['lines']:>9}{told['spans']:>9}"
        lines.append(f"{name:10}{mean:>10.1f}{added:>31}{counts}")
        if name == ALL.name:
            passed = more.mean <= BAR_TELEMETRY
            verdict = f"metrics, logs and traces together: {shown(more)}; bar {BAR_TELEMETRY:.0%}"
    return passed, "\n".join([*lines, "", verdict, "PASSED" if passed else "FAILED"])


def page_text(found: dict[str, Any]) -> tuple[bool, str]:
    rows = found["cpu_s_per_million"]
    share = interval([(row["asked"] / row["quiet"] - 1) / found["asked_per_s"] for row in rows])
    assert share is not None
    passed = share.mean <= BAR_PAGE and found["page_bytes"] < MOST_PAGE_BYTES
    quiet, asked = (fmean(row[key] for row in rows) for key in ("quiet", "asked"))
    half = "" if share.half_width is None else f" ± {share.half_width:.2%}"
    return passed, "\n".join(
        [
            f"{2 * PAIRS} instances, {S200.title}; {len(rows)} rounds",
            f"CPU seconds per million tokens: {quiet:.1f}, and {asked:.1f} with "
            f"{found['asked_per_s']:g} requests a second for the overview",
            f"one request a second: {share.mean:.2%}{half} of the proxy's CPU; bar {BAR_PAGE:.0%}",
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
    rounds = arguments.rounds or (1 if arguments.quick else ROUNDS)
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
            if arguments.part == "page":
                found = page(setting, rounds)
                passed, text = page_text(found)
            else:
                subjects = (NONE, *(EACH if arguments.each else ()), ALL)
                found = telemetry(setting, rounds, subjects, arguments.tokens)
                passed, text = telemetry_text(found)
        except BenchError as error:
            sys.exit(str(error))
    print(text)
    name = "page" if arguments.part == "page" else "telemetry_cost"
    if name != "page" and arguments.tokens != TOKENS:
        name += f"_{arguments.tokens}"
    is_void = record.keep(arguments.out, name, found | {"passed": passed}, text)
    return 2 if is_void else 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
