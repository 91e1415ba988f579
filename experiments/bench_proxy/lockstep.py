"""The CPU that proxies take for a token and for a request, counted in lockstep.

    python -m experiments.bench_proxy.lockstep [--reps 5] [--tree ../before] [--out DIR]

The engines send a token when the one before it has come out of the proxy, so that each costs
exactly one wake-up (or that of a group), whatever else the machine does. The proxy's own CPU clock
is read around it. On a busy machine all proxies grow dearer together: ratios within one run count.
Exit status 1: a bar is missed.
"""

import json
import os
import signal
import socket
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

from experiments.bench_proxy import proxies
from experiments.bench_proxy.engines import MODEL, PAIR, VLLM_PAIR, Engines, Instance
from experiments.bench_proxy.proxies import Running, Start
from experiments.bench_proxy.run import opened
from experiments.bench_proxy.steady import Cores, Setting
from experiments.bench_proxy.texts import TEXTS, Text, as_sections
from experiments.command_line import parser_of
from experiments.record import Record, commit_of

PEER = "vllm-router P/D"
PROSE = TEXTS[0]
GROUPS = (1, 4, 20)  # Tokens of as many streams in one wake-up.
WARM_REQUESTS = 200
WARM_ROUNDS = 4
SHORT_TOKENS = 4  # Of a request that is measured itself.
BACKGROUND_S = 3.0
_PROMPT = "".join(" " if n % 6 == 5 else chr(97 + n % 23) for n in range(256))
_EVENT = b"data: {"
_END = b"0\r\n\r\n"
_SETTLE_S = 0.3
_AFTERWARDS_S = 0.002  # What a proxy does when the client has its answer belongs to the request.

Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Load:
    """A load of the bench, of which a token's CPU is put together from the counts."""

    title: str
    group: int
    tokens: int  # Of a request.
    tokens_per_s: int
    most: float  # The bar: beside vllm-router P/D.


LOADS = {
    "s200": Load("200 x 20/s", 1, 60, 4_000, 1.05),
    "s256": Load("256 x 200/s", 20, 300, 51_200, 0.85),
}
MOST_TO_FIRST = 0.90
MOST_BACKGROUND_MS = 1.5


class Client:
    """One connection of a client, with one stream at a time."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.rest = b""  # Received, and not read as a token.
        self._first = 1  # Events of the first token; a chat opens with one more.

    def close(self) -> None:
        self._socket.close()

    def ask(self, tokens: int, text: Text) -> None:
        section = TEXTS.index(text) + 1
        fields: dict[str, Any] = {"prompt": _PROMPT}
        if text.is_chat:
            fields = {"messages": [{"role": "user", "content": _PROMPT}]}
        fields |= {"model": MODEL, "max_tokens": tokens, "temperature": 0, "stream": True}
        body = json.dumps(fields | {"user": f"-1,1,0,0,{section}"}).encode()
        path = "/v1/chat/completions" if text.is_chat else "/v1/completions"
        head = (
            f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        self._first = 2 if text.is_chat else 1
        self._socket.sendall(head.encode() + body)

    def read_token(self) -> None:
        """Wait for the event of one token."""
        wanted, self._first = self._first, 1
        self._read_until(lambda: self.rest.count(_EVENT) >= wanted)
        for _ in range(wanted):
            self.rest = self.rest.partition(_EVENT)[2]

    def read_end(self) -> None:
        self._read_until(lambda: self.rest.endswith(_END))
        self.rest = b""

    def _read_until(self, has_come: Callable[[], bool]) -> None:
        while not has_come():
            data = self._socket.recv(1 << 16)
            if not data:
                raise RuntimeError(f"closed behind {self.rest[-300:]!r}")
            self.rest += data


@dataclass(slots=True)
class Subject:
    """One proxy that runs, and the engines behind it."""

    name: str
    engines: Engines
    running: Running
    pids: Sequence[int]

    def cpu_s(self) -> float:
        # The CPU clock of another process, as clock_getcpuclockid(3) names it.
        return sum(time.clock_gettime((~pid << 3) | 2) for pid in self.pids)

    def begin(self, clients: Sequence[Client], tokens: int, text: Text) -> None:
        """A stream for each client, up to the decode call."""
        for number, client in enumerate(clients, 1):
            client.ask(tokens, text)
            self.engines.order("wait 1 0")
            # The one answer has waited for the shortest time, so the others take a turn.
            self.engines.order("answer 1")
            self.engines.order(f"wait 0 {number}")

    def step(self, clients: Sequence[Client]) -> None:
        """The next token of these streams, which have waited for longest."""
        self.engines.order(f"step {len(clients)}")
        for client in clients:
            client.read_token()

    def cpu_us(self, work: Callable[[], None]) -> float:
        begun = self.cpu_s()
        work()
        return (self.cpu_s() - begun) * 1e6


@dataclass(frozen=True, slots=True)
class Sizes:
    streams: int
    rounds: int
    requests: int


def measure_background(subjects: Sequence[Subject]) -> list[Figures]:
    begun, begun_s = [subject.cpu_s() for subject in subjects], time.monotonic()
    time.sleep(BACKGROUND_S)
    wall_s = time.monotonic() - begun_s
    return [
        {"background ms/s": (subject.cpu_s() - before) / wall_s * 1e3}
        for subject, before in zip(subjects, begun, strict=True)
    ]


def measure_tokens(subjects: Sequence[Subject], text: Text, sizes: Sizes) -> list[Figures]:
    """Microseconds of a token alone in its wake-up, and of one in a group: medians over rounds, in
    which the subjects take turns. A report that comes in between is thus left out.
    """
    opened: list[tuple[Subject, list[Client]]] = []
    rounds = WARM_ROUNDS + sizes.rounds * len(GROUPS)
    for subject in subjects:
        clients = [Client(subject.running.port) for _ in range(sizes.streams)]
        subject.begin(clients, rounds + 1, text)
        opened.append((subject, clients))
    found: list[Figures] = [{} for _ in opened]
    for number, group in enumerate(GROUPS):
        spent: list[list[float]] = [[] for _ in opened]
        for turn in range(sizes.rounds + (0 if number else WARM_ROUNDS)):
            for used, (subject, clients) in zip(spent, opened, strict=True):
                us = subject.cpu_us(partial(_round, subject, clients, group))
                if number or turn >= WARM_ROUNDS:
                    used.append(us / len(clients))
        for figures, used in zip(found, spent, strict=True):
            figures[f"token, {text.name}, {group}"] = statistics.median(used)
    for subject, clients in opened:
        subject.step(clients)
        for client in clients:
            client.read_end()
            client.close()
    time.sleep(_SETTLE_S)
    return found


def _round(subject: Subject, clients: Sequence[Client], group: int) -> None:
    """A token of each stream, of so many at a time."""
    for first in range(0, len(clients), group):
        subject.step(clients[first : first + group])


def measure_requests(subjects: Sequence[Subject], count: int) -> list[Figures]:
    """Microseconds of a request, and those up to its first token: medians."""
    clients = [Client(subject.running.port) for subject in subjects]
    to_first: list[list[float]] = [[] for _ in subjects]
    whole: list[list[float]] = [[] for _ in subjects]
    for _ in range(count):
        for n, (subject, client) in enumerate(zip(subjects, clients, strict=True)):
            first_us = subject.cpu_us(partial(_first_token, subject, client))
            to_first[n].append(first_us)
            whole[n].append(first_us + subject.cpu_us(partial(_other_tokens, subject, client)))
    for client in clients:
        client.close()
    return [
        {
            "to the first token": statistics.median(first),
            f"request of {SHORT_TOKENS}": statistics.median(all_of_it),
        }
        for first, all_of_it in zip(to_first, whole, strict=True)
    ]


def _first_token(subject: Subject, client: Client) -> None:
    subject.begin([client], SHORT_TOKENS, PROSE)
    subject.step([client])


def _other_tokens(subject: Subject, client: Client) -> None:
    for _ in range(SHORT_TOKENS - 1):
        subject.step([client])
    client.read_end()
    time.sleep(_AFTERWARDS_S)


def put_together(found: Figures) -> Figures:
    """A token's CPU under the loads of the bench, from its parts."""
    alone = found[f"token, {PROSE.name}, 1"]
    request = max(0.0, found[f"request of {SHORT_TOKENS}"] - SHORT_TOKENS * alone)
    return {
        load.title: found[f"token, {PROSE.name}, {load.group}"]
        + request / load.tokens
        + found["background ms/s"] * 1e3 / load.tokens_per_s
        for load in LOADS.values()
    }


@dataclass(slots=True)
class Lockstep:
    """All subjects, which take turns, and what was found of each in each repetition."""

    subjects: Sequence[Subject]
    sizes: Sizes
    texts: Sequence[Text]
    found: dict[str, list[Figures]] = field(default_factory=dict)

    def run(self, reps: int) -> Self:
        measure_requests(self.subjects, WARM_REQUESTS)
        for rep in range(reps):
            shift = rep % len(self.subjects)
            subjects = [*self.subjects[shift:], *self.subjects[:shift]]
            parts = [
                measure_background(subjects),
                measure_requests(subjects, self.sizes.requests),
                *(measure_tokens(subjects, text, self.sizes) for text in self.texts),
            ]
            for subject, *figures in zip(subjects, *parts, strict=True):
                joined = {name: value for each in figures for name, value in each.items()}
                rows = self.found.setdefault(subject.name, [])
                rows.append(joined | put_together(joined))
            print(f"repetition {rep + 1} of {reps}", flush=True)
        return self


def ratios(found: Mapping[str, Sequence[Figures]], name: str, what: str) -> list[float]:
    """The ratio to the peer in each repetition."""
    pairs = zip(found[name], found.get(PEER, []), strict=False)
    return [mine[what] / theirs[what] for mine, theirs in pairs if theirs[what] > 0]


def judged(found: Mapping[str, Sequence[Figures]]) -> list[dict[str, Any]]:
    """The bars, of each kvrs: medians."""
    rows: list[dict[str, Any]] = []
    limits = {load.title: load.most for load in LOADS.values()}
    limits["to the first token"] = MOST_TO_FIRST
    for name in found:
        if not name.startswith("kvrs"):
            continue
        for what, most in limits.items():
            if measured := ratios(found, name, what):
                rows.append(_bar(name, f"{what}, of {PEER}", statistics.median(measured), most))
        background = statistics.median(each["background ms/s"] for each in found[name])
        rows.append(_bar(name, "background ms/s", background, MOST_BACKGROUND_MS))
    return rows


def _bar(name: str, what: str, value: float, most: float) -> dict[str, Any]:
    return {"subject": name, "what": what, "value": value, "at_most": most, "met": value <= most}


def as_text(found: Mapping[str, Sequence[Figures]]) -> str:
    names = list(found)
    width = max(26, *(len(name) + 2 for name in names))
    lines = [
        "CPU of the proxy, us: medians; in brackets the ratio to vllm-router P/D in the same",
        "repetition, median and range. A token's second name is its text, the number how many",
        "streams' tokens come in one wake-up.",
        f"{'':<26}" + "".join(f"{name:>{width}}" for name in names),
    ]
    for what in found[names[0]][0]:
        cells = ""
        for name in names:
            cell = f"{statistics.median(each[what] for each in found[name]):.1f}"
            if name != PEER and (measured := ratios(found, name, what)) and "ms/s" not in what:
                middle = statistics.median(measured)
                cell += f" ({middle:.2f}, {min(measured):.2f}-{max(measured):.2f})"
            cells += f"{cell:>{width}}"
        lines.append(f"{what:<26}{cells}")
    lines.append("")
    for row in judged(found):
        verdict = "met" if row["met"] else "missed"
        lines.append(
            f"{row['subject']:<20}{row['what']:<44}{row['value']:>8.2f} <= {row['at_most']:<6g}"
            f"{verdict}"
        )
    return "\n".join(lines)


def starts_of(trees: Sequence[Path]) -> dict[str, tuple[Sequence[Instance], Start]]:
    """Every kvrs is driven with both protocols."""
    made: dict[str, tuple[Sequence[Instance], Start]] = {
        PEER: (VLLM_PAIR, proxies.router(disaggregated=True))
    }
    for tree in (proxies.HERE, *trees):
        name = "kvrs" if tree == proxies.HERE else f"kvrs of {tree.name}"
        made[f"{name}, vLLM"] = (VLLM_PAIR, proxies.kvrs(tree))
        made[name] = (PAIR, proxies.kvrs(tree))
    return made


def main() -> int:
    parser = parser_of(__doc__, seed=0)
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--streams", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=10, help="tokens of each stream and group")
    parser.add_argument("--requests", type=int, default=150)
    parser.add_argument("--subjects", help="names of these only, separated by ;")
    parser.add_argument("--texts", help=f"of {','.join(text.name for text in TEXTS)}; default all")
    parser.add_argument("--tree", type=Path, action="append", default=[], help="another checkout")
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kvrs-bench"
    parser.add_argument("--peers", type=Path, default=cache, help="where peers are installed")
    options = parser.parse_args()
    options.quick = False
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # Ends what was started.
    starts = starts_of([tree.resolve() for tree in options.tree])
    if options.subjects is not None:
        starts = {name: starts[name] for name in options.subjects.split(";")}
    texts = [each for each in TEXTS if options.texts is None or each.name in options.texts]
    cores = sorted(os.sched_getaffinity(0))
    placed = Cores(cores[0], cores[1]) if len(cores) > 1 else Cores(None, None)
    if placed.mocks is not None:
        os.sched_setaffinity(0, {placed.mocks})
    # Of ratios within one run: what else the machine does is told beside them.
    record = Record(options.seed, timed=False)
    with opened(options, placed) as setting, ExitStack() as stack:
        subjects = [
            _started(stack, setting, name, instances, start)
            for name, (instances, start) in starts.items()
        ]
        sizes = Sizes(options.streams, options.rounds, options.requests)
        found = Lockstep(subjects, sizes, texts).run(options.reps).found
    text = as_text(found)
    print(text)
    figures = {
        "trees": {tree.name: commit_of(tree) for tree in options.tree},
        "bars": judged(found),
        "found": found,
    }
    record.keep(options.out, "lockstep", figures, text)
    return 0 if all(row["met"] for row in judged(found)) else 1


def _started(
    stack: ExitStack, setting: Setting, name: str, instances: Sequence[Instance], start: Start
) -> Subject:
    texts = setting.directory / "texts"
    texts.write_text(as_sections())
    engines = stack.enter_context(
        Engines(setting.programs, instances, setting.cores.mocks, texts=texts)
    )
    running = stack.enter_context(start(setting.bench(engines)))
    return Subject(name, engines, running, running.pids)


if __name__ == "__main__":
    sys.exit(main())
