"""The limits of one GPU and its host for the recovery plane: floors, copies between rows of host
memory and KV blocks, lanes of loopback, rows of another process, and what a decoding GPU feels.

    python -m experiments.gpu.plane                    # under 8 minutes on one GPU
    python -m experiments.gpu.plane --rows 8 --out DIR # anywhere: checks the copies

By default rows of Llama-3.1-8B in blocks of 16 tokens: 500 rows of 2 MiB, 8,000 tokens. Each line
of the table has what was predicted before any GPU was at hand. Without a GPU copies are made by
`memmove`, and the result is void.
"""

import os
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import blake2b
from itertools import pairwise
from mmap import mmap
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from experiments.command_line import parser_of
from experiments.gpu import copies, region
from experiments.gpu.copies import Blocks, Copy
from experiments.record import Record

LAYERS, BLOCK_BYTES, TP = 32, 65_536, 8
_ROUNDS = 5
_CUDA: Any = torch.cuda  # Parts of it have no types.
_LANES = (1, 4, 8)


@dataclass(frozen=True, slots=True)
class Row:
    what: str
    unit: str
    value: float
    predicted: str = ""


class Machine:
    """One GPU with blocks, and rows in a region that another process could have left."""

    def __init__(self, rows: int, seed: int) -> None:
        self.is_gpu = torch.cuda.is_available()
        self.device = "cuda" if self.is_gpu else "cpu"
        self.blocks = Blocks(LAYERS, BLOCK_BYTES, rows, self.device)
        self.rows = np.arange(rows, dtype=np.int64)
        self.size_bytes = rows * self.blocks.row_bytes
        self.fd, self.memory = region.filled(self.size_bytes, seed)
        self.address = _address(self.memory)
        self.stream = _CUDA.Stream() if self.is_gpu else None
        self.register_s = self._register(self.address)

    def _register(self, address: int) -> float:
        begun_s = time.perf_counter()
        if self.is_gpu:
            copies.register(address, self.size_bytes)
        return time.perf_counter() - begun_s

    def private_rows(self) -> mmap:
        """Registered memory of this process: the rows of the engine that loads."""
        memory = mmap(-1, self.size_bytes)
        memory.write(b"\0" * self.size_bytes)
        self._register(_address(memory))
        return memory

    def copier(self, *, any_order: bool = True) -> Copy:
        return (
            copies.by_batch(self.stream, any_order=any_order) if self.is_gpu else copies.by_memmove
        )

    def load(self, copy: Copy, address: int, rows: npt.NDArray[np.int64]) -> None:
        layers, row_bytes = self.blocks.layers, self.blocks.row_bytes
        source = copies.pieces(address, rows, row_bytes, layers)
        copy(self.blocks.addresses(rows), source, self.blocks.block_bytes)

    def save(self, copy: Copy, address: int, rows: npt.NDArray[np.int64]) -> None:
        layers, row_bytes = self.blocks.layers, self.blocks.row_bytes
        target = copies.pieces(address, rows, row_bytes, layers)
        copy(target, self.blocks.addresses(rows), self.blocks.block_bytes)

    def wait(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()

    def time_s(self, work: Callable[[], object], rounds: int = _ROUNDS) -> float:
        """Median of some rounds behind the first."""
        times_s = []
        for _ in range(rounds + 1):
            self.wait()
            begun_s = time.perf_counter()
            work()
            self.wait()
            times_s.append(time.perf_counter() - begun_s)
        return statistics.median(times_s[1:])

    def rate(self, work: Callable[[], object], size_bytes: float | None = None) -> float:
        """GB/s."""
        return (self.size_bytes if size_bytes is None else size_bytes) / self.time_s(work) / 1e9

    def check(self) -> None:
        """All rows are in their blocks."""
        self.wait()
        row_bytes = self.blocks.row_bytes
        for row in (0, len(self.rows) // 2, len(self.rows) - 1):
            if self.blocks.bytes_of(row) != self.memory[row * row_bytes : (row + 1) * row_bytes]:
                raise AssertionError(f"row {row} has other bytes in its blocks")
        for tensor in self.blocks.tensors:
            tensor.zero_()


def floors(at: Machine) -> Iterator[Row]:
    host = torch.frombuffer(at.memory, dtype=torch.uint8)
    there = torch.empty(at.size_bytes, dtype=torch.uint8, device=at.device)
    load, save = partial(there.copy_, host, True), partial(host.copy_, there, True)
    yield Row("region registered", "s/GB", at.register_s / at.size_bytes * 1e9, "0.05-0.3")
    yield Row("host to GPU, one copy", "GB/s", at.rate(load), "50-55")
    yield Row("GPU to host, one copy", "GB/s", at.rate(save), "50-55")
    if at.is_gpu:
        other, back = at.private_rows(), _CUDA.Stream()
        target = torch.frombuffer(other, dtype=torch.uint8)

        def both() -> None:
            load()
            with torch.cuda.stream(back):
                target.copy_(there, non_blocking=True)

        yield Row("both ways at once, sum", "GB/s", at.rate(both, 2 * at.size_bytes), "80-100")
        pageable = torch.empty(at.size_bytes, dtype=torch.uint8)
        yield Row("pageable to GPU", "GB/s", at.rate(partial(there.copy_, pageable)), "5-12")


def gather_and_scatter(at: Machine) -> Iterator[Row]:
    """Pieces of 64 KiB, a layer's block each, and of 8 KiB: those of one rank of eight."""
    load = at.copier()
    yield Row(
        "load, batch, pieces of 64 KiB",
        "GB/s",
        at.rate(lambda: at.load(load, at.address, at.rows)),
        "45-52",
    )
    at.check()
    at.load(load, at.address, at.rows)
    saved = at.private_rows()
    save = at.copier(any_order=False)
    rate = at.rate(lambda: at.save(save, _address(saved), at.rows))
    if saved[:] != at.memory[:]:
        raise AssertionError("saved rows differ")
    yield Row("save, batch, pieces of 64 KiB", "GB/s", rate, "45-52")
    begun_s = time.perf_counter()
    at.load(load, at.address, at.rows)
    yield Row(
        "its call, of the thread", "ms/GB", _per_gb(time.perf_counter() - begun_s, at), "2-15"
    )
    part = Blocks(LAYERS, BLOCK_BYTES // TP, len(at.rows), at.device)
    target = part.addresses(at.rows)
    source = copies.pieces(at.address, at.rows, at.blocks.row_bytes, LAYERS)
    of_rank = at.size_bytes / TP
    copy = at.copier()
    yield Row(
        "load, batch, pieces of 8 KiB (TP 8)",
        "GB/s",
        at.rate(lambda: copy(target, source, part.block_bytes), of_rank),
        "8-25",
    )
    if not at.is_gpu:
        return
    for programs in (12, 24):
        kernel = copies.by_kernel(at.stream, programs)
        name = f"load, Triton with {programs} programs"
        rate = at.rate(partial(at.load, kernel, at.address, at.rows))
        at.check()
        yield Row(f"{name}, pieces of 64 KiB", "GB/s", rate, "30-50")
        rate = at.rate(partial(kernel, target, source, part.block_bytes), of_rank)
        yield Row(f"{name}, pieces of 8 KiB (TP 8)", "GB/s", rate, "30-50")


def lanes(at: Machine) -> Iterator[Row]:
    """Rows of another node's agent: connections over loopback, a thread each, and straight to the
    GPU as they come.
    """
    own, copy = at.private_rows(), at.copier()
    with region.served(at.fd, at.size_bytes) as port:
        for count in _LANES:
            connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
            for is_checked in (False, True):
                lane = partial(_lane, at, copy, own, is_checked=is_checked)
                took_s = at.time_s(partial(_together, lane, connections, at.rows))
                at.check()
                checked = ", each with a BLAKE2b of its bytes" if is_checked else ""
                name = f"{len(at.rows)} rows over {count} lanes into blocks{checked}"
                predicted = {1: "330", 4: "100", 8: "65"}[count] if not is_checked else ""
                yield Row(name, "ms", took_s * 1e3, predicted)
            for each in connections:
                each.close()


def _lane(
    at: Machine,
    copy: Copy,
    own: mmap,
    connection: socket.socket,
    rows: npt.NDArray[np.int64],
    *,
    is_checked: bool,
) -> None:
    row_bytes, view = at.blocks.row_bytes, memoryview(own)
    connection.sendall(region.ASK.pack(int(rows[0]) * row_bytes, len(rows) * row_bytes))
    for row in rows.tolist():
        place = view[row * row_bytes : (row + 1) * row_bytes]
        got = 0
        while got < row_bytes:
            got += connection.recv_into(place[got:], 0, socket.MSG_WAITALL)
        if is_checked:
            blake2b(place, digest_size=16).digest()
        at.load(copy, _address(own), np.array([row]))


def own_node(at: Machine) -> Iterator[Row]:
    """Rows of an engine that died on this node: out of its region, mapped and registered here, and
    read into the rows of this engine, from where they go to the GPU as they come.
    """
    copy = at.copier()
    took_s = at.time_s(lambda: at.load(copy, at.address, at.rows))
    at.check()
    yield Row(f"{len(at.rows)} rows, mapped, into blocks", "ms", took_s * 1e3, "21-25")
    own = at.private_rows()
    for count in _LANES:
        took_s = at.time_s(
            partial(_together, partial(_reader, at, copy, own), range(count), at.rows)
        )
        at.check()
        yield Row(f"{len(at.rows)} rows, pread by {count} threads, into blocks", "ms", took_s * 1e3)


def _reader(at: Machine, copy: Copy, own: mmap, _: int, rows: npt.NDArray[np.int64]) -> None:
    row_bytes, view = at.blocks.row_bytes, memoryview(own)
    for row in rows.tolist():
        first = row * row_bytes
        if os.preadv(at.fd, [view[first : first + row_bytes]], first) != row_bytes:
            raise AssertionError(f"row {row} is short")
        at.load(copy, _address(own), np.array([row]))


def _together(
    work: Callable[[Any, npt.NDArray[np.int64]], None], each: Any, rows: npt.NDArray[np.int64]
) -> None:
    """A thread for each, with its share of the rows, which some get none of where there are few."""
    shares = [share for share in np.array_split(rows, len(each)) if len(share)]
    with ThreadPoolExecutor(len(each)) as pool:
        for done in [pool.submit(work, *pair) for pair in zip(each, shares, strict=False)]:
            done.result()


def beside(at: Machine) -> Iterator[Row]:
    """Steps of the GPU take longer while rows are saved at the pace of 200 streams of 50
    tokens/s (1.3 GB/s, and with prompts 6.5), and while a restore runs as fast as it can.
    """
    if not at.is_gpu:
        return
    weights = [torch.randn(4096, 14336, dtype=torch.bfloat16, device="cuda") for _ in range(32)]
    batch = torch.randn(64, 4096, dtype=torch.bfloat16, device="cuda")
    square = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")

    def decode() -> None:
        for each in weights:
            batch @ each

    def prefill() -> None:
        square @ square

    save, load = at.copier(any_order=False), at.copier()
    some = at.rows[:16]
    works = {
        "rows are saved at 1.3 GB/s": (partial(at.save, save, at.address, some), 1.3e9, "below 1"),
        "rows are saved at 6.5 GB/s": (partial(at.save, save, at.address, some), 6.5e9, "below 1"),
        "rows are loaded at full rate": (partial(at.load, load, at.address, some), None, "1-5"),
    }
    for name, step in (("a decode step", decode), ("a prefill step", prefill)):
        for what, (work, pace, predicted) in works.items():
            before_s = _step_s(step)
            with _moving(at, work, len(some) * at.blocks.row_bytes, pace):
                beside_s = _step_s(step)
            alone_s = (before_s + _step_s(step)) / 2
            slower = 100 * (beside_s / alone_s - 1)
            yield Row(f"{name} is slower while {what}", "%", slower, predicted)


def _step_s(step: Callable[[], None], for_s: float = 1.5) -> float:
    """Median, by the GPU's own clock."""
    step()
    torch.cuda.synchronize()
    events = [_CUDA.Event(enable_timing=True)]
    events[0].record()
    end_s = time.perf_counter() + for_s
    while time.perf_counter() < end_s:
        step()
        events.append(_CUDA.Event(enable_timing=True))
        events[-1].record()
        if len(events) % 8 == 0:
            events[-1].synchronize()
    torch.cuda.synchronize()
    times_ms = [float(one.elapsed_time(other)) for one, other in pairwise(events)]
    return statistics.median(times_ms) / 1e3


@contextmanager
def _moving(
    at: Machine, work: Callable[[], None], size_bytes: int, pace: float | None
) -> Iterator[None]:
    stop = threading.Event()

    def move() -> None:
        while not stop.is_set():
            begun_s = time.perf_counter()
            work()
            assert at.stream is not None
            at.stream.synchronize()
            if pace is not None:
                stop.wait(max(0.0, size_bytes / pace - (time.perf_counter() - begun_s)))

    thread = threading.Thread(target=move, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _per_gb(took_s: float, at: Machine) -> float:
    return took_s * 1e3 / at.size_bytes * 1e9


def _address(memory: mmap) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


SECTIONS = (floors, gather_and_scatter, own_node, lanes, beside)


def as_text(rows: list[Row]) -> str:
    width = max(len(row.what) for row in rows)
    lines = [f"{'':{width}}  {'measured':>10}        predicted"]
    lines += [
        f"{row.what:{width}}  {row.value:10.3g} {row.unit:5}  {row.predicted}".rstrip()
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    parser = parser_of(__doc__, __file__, seed=1)
    parser.add_argument("--rows", type=int, default=500, help="of 2 MiB each")
    options = parser.parse_args()
    record = Record(options.seed)
    at = Machine(options.rows, options.seed)
    if not at.is_gpu:
        record.void("there is no GPU: copies were made by memmove")
    rows: list[Row] = []
    for section in SECTIONS:
        try:
            for row in section(at):
                rows.append(row)
                print(f"{row.what}: {row.value:.3g} {row.unit}", flush=True)
        except (RuntimeError, ImportError) as error:
            # A driver without the batch, or a machine without Triton, still has the other rows.
            record.void(f"{section.__name__} ended early: {error}")
    record.keep(options.out, "plane", {"rows": [asdict(row) for row in rows]}, as_text(rows))


if __name__ == "__main__":
    main()
