"""Bytes of a broken engine, and many streams that are left at once: how long the streams of another
engine stand still.

    python -m experiments.hostile_engine.run
"""

import http.client
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from experiments.command_line import parser_of
from experiments.hostile_engine import gate
from experiments.record import Record
from kvrs.net.admin import AdminClient, AdminError
from kvrs_testkit.free_ports import free_ports

BAR_S = 0.1
BYSTANDERS = 4
RECORDS = 160  # Of about 1 MB.
_PACE_S = 0.01
_TOKENS = 100_000  # More than a bystander gets until it is closed.
_CALM_S = 5.0
_BEHIND_S = 3.0  # From the end of the broken answer.
_PACKED_S = 14.0  # Records are packed 5 s after their clients have left; then this is over.
_WITHIN_S = 120.0
_LOOK_AGAIN_S = 0.1


class Row(NamedTuple):
    name: str
    sent_mb: float
    calm_gap_s: float
    longest_gap_s: float
    cpu_s: float
    seconds: float


class Stream:
    """A stream of a client, read in a thread, with the times of its events."""

    def __init__(self, port: int, prompt: list[int], key: str | None = None) -> None:
        self.events_s = list[float]()
        self.read_bytes = 0
        self.is_over = False
        self._port, self._key = port, key
        self._body = {"prompt": prompt, "max_tokens": _TOKENS, "stream": True, "temperature": 0}
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_WITHIN_S)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        headers = {"Content-Type": "application/json"}
        if self._key is not None:
            headers["Idempotency-Key"] = self._key
        with suppress(OSError, http.client.HTTPException, ValueError, AttributeError):
            body = json.dumps(self._body)
            self._connection.request("POST", "/v1/completions", body, headers)
            answer = self._connection.getresponse()
            while data := answer.read1(1 << 16):
                self.read_bytes += len(data)
                if b"data: " in data:
                    self.events_s.append(time.monotonic())
        self.is_over = True

    def gap_s(self, since_s: float, until_s: float) -> float:
        """The longest time without an event."""
        times = [since_s, *(at for at in self.events_s if since_s < at < until_s), until_s]
        return max(after - before for before, after in pairwise(times))

    def close(self) -> None:
        if (sock := self._connection.sock) is not None:
            with suppress(OSError):
                sock.shutdown(2)
        self._thread.join(_WITHIN_S)
        self._connection.close()


class Rig:
    """A proxy before p0, d0, and d1 with the gate before it."""

    def __init__(self, stack: ExitStack) -> None:
        urls = {}
        for name in ("p0", "d0", "d1"):
            role = "prefill" if name == "p0" else "decode"
            words = ["kvrs_testkit.vllm_process", name, "n0", role, str(_PACE_S)]
            urls[name] = int(_line(_started(stack, words)))
        # Streams of records are of both engines; d1 alone is a broken one.
        kinds = [str(kind) for kind in range(len(gate.KINDS))]
        for name, broken in (("d0", kinds[-1:]), ("d1", kinds)):
            words = ["experiments.hostile_engine.gate", str(urls[name]), *broken]
            self.gate = _started(stack, words)
            urls[name] = int(_line(self.gate))
        self.port, admin_port = free_ports(2)
        self.admin = AdminClient(f"http://127.0.0.1:{admin_port}")
        servers = [
            part
            for name, port in urls.items()
            for part in ("--prefill" if name == "p0" else "--decode", f"http://127.0.0.1:{port}")
        ]
        ports = ["--port", str(self.port), "--admin-port", str(admin_port)]
        command = [sys.executable, "-m", "kvrs", "proxy", *servers, *ports]
        environ = {n: v for n, v in os.environ.items() if not n.startswith("KVRS_C")}
        self.proxy = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environ
        )
        stack.callback(self.proxy.wait)
        stack.callback(self.proxy.terminate)
        self.until(self.is_ready, "the proxy and its servers are up")

    def until(self, holds: Callable[[], bool], what: str) -> None:
        until_s = time.monotonic() + _WITHIN_S
        while not holds():
            if time.monotonic() > until_s:
                raise TimeoutError(f"not within {_WITHIN_S} s: {what}")
            time.sleep(_LOOK_AGAIN_S)

    def is_ready(self) -> bool:
        with suppress(AdminError):
            rows = self.admin.state()["instances"]
            tested = [row for row in rows if (row["self_test"] or {}).get("done")]
            return len(tested) == len(rows) and all(row["health"] == "up" for row in rows)
        return False

    def cpu_s(self) -> float:
        with open(f"/proc/{self.proxy.pid}/stat") as file:
            fields = file.read().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def streams(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.admin.state()["streams"]
        return found

    @contextmanager
    def bystanders(self) -> Iterator[list[Stream]]:
        """Streams that run at d0."""
        found, others = list[Stream](), list[Stream]()
        try:
            while len(found) < BYSTANDERS:
                known = {row["id"] for row in self.streams()}
                stream = Stream(self.port, [7, 8, 9 + len(found)])
                self.until(partial(_has_tokens, stream), "a bystander's tokens")
                (row,) = [row for row in self.streams() if row["id"] not in known]
                (found if row["decode"] == "d0" else others).append(stream)
            yield found
        finally:
            for stream in (*found, *others):
                stream.close()


def _has_tokens(stream: Stream) -> bool:
    return len(stream.events_s) > 5


def _started(stack: ExitStack, words: list[str]) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", *words]
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def broken_answer(rig: Rig, kind: int) -> Row:
    """Measure the bystanders while d1 gives one broken answer."""
    answers = list[str]()

    def listen() -> None:
        answers.append(_line(rig.gate))

    rig.until(rig.is_ready, "d1 is up again")
    with rig.bystanders() as bystanders:
        listening = threading.Thread(target=listen, daemon=True)
        listening.start()
        calm_s = time.monotonic()
        time.sleep(_CALM_S)
        begun_s, cpu_s = time.monotonic(), rig.cpu_s()
        asked = list[Stream]()
        while not answers and time.monotonic() < begun_s + _WITHIN_S:
            if len(asked) < 8:  # Some go to d0, which serves them.
                asked.append(Stream(rig.port, [*gate.MARK, kind]))
            listening.join(1.0)
        time.sleep(_BEHIND_S)
        over_s = time.monotonic()
        row = Row(
            gate.KINDS[kind].__name__,
            int(answers[0].split()[1]) / 1e6 if answers else 0.0,
            max(each.gap_s(calm_s, begun_s) for each in bystanders),
            max(each.gap_s(begun_s, over_s) for each in bystanders),
            rig.cpu_s() - cpu_s,
            over_s - begun_s,
        )
        for stream in asked:
            stream.close()
    return row


def left_at_once(rig: Rig) -> Row:
    """Measure the bystanders from the moment at which the clients of many streams leave."""
    kind = gate.KINDS.index(gate.record)
    rig.until(rig.is_ready, "d1 is up again")
    with rig.bystanders() as bystanders:
        streams, wanted_bytes = list[Stream](), gate.RECORD_EVENTS * 250
        for number in range(RECORDS):
            streams.append(Stream(rig.port, [*gate.MARK, kind, number], f"key-{number}"))
            if number % 8 == 7:
                rig.until(
                    lambda: all(each.read_bytes > wanted_bytes or each.is_over for each in streams),
                    "the events of streams",
                )
        calm_s = time.monotonic()
        time.sleep(_CALM_S)
        read_bytes = sum(each.read_bytes for each in streams)
        begun_s, cpu_s = time.monotonic(), rig.cpu_s()
        for stream in streams:
            stream.close()
        time.sleep(_PACKED_S)
        over_s = time.monotonic()
        return Row(
            "records",
            read_bytes / 1e6,
            max(each.gap_s(calm_s, begun_s) for each in bystanders),
            max(each.gap_s(begun_s, over_s) for each in bystanders),
            rig.cpu_s() - cpu_s,
            over_s - begun_s,
        )


def as_text(rows: list[Row]) -> str:
    table = Table("what", "MB", "calm gap ms", "longest gap ms", "proxy's CPU s", "in s")
    for row in rows:
        gaps = f"{row.calm_gap_s * 1e3:.0f}", f"{row.longest_gap_s * 1e3:.0f}"
        table.add_row(
            row.name, f"{row.sent_mb:.1f}", *gaps, f"{row.cpu_s:.2f}", f"{row.seconds:.1f}"
        )
    console = Console(width=96)
    with console.capture() as captured:
        console.print(table)
    return captured.get() + f"bar: no gap of more than {BAR_S * 1e3:.0f} ms"


def main() -> int:
    options = parser_of(__doc__, __file__).parse_args()
    record = Record()
    with ExitStack() as stack:
        rig = Rig(stack)
        rows = [broken_answer(rig, kind) for kind in range(len(gate.KINDS) - 1)]
        rows.append(left_at_once(rig))
    text = as_text(rows)
    print(text)
    figures = {"rows": [row._asdict() for row in rows], "bar_s": BAR_S}
    is_void = record.keep(options.out, "hostile_engine", figures, text)
    return 0 if all(row.longest_gap_s <= BAR_S for row in rows) and not is_void else 1


if __name__ == "__main__":
    sys.exit(main())
