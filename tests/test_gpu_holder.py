"""Device memory that is held for others, with a stand-in for the driver: memory is that of memfds,
descriptors and sockets are real.
"""

import ctypes
import mmap
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from xxhash import xxh3_64_intdigest

from experiments.gpu import holder, vmm
from experiments.gpu.holder import Holder, attach, checksums, judged
from experiments.gpu.vmm import (
    Driver,
    DriverError,
    FrameError,
    Region,
    decode,
    encode,
    receive_regions,
    rounded,
    send_regions,
)

GRANULE = 1 << 21
NAMES = {2: b"CUDA_ERROR_OUT_OF_MEMORY", 100: b"CUDA_ERROR_NO_DEVICE"}
REGIONS = [Region("weights", 5, GRANULE, 7), Region("kv", GRANULE, GRANULE, 8)]


class StandIn:
    """The functions of libcuda that are used, for one process."""

    def __init__(self, fails: dict[str, int] | None = None, supports: int = 1) -> None:
        self.fails, self.supports = fails or {}, supports
        self.reserved: dict[int, int] = {}
        self.mapped: dict[int, mmap.mmap] = {}
        self.accessible: set[int] = set()
        self._handles: dict[int, int] = {}
        self._numbers, self._addresses = count(1), count(1 << 40, 1 << 32)

    def __getattr__(self, name: str) -> Callable[..., int]:
        function: Callable[..., None] = object.__getattribute__(self, f"_{name}")

        def call(*arguments: Any) -> int:
            if name in self.fails:
                return self.fails[name]
            function(*(getattr(each, "_obj", each) for each in arguments))
            return 0

        return call

    def cuGetErrorName(self, result: Any, name: Any) -> int:
        name._obj.value = NAMES.get(result.value)
        return 0 if result.value in NAMES else 1

    def close(self) -> None:
        """Release all memory, like the end of its process."""
        for memory in self.mapped.values():
            memory.close()
        for descriptor in self._handles.values():
            os.close(descriptor)

    def _cuInit(self, flags: Any) -> None:
        assert flags.value == 0

    def _cuDeviceGet(self, device: Any, number: Any) -> None:
        device.value = number.value

    def _cuDeviceGetAttribute(self, answer: Any, attribute: Any, _: Any) -> None:
        assert attribute.value in (102, 103)
        answer.value = self.supports

    def _cuDevicePrimaryCtxRetain(self, context: Any, _: Any) -> None:
        context.value = 1

    def _cuCtxSetCurrent(self, context: Any) -> None:
        assert context.value == 1

    def _cuMemGetAllocationGranularity(self, size: Any, *_: Any) -> None:
        size.value = GRANULE

    def _cuMemCreate(self, handle: Any, size: Any, wanted: Any, flags: Any) -> None:
        assert (wanted.type, wanted.handle_types, wanted.location.type) == (1, 1, 1)
        assert ctypes.sizeof(wanted) == 32
        assert size.value % GRANULE == flags.value == 0
        handle.value = next(self._numbers)
        self._handles[handle.value] = os.memfd_create("device")
        os.truncate(self._handles[handle.value], size.value)

    def _cuMemExportToShareableHandle(
        self, descriptor: Any, handle: Any, kind: Any, _: Any
    ) -> None:
        assert kind.value == 1
        descriptor.value = os.dup(self._handles[handle.value])

    def _cuMemImportFromShareableHandle(self, handle: Any, descriptor: Any, kind: Any) -> None:
        assert kind.value == 1
        handle.value = next(self._numbers)
        self._handles[handle.value] = os.dup(descriptor.value)

    def _cuMemAddressReserve(self, address: Any, size: Any, *_: Any) -> None:
        address.value = next(self._addresses)
        self.reserved[address.value] = size.value

    def _cuMemAddressFree(self, address: Any, size: Any) -> None:
        assert self.reserved.pop(address.value) == size.value

    def _cuMemMap(self, address: Any, size: Any, _: Any, handle: Any, __: Any) -> None:
        self.mapped[address.value] = mmap.mmap(self._handles[handle.value], size.value)

    def _cuMemUnmap(self, address: Any, size: Any) -> None:
        memory = self.mapped.pop(address.value)
        assert len(memory) == size.value
        memory.close()

    def _cuMemSetAccess(self, address: Any, size: Any, access: Any, _: Any) -> None:
        assert (access.location.type, access.flags) == (1, 3)
        assert ctypes.sizeof(access) == 12
        assert size.value == self.reserved[address.value]
        self.accessible.add(address.value)

    def _cuMemcpyHtoD_v2(self, address: Any, content: Any, size: Any) -> None:
        assert address.value in self.accessible
        self.mapped[address.value][: size.value] = ctypes.string_at(content, size.value)

    def _cuMemcpyDtoH_v2(self, target: Any, address: Any, size: Any) -> None:
        assert address.value in self.accessible
        ctypes.memmove(target, self.mapped[address.value][: size.value], size.value)


@pytest.fixture
def libraries() -> Iterator[Callable[[], StandIn]]:
    made: list[StandIn] = []

    def make() -> StandIn:
        made.append(StandIn())
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize(
    ("size", "granule", "expected"),
    [(1, 8, 8), (8, 8, 8), (9, 8, 16), ((1 << 30) + 1, 1 << 21, (1 << 30) + (1 << 21))],
)
def test_sizes_are_whole_granules(size: int, granule: int, expected: int) -> None:
    assert rounded(size, granule) == expected


@pytest.mark.parametrize(("size", "granule"), [(0, 8), (-1, 8), (8, 0)])
def test_nothing_is_no_size(size: int, granule: int) -> None:
    with pytest.raises(ValueError, match=f"{size} bytes in granules of {granule}"):
        rounded(size, granule)


def test_a_message_says_what_its_descriptors_are() -> None:
    assert decode(encode(REGIONS), 2) == REGIONS


@pytest.mark.parametrize(
    ("message", "descriptors", "said"),
    [
        (b"", 0, "0 bytes that describe no memory"),
        (b"another one" + bytes(90), 2, "101 bytes that describe no memory"),
        (encode([]), 0, "0 regions; allowed: 1 to 16"),
        (encode([REGIONS[0]] * 17), 17, "17 regions; allowed: 1 to 16"),
        (encode(REGIONS)[:-1], 2, "91 bytes for 2 regions; allowed: 92"),
        (encode(REGIONS) + b"x", 2, "93 bytes for 2 regions; allowed: 92"),
        (encode(REGIONS), 1, "1 descriptors for 2 regions"),
        (encode([Region("kv", 0, GRANULE, 0)]), 1, "'kv': 0 bytes"),
        (encode([Region("kv", GRANULE + 1, GRANULE, 0)]), 1, "no more than are mapped"),
        (encode([Region("kv", 1, 1 << 45, 0)]), 1, "allowed: 1 to 17592186044416"),
        (encode([REGIONS[0]] * 2), 2, "two regions of one name"),
    ],
    ids=[
        *("empty", "other", "none", "many", "short", "long", "descriptors"),
        *("nothing", "larger", "huge", "twice"),
    ],
)
def test_another_message_is_refused(message: bytes, descriptors: int, said: str) -> None:
    with pytest.raises(FrameError, match=said):
        decode(message, descriptors)


def test_descriptors_of_a_refused_message_are_closed() -> None:
    """Also where there are more than were asked for: the kernel keeps those."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        before = set(os.listdir("/proc/self/fd"))
        send_regions(theirs, REGIONS, [theirs.fileno()])
        with pytest.raises(FrameError, match="1 descriptors for 2 regions"):
            receive_regions(ours)
        send_regions(theirs, REGIONS, [theirs.fileno()] * 17)
        with pytest.raises(FrameError, match="too many descriptors"):
            receive_regions(ours)
        assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("library", "said"),
    [
        (StandIn({"cuInit": 100}), "cuInit: CUDA_ERROR_NO_DEVICE"),
        (StandIn({"cuMemCreate": 2}), "cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY"),
        (StandIn({"cuMemCreate": 777}), "cuMemCreate: CUresult 777"),
        (StandIn(supports=0), "device 0 has no virtual memory management"),
        (object(), "libcuda.so.1 has no cuInit"),
    ],
    ids=["device", "memory", "unnamed", "unsupported", "old"],
)
def test_what_fails_is_said_by_its_name(library: Any, said: str) -> None:
    with pytest.raises(DriverError, match=said):
        Driver(library).create(GRANULE)


@pytest.mark.parametrize("step", ["cuMemMap", "cuMemSetAccess"])
def test_memory_that_cannot_be_mapped_leaves_nothing_reserved(
    libraries: Callable[[], StandIn], step: str
) -> None:
    library = libraries()
    driver = Driver(library)
    handle = driver.create(GRANULE)
    library.fails[step] = 2

    with pytest.raises(DriverError, match=f"{step}: CUDA_ERROR_OUT_OF_MEMORY"):
        driver.map(handle, GRANULE)

    assert not library.reserved
    assert not library.mapped


def test_what_one_engine_wrote_the_next_one_finds(
    libraries: Callable[[], StandIn], tmp_path: Path
) -> None:
    """Whole and at once, through descriptors alone, of which none stays open."""
    contents = {"weights": os.urandom(1000), "kv": bytes(GRANULE + 1)}
    owner, path = Holder(Driver(libraries()), contents), str(tmp_path / "holder")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(1)

        def attached() -> tuple[Driver, Any, Any]:
            serving = threading.Thread(target=owner.serve, args=(listener,))
            serving.start()
            driver = Driver(libraries())
            before = len(os.listdir("/proc/self/fd"))
            found = attach(driver, path)
            serving.join()
            # Of the stand-in: one for each handle, and one for each map.
            assert len(os.listdir("/proc/self/fd")) == before + 2 * len(contents)
            return driver, *found

        first, regions, mappings = attached()
        assert [each.mapped_bytes for each in regions] == [GRANULE, 2 * GRANULE]
        assert checksums(first, regions, mappings) == {
            name: xxh3_64_intdigest(content) for name, content in contents.items()
        }
        written = os.urandom(GRANULE + 1)
        first.write(mappings["kv"].address, written)
        for mapping in mappings.values():
            first.unmap(mapping)

        second, regions, mappings = attached()
        assert checksums(second, regions, mappings) == {
            "weights": xxh3_64_intdigest(contents["weights"]),
            "kv": xxh3_64_intdigest(written),
        }


def test_engines_that_find_other_bytes_are_counted() -> None:
    def said(**other: Any) -> dict[str, Any]:
        facts = {"weights_equal": True, "kv": 5, "kv_written": 5, "product": 9}
        return facts | {"context_s": 1.0, "attach_s": 1.0, "product_s": 1.0} | other

    assert judged([said(kv=0), said()])["different"] == 0
    assert judged([said(kv=0), said(kv=6), said(product=8), said()])["different"] == 2
    assert judged([said(weights_equal=False), said()])["different"] == 1


def test_without_a_driver_the_script_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(vmm, "LIBRARY", "libcuda-that-is-not-there.so")
    monkeypatch.setattr(sys, "argv", ["holder", "--out", str(tmp_path)])

    holder.main()

    assert capsys.readouterr().out.startswith("skipped: no NVIDIA driver on this machine: ")
    assert not list(tmp_path.iterdir())
