"""An instance's ranks as one worker.

The process of the instance keeps scheduler, pages' book, text and ports, and computes nothing: it
sends each batch to all ranks and reads the logits. It owns the memory of their KV cells, and maps
it, so that pages are sent and received without a rank.
"""

import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvrs.config.engine import EngineSettings
from kvrs.elastic.layouts import Layout
from kvrs.elastic.shares import Share
from kvrs.engine.models.config import ModelConfig
from kvrs.engine.models.digests import Note, root_of
from kvrs.engine.models.weights import Weights
from kvrs.engine.ranks.cells import CellMap, WholePages
from kvrs.engine.ranks.exchange import Areas, FormationMemory
from kvrs.engine.ranks.futex import Life, check_futexes
from kvrs.engine.ranks.wire import (
    Answer,
    Join,
    Joined,
    Load,
    Loaded,
    RankGoneError,
    Receiver,
    Refused,
    batch_of,
    encode,
    send,
)
from kvrs.engine.worker import end_tokens_of, fingerprint_of, geometry_of
from kvrs.errors import ConfigError, KvrsError, RanksLostError
from kvrs.ids import NodeId
from kvrs.protocol.instance import LayoutInfo, RankInfo
from kvrs.scheduling.sequences import Chunk

_START_TIMEOUT_S = 600.0  # Of a rank that loads its weights.
# A batch that takes longer has a rank that hangs: so many times as long as predicted, but at least
# so long.
_HANG_FACTOR = 8.0
_HANG_S = 1.0
_UNPREDICTED_S = 60.0
_END_S = 1.0  # Until a rank that is told to end has ended.


def describe_ranks(group: "RankGroup", node: NodeId) -> tuple[list[RankInfo], LayoutInfo]:
    """The ranks as others see them; all are on one node."""
    layout = group.layout
    stages = [(stage.first, stage.last) for stage in layout.stages]
    ranks = []
    for rank, pid in group.pids.items():
        share = Share.of(layout, rank)
        stage = layout.stages.index(layout.stage_of(rank))
        heads = sorted({head for own in share.heads for head in own})
        ranks.append(RankInfo(rank, stage, pid, node, share.units, heads))
    return ranks, LayoutInfo(layout.number, stages)


@dataclass(frozen=True, slots=True)
class Shared:
    """Memory that processes share; it exists while one of them has it mapped or open."""

    descriptor: int
    memory: mmap.mmap

    @classmethod
    def make(cls, name: str, size_bytes: int) -> "Shared":
        """Raises KvrsError: there is not so much memory."""
        # Without this look the kernel would end processes, this or others, to find it.
        if size_bytes > (free_bytes := _free_bytes()):
            raise KvrsError(
                f"no room for {size_bytes} bytes of shared memory ({name}): {free_bytes} are free"
            )
        descriptor = os.memfd_create(name)
        try:
            # Reserved now: a page that is missing later would end the process that touches it.
            os.posix_fallocate(descriptor, 0, max(size_bytes, mmap.PAGESIZE))
            return cls(descriptor, mmap.mmap(descriptor, 0))
        except OSError as error:
            os.close(descriptor)
            raise KvrsError(
                f"no room for {size_bytes} bytes of shared memory ({name}): {error.strerror}"
            ) from None


def _free_bytes() -> int:
    """What the kernel can give without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return sys.maxsize  # A kernel that does not tell.


class _Seat:
    """A rank's process as the instance sees it."""

    def __init__(self, rank: int, life: Life, cells: Shared) -> None:
        self.rank, self.life, self.cells = rank, life, cells
        self.unit_bytes = 0
        self.pair, theirs = socket.socketpair()
        self.answers = Receiver(self.pair, Answer)
        with theirs:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "kvrs.engine.ranks.rank"),
                    *(str(theirs.fileno()), str(os.getpid())),
                ],
                pass_fds=[theirs.fileno()],
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
            )

    def order(self, frame: bytes, descriptors: Sequence[int]) -> None:
        """Raises RanksLostError: it has ended."""
        self.pair.settimeout(_START_TIMEOUT_S)
        try:
            send(self.pair, frame, descriptors)
        except RankGoneError as error:
            raise RanksLostError([self.rank], f"did not start: {error}") from None

    def answer(self) -> Loaded | Joined:
        """Raises: ConfigError: it refuses the configuration. RanksLostError: it has ended."""
        try:
            answer = self.answers.receive()
        except RankGoneError as error:
            raise RanksLostError([self.rank], f"did not start: {error}") from None
        if isinstance(answer, Refused):
            raise ConfigError(answer.faults)
        assert isinstance(answer, Loaded | Joined), "an answer to an order"
        return answer


class RankGroup:
    """The face of a `Worker`, over ranks. `execute` is called by one thread at a time."""

    def __init__(self, model_directory: Path, settings: EngineSettings, layout: Layout) -> None:
        """Start the ranks and wait until all can compute.

        Raises:
            ConfigError: directory or settings are wrong.
            KvrsError: there is not enough memory, a rank has ended, or the ranks differ.
        """
        check_futexes()
        if settings.device != "cpu":
            raise ConfigError(
                [
                    f"cluster.engine.device: got {settings.device!r}; allowed with several "
                    f"ranks: 'cpu'"
                ]
            )
        self.settings, self.layout = settings, layout
        self._config = ModelConfig.from_directory(model_directory)
        self.geometry = geometry_of(self._config, settings)
        self.vocab_size, self.eos_token_ids = self._config.vocab, end_tokens_of(self._config)
        self.max_positions = min(settings.max_model_len, self._config.max_positions)
        self.gpus: list[str] | None = []
        self.pool = WholePages(self.geometry, settings.pages)
        # Predicted seconds of a batch, once that is known.
        self.predict: Callable[[Sequence[Chunk]], float] | None = None
        self.on_loss: Callable[[RanksLostError], object] | None = (
            None  # Called from another thread.
        )
        self.lost: dict[int, float] = {}  # Ranks that have died, and when that was noticed.
        self.lost_devices: set[int] = set()  # Of them, those whose memory is gone as well.
        self._seats: dict[int, _Seat] = {}
        self._watchers: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._is_closing = False
        self._epoch, self._batch = 0, 0
        self._memory: FormationMemory | None = None
        try:
            self.fingerprint = self._start(model_directory)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> dict[int, int]:
        return {rank: seat.process.pid for rank, seat in self._seats.items()}

    @property
    def unit_bytes(self) -> dict[int, int]:
        """Resident bytes of units by rank."""
        return {rank: seat.unit_bytes for rank, seat in self._seats.items()}

    @property
    def worked_s(self) -> dict[int, float]:
        """Processor time that each rank has computed in this formation, modulo 71 minutes."""
        assert self._memory is not None, "the ranks compute"
        return {rank: line.worked_us.value / 1e6 for rank, line in self._memory.lines.items()}

    def execute(self, chunks: Sequence[Chunk]) -> Tensor:
        """As `Worker.execute`.

        Raises:
            RanksLostError: the batch is not computed; KV of its positions may be written in part.
        """
        assert chunks, "a batch has at least one chunk"
        assert self._memory is not None, "the ranks compute"
        self._check_lost()
        self._batch += 1
        frame = encode(batch_of(self._epoch, self._batch, chunks, self.geometry.page_size_tokens))
        limit_s = (
            _UNPREDICTED_S
            if self.predict is None
            else max(_HANG_S, _HANG_FACTOR * self.predict(chunks))
        )
        until_s = time.monotonic() + limit_s
        for seat in self._seats.values():
            seat.pair.settimeout(limit_s)
            try:
                send(seat.pair, frame)
            except RankGoneError:
                self._kill([seat.rank], "takes no orders")
        for line in self._memory.lines.values():
            line.done.wait(self._batch, lambda: self._look(until_s, limit_s))
        return self._memory.logits(sum(chunk.wants_logits for chunk in chunks)).clone()

    def lose_device(self, rank: int) -> None:
        """Kill a rank and drop the memory of its cells."""
        seat = self._seats[rank]
        seat.process.kill()
        self.lost_devices.add(rank)
        seat.cells.memory.madvise(mmap.MADV_REMOVE)

    def close(self) -> None:
        """End all ranks, however far they are."""
        self._is_closing = True
        if self._memory is not None:
            self._memory.end()
        for seat in self._seats.values():
            seat.pair.close()
        until_s = time.monotonic() + (0.0 if self.lost else _END_S)
        for seat in self._seats.values():
            try:
                seat.process.wait(max(0.0, until_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                seat.process.kill()
                seat.process.wait()
        for watcher in self._watchers:
            watcher.join(_END_S)

    def _start(self, directory: Path) -> str:
        """Raises ConfigError, KvrsError. Returns the fingerprint."""
        shares = {rank: Share.of(self.layout, rank) for rank in self.layout.ranks}
        cells = {rank: CellMap(share, self.geometry) for rank, share in shares.items()}
        lives = Shared.make("kvrs-lives", len(shares) * Life.BYTES)
        memories = {
            rank: Shared.make(f"kvrs-cells-{rank}", own.memory_bytes(self.pool.pages))
            for rank, own in cells.items()
        }
        for place, rank in enumerate(shares):
            life = Life(lives.memory, place * Life.BYTES)
            life.prepare()
            self._seats[rank] = _Seat(rank, life, memories[rank])
        answers = self._ask(
            {
                rank: Load(
                    rank,
                    place * Life.BYTES,
                    str(directory),
                    self.settings.model_dump(mode="json"),
                    self.layout,
                )
                for place, rank in enumerate(shares)
            },
            {rank: [lives.descriptor, memories[rank].descriptor] for rank in shares},
        )
        for rank, answer in answers.items():
            self._seats[rank].unit_bytes = answer.unit_bytes
            watcher = threading.Thread(
                target=self._watch, args=[self._seats[rank]], name=f"rank-{rank}", daemon=True
            )
            watcher.start()
            self._watchers.append(watcher)
        fingerprint = self._agreed(directory, answers)
        self.pool.attach(
            {
                rank: (own, torch.frombuffer(memories[rank].memory, dtype=torch.uint8))
                for rank, own in cells.items()
            }
        )
        self._form()
        return fingerprint

    def _form(self) -> None:
        """Let the ranks compute together, in memory of their own."""
        self._epoch += 1
        self._batch = 0
        areas = Areas.of(
            self.layout,
            hidden=self._config.hidden,
            vocabulary=self.vocab_size,
            batch_tokens=self.settings.max_batch_tokens,
        )
        shared = Shared.make("kvrs-formation", areas.size_bytes)
        order, descriptors = Join(self._epoch, self.layout), [shared.descriptor]
        self._memory = FormationMemory(shared.memory, areas)
        self._ask(dict.fromkeys(self._seats, order), dict.fromkeys(self._seats, descriptors))
        os.close(shared.descriptor)

    def _ask(
        self, orders: dict[int, Load] | dict[int, Join], descriptors: dict[int, list[int]]
    ) -> dict[int, Any]:
        """Send each rank its order, then take all answers."""
        for rank, order in orders.items():
            self._seats[rank].order(encode(order), descriptors[rank])
        return {rank: self._seats[rank].answer() for rank in orders}

    def _agreed(self, directory: Path, answers: dict[int, Loaded]) -> str:
        """The fingerprint, if all ranks have the same arithmetic and the same weights."""
        first, *others = answers
        for other in others:
            if answers[other].arithmetic != answers[first].arithmetic:
                raise KvrsError(
                    f"ranks {first} and {other} compute with different results; allowed: ranks "
                    f"of one arithmetic"
                )
        found: dict[str, bytes] = {}
        for rank, answer in answers.items():
            for name, leaf in answer.leaves.items():
                if found.setdefault(name, leaf) != leaf:
                    raise KvrsError(f"rank {rank} has read other weights than the others: {name}")
        note = Note(directory, Weights(directory).files)
        root = root_of(found, self._config.layers)
        if note.read() != root:
            note.write(root)
        return fingerprint_of(answers[first].arithmetic, root)

    def _watch(self, seat: _Seat) -> None:
        """On a thread of its own."""
        seat.life.await_end()
        self._note_lost(seat.rank)

    def _note_lost(self, rank: int) -> None:
        with self._lock:
            if self._is_closing or rank in self.lost:
                return
            self.lost[rank] = time.monotonic()
        if self._memory is not None:
            self._memory.end()
        if self.on_loss is not None:
            self.on_loss(RanksLostError([rank], "has died"))

    def _check_lost(self) -> None:
        if self.lost:
            raise RanksLostError(sorted(self.lost), "has died")

    def _look(self, until_s: float, limit_s: float) -> None:
        """While a batch is computed."""
        self._check_lost()
        for rank, seat in self._seats.items():
            if seat.process.poll() is not None:
                self._note_lost(rank)
                self._check_lost()
        if time.monotonic() > until_s:
            assert self._memory is not None, "the ranks compute"
            self._kill(
                self._memory.stuck(self._batch), f"has not computed a batch for {limit_s:.1f} s"
            )

    def _kill(self, ranks: Sequence[int], reason: str) -> None:
        """End ranks that hang, before anything else goes on."""
        for rank in ranks:
            self._seats[rank].process.send_signal(signal.SIGKILL)
        for rank in ranks:
            self._seats[rank].process.wait()
            self.lost.setdefault(rank, time.monotonic())
        if ranks:
            raise RanksLostError(ranks, reason)
