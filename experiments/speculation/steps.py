"""CPU time that one step of an instance takes: with drafts that all come too late, and with a
source of drafts that is silent, beside none.

    python -m experiments.speculation.steps [--pairs 8]

The instance is real, in a process of its own, which measures itself from step to step. This process
is its client, and plays a helper whose drafts are one token late, and wrong. Kinds of runs
alternate in one process, since no two are alike. CPU time is less disturbed by other processes than
elapsed time, which is shown beside it.
"""

import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import msgspec

from experiments.command_line import parser_of
from experiments.record import Record
from experiments.rig import VOCAB_SIZE
from experiments.speculation.gain import compared, in_turns
from kvrs.config.file import Config, parse_config
from kvrs.ids import InstanceId
from kvrs.protocol.instance import (
    EPOCHS_PER_START,
    Burst,
    DraftOffer,
    LoadReport,
    MirrorUpdate,
    SpeculationReport,
)
from kvrs.protocol.secrets import Scope, scoped_key
from kvrs_engine.engine.hooks import Batch, StepHook
from kvrs_engine.engine.instance import EngineInstance
from kvrs_engine.engine.server import serve_http
from kvrs_engine.engine.speculation.paired import vocabulary_digest
from kvrs_engine.engine.speculation.pairs import write_pair
from kvrs_testkit.free_ports import free_ports
from kvrs_testkit.ports import client_of

NAME, HELPER = InstanceId("d0"), InstanceId("d1")
SECRET = b"a secret of this experiment alone"
ACCEPTANCE, DEPTH, LAYERS = 0.6, 4, 24
STREAMS, TOKENS = 8, 400
MAX_STALE, MAX_HEALTHY = 1.05, 0.005
CALM, STALE, WITHOUT = "calm", "stale", "without"
Step = tuple[float, float]  # CPU seconds of the process, and elapsed ones.


class StepTimes(StepHook):
    """The time from one step to the next, where all streams decode in both."""

    def __init__(self) -> None:
        self._found: list[Step] = []
        self._last: Step | None = None

    async def after_logits(self, batch: Batch, took_s: float) -> None:
        now = time.process_time(), time.perf_counter()
        decodes = sum(len(chunk.token_ids) - chunk.drafts == 1 for _, chunk in batch)
        if decodes < STREAMS:
            self._last = None
            return
        if self._last is not None:
            self._found.append((now[0] - self._last[0], now[1] - self._last[1]))
        self._last = now

    def take(self) -> list[Step]:
        found, self._found = self._found, []
        return found


def config_of(models: Path) -> Config:
    port, page_port = free_ports(2)
    instance = {"id": NAME, "role": "both", "port": port, "page_port": page_port}
    return parse_config(
        {
            "cluster": {
                "model": str(models / "target"),
                "engine": {"pages": 1024},
                "nodes": [{"id": "n0", "instances": [instance]}],
            },
            "speculation": {"source": "draft", "draft": str(models / "draft"), "depth": DEPTH},
        }
    )


async def _serve(config: Config, orders: Connection) -> None:
    """Until the other end closes; each order begins a kind of run, or asks for what it took."""
    instance, steps = EngineInstance(config, NAME, EPOCHS_PER_START, SECRET), StepTimes()
    core, drafts = instance.core, instance.drafts
    assert drafts is not None
    core.hooks.append(steps)
    came: asyncio.Queue[str | None] = asyncio.Queue()

    def receive() -> None:
        try:
            came.put_nowait(orders.recv())
        except EOFError:
            came.put_nowait(None)

    async with serve_http(instance, allow_faults=False):
        orders.send(vocabulary_digest(instance.vocabulary))
        asyncio.get_running_loop().add_reader(orders.fileno(), receive)
        while (kind := await came.get()) is not None:
            if kind in (CALM, STALE, WITHOUT):
                core._drafts = None if kind == WITHOUT else drafts
                core.hooks[:] = [one for one in core.hooks if one is not drafts]
                core.hooks += [] if kind == WITHOUT else [drafts]
            orders.send(steps.take())


def _serving(config: Config, orders: Connection) -> None:
    asyncio.run(_serve(config, orders))


class MeasuredInstance:
    """The instance that is measured, from outside."""

    def __init__(self, client: aiohttp.ClientSession, orders: Connection, digest: str) -> None:
        self._client, self._orders, self._digest = client, orders, digest
        self._random = Random(0)

    async def report(self) -> SpeculationReport:
        async with self._client.get("/kvrs/v1/load") as answer:
            found = msgspec.json.decode(await answer.read(), type=LoadReport).speculation
        assert found is not None
        return found

    async def steps(self, kind: str) -> list[Step]:
        """Those of one run."""
        self._order(kind)
        async with self._stale_helper() if kind == STALE else nullcontext():
            await asyncio.gather(*(self._stream() for _ in range(STREAMS)))
        return self._order("take")

    def _order(self, kind: str) -> list[Step]:
        self._orders.send(kind)
        found: list[Step] = self._orders.recv()
        return found

    async def _stream(self) -> None:
        prompt = [self._random.randrange(4, VOCAB_SIZE) for _ in range(24)]
        body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        async with self._client.post("/v1/completions", json=body | {"stream": True}) as answer:
            answer.raise_for_status()
            async for _ in answer.content.iter_any():
                pass

    @asynccontextmanager
    async def _stale_helper(self) -> AsyncIterator[None]:
        async with self._client.ws_connect("/kvrs/v1/drafts") as socket:
            await socket.send_bytes(msgspec.msgpack.encode(DraftOffer(HELPER, self._digest)))
            helping = asyncio.create_task(_send_stale(socket))
            await self._until_helped(True)
            yield
            helping.cancel()
        await self._until_helped(False)

    async def _until_helped(self, helped: bool) -> None:
        while ((await self.report()).helper is not None) is not helped:
            await asyncio.sleep(0.02)


async def _send_stale(socket: aiohttp.ClientWebSocketResponse) -> None:
    """Drafts that begin at the last token that is known, and are not that one."""
    known: dict[int, list[int]] = {}
    async for message in socket:
        bursts = []
        for update in msgspec.msgpack.decode(message.data, type=list[MirrorUpdate]):
            if not update.token_ids:
                known.pop(update.number, None)
                continue
            ids = known.setdefault(update.number, [])
            ids += update.token_ids
            wrong = [(ids[-1] + 1) % VOCAB_SIZE] * DEPTH
            bursts.append(Burst(update.number, len(ids) - 1, wrong, begins_anew=True))
        if bursts:
            await socket.send_bytes(msgspec.msgpack.encode(bursts))


@contextmanager
def asked_of(config: Config) -> Iterator[tuple[Connection, str]]:
    """An instance in a process of its own: what orders it, and the digest of its vocabulary."""
    context = get_context("spawn")
    orders, other = context.Pipe()
    process = context.Process(target=_serving, args=(config, other), daemon=True)
    process.start()
    other.close()
    try:
        yield orders, orders.recv()
    finally:
        orders.close()
        process.join()


def p99(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]


def row_of(
    what: str,
    runs: tuple[list[list[Step]], list[list[Step]]],
    part: int,
    figure: Callable[[list[float]], float],
) -> dict[str, Any]:
    """The second kind of runs by the first, in milliseconds."""
    one, other = ([figure([step[part] for step in run]) * 1e3 for run in kind] for kind in runs)
    return compared(what, one, other) | {"steps": sum(map(len, runs[1]))}


async def measure(models: Path, pairs: int) -> tuple[list[dict[str, Any]], SpeculationReport]:
    config = config_of(models)
    ((_, settings),) = config.cluster.instances()
    with asked_of(config) as (orders, digest):
        url, key = config.url_of(settings), scoped_key(SECRET, Scope.INSTANCE, NAME)
        async with client_of(url, key) as client:
            asked = MeasuredInstance(client, orders, digest)
            await asked.steps(CALM)
            late = await in_turns(pairs, partial(asked.steps, CALM), partial(asked.steps, STALE))
            report = await asked.report()
            none = await in_turns(pairs, partial(asked.steps, WITHOUT), partial(asked.steps, CALM))
    rows = [
        row_of(f"{name}, {kind} of {measure_} ms", runs, part, figure)
        for name, runs in (("all drafts stale", late), ("a silent source", none))
        for part, measure_ in enumerate(("CPU", "elapsed"))
        for kind, figure in (("p99", p99), ("mean", statistics.fmean))
    ]
    return rows, report


def as_text(rows: list[dict[str, Any]], report: SpeculationReport) -> str:
    lines = [
        f"a step of {STREAMS} streams, target of {LAYERS} layers",
        f"{'':44}{'without':>9}{'with':>9}{'ratio':>18}{'pairs':>6}{'steps':>7}",
    ]
    lines += [
        f"{row['what']:44}{row['without']:9.2f}{row['with']:9.2f}{row['ratio']:10.3f} ± "
        f"{row['interval']:.3f}{row['pairs']:6}{row['steps']:7}"
        for row in rows
    ]
    lines.append(f"stale drafts: {report.stale} came, {report.proposed} were proposed")
    return "\n".join(lines) + "\n"


def faults_of(rows: list[dict[str, Any]], report: SpeculationReport) -> list[str]:
    """The parts of the claim that the result does not bear out."""
    stale, silent = rows[0], rows[5]
    faults = []
    if stale["ratio"] > MAX_STALE:
        faults.append(f"stale drafts: {stale['ratio']:.3f} x")
    if report.proposed:
        faults.append("not every draft was stale")
    if abs(silent["ratio"] - 1) > MAX_HEALTHY:
        faults.append(f"a silent source: {silent['ratio']:.3f} x")
    return faults


def main() -> int:
    parser = parser_of(__doc__, __file__, seed=0)
    parser.add_argument("--pairs", type=int, default=8)
    options = parser.parse_args()
    record = Record(options.seed, timed=False)
    with tempfile.TemporaryDirectory() as directory:
        write_pair(Path(directory), ACCEPTANCE, options.seed, LAYERS)
        rows, report = asyncio.run(measure(Path(directory), options.pairs))
    faults = faults_of(rows, report)
    text = as_text(rows, report) + "\n".join(faults or ["PASSED"]) + "\n"
    print(text, end="")
    record.keep(
        options.out, "steps", {"rows": rows, "stale": report.stale, "seed": options.seed}, text
    )
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
