"""Device memory that several processes map: virtual memory management of the CUDA driver.

A process creates memory (`cuMemCreate`) and exports it as a file descriptor; each process that gets
the descriptor imports and maps it. The memory is there as long as one process has it mapped, or has
a handle or a descriptor of it.

Only the functions that this takes, by ctypes on `libcuda.so.1`; names and values are those of
`cuda.h` of CUDA 11.3 and later.
"""

import ctypes
import os
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from ctypes import byref
from dataclasses import dataclass
from typing import Any

LIBRARY = "libcuda.so.1"

# Of `cuda.h`.
_PINNED, _DEVICE, _POSIX_DESCRIPTOR, _READ_WRITE, _MINIMUM = 1, 1, 1, 3, 0
_SUPPORTED = {"virtual memory management": 102, "export as file descriptors": 103}

_MAGIC = b"KVRSVMM1"
_HEAD = struct.Struct("<8sI")  # magic, regions
_ENTRY = struct.Struct("<16sQQQ")  # name, bytes, bytes that are mapped, checksum
_MOST_REGIONS = 16
_MOST_BYTES = 1 << 44
_MOST_MESSAGE = _HEAD.size + _MOST_REGIONS * _ENTRY.size


class DriverError(RuntimeError):
    """A function of the driver has failed, or is not there."""


class FrameError(RuntimeError):
    """The message is no description of regions."""


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Flags(ctypes.Structure):
    _fields_ = (
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _Properties(ctypes.Structure):
    """`CUmemAllocationProp`."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", _Flags),
    )


class _Access(ctypes.Structure):
    """`CUmemAccessDesc`."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


@dataclass(frozen=True, slots=True)
class Region:
    """One piece of memory as its holder describes it."""

    name: str  # At most 16 ASCII characters.
    size_bytes: int
    mapped_bytes: int  # Whole granules.
    checksum: int  # xxh3-64 of the bytes that the holder wrote.


@dataclass(frozen=True, slots=True)
class Mapping:
    address: int
    mapped_bytes: int
    handle: int


def rounded(size_bytes: int, granule_bytes: int) -> int:
    """Whole granules.

    Raises:
        ValueError: one of both is not positive.
    """
    if size_bytes <= 0 or granule_bytes <= 0:
        raise ValueError(f"{size_bytes} bytes in granules of {granule_bytes}; allowed: from 1 on")
    return -(-size_bytes // granule_bytes) * granule_bytes


class Driver:
    """The driver with the primary context of one device, which torch uses as well."""

    def __init__(self, library: Any, device: int = 0) -> None:
        """`library`: libcuda as `ctypes.CDLL` has it.

        Raises:
            DriverError: there is no such device, or it cannot export memory.
        """
        self._library = library
        self._call("cuInit", ctypes.c_uint(0))
        found = ctypes.c_int()
        self._call("cuDeviceGet", byref(found), ctypes.c_int(device))
        self._device = found.value
        for what, attribute in _SUPPORTED.items():
            answer = ctypes.c_int()
            number, own = ctypes.c_int(attribute), ctypes.c_int(self._device)
            self._call("cuDeviceGetAttribute", byref(answer), number, own)
            if not answer.value:
                raise DriverError(f"device {device} has no {what}")
        context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", byref(context), ctypes.c_int(self._device))
        self._call("cuCtxSetCurrent", context)

    @property
    def device_name(self) -> str:
        name = ctypes.create_string_buffer(256)
        size, device = ctypes.c_int(len(name)), ctypes.c_int(self._device)
        self._call("cuDeviceGetName", name, size, device)
        return name.value.decode(errors="replace")

    @property
    def granule_bytes(self) -> int:
        found = ctypes.c_size_t()
        properties = self._properties()
        kind = ctypes.c_int(_MINIMUM)
        self._call("cuMemGetAllocationGranularity", byref(found), byref(properties), kind)
        return found.value

    def create(self, mapped_bytes: int) -> int:
        """A handle of new memory of whole granules."""
        handle, properties = ctypes.c_ulonglong(), self._properties()
        size, flags = ctypes.c_size_t(mapped_bytes), ctypes.c_ulonglong(0)
        self._call("cuMemCreate", byref(handle), size, byref(properties), flags)
        return handle.value

    def export(self, handle: int) -> int:
        """A file descriptor of the memory."""
        descriptor = ctypes.c_int(-1)
        self._call(
            "cuMemExportToShareableHandle",
            byref(descriptor),
            ctypes.c_ulonglong(handle),
            ctypes.c_int(_POSIX_DESCRIPTOR),
            ctypes.c_ulonglong(0),
        )
        return descriptor.value

    def adopt(self, descriptor: int) -> int:
        """A handle of memory that another process has exported; the descriptor stays the
        caller's.
        """
        handle = ctypes.c_ulonglong()
        # The driver takes the descriptor as the value of a pointer.
        given, kind = ctypes.c_void_p(descriptor), ctypes.c_int(_POSIX_DESCRIPTOR)
        self._call("cuMemImportFromShareableHandle", byref(handle), given, kind)
        return handle.value

    def map(self, handle: int, mapped_bytes: int) -> Mapping:
        """Map memory to be read and written; nothing of it is left reserved after a failure."""
        address, size = ctypes.c_ulonglong(), ctypes.c_size_t(mapped_bytes)
        nothing, flags = ctypes.c_ulonglong(0), ctypes.c_ulonglong(0)
        alignment = ctypes.c_size_t(0)
        self._call("cuMemAddressReserve", byref(address), size, alignment, nothing, flags)
        mapping = Mapping(address.value, mapped_bytes, handle)
        try:
            offset, own = ctypes.c_size_t(0), ctypes.c_ulonglong(handle)
            self._call("cuMemMap", address, size, offset, own, flags)
        except DriverError:
            self._call("cuMemAddressFree", address, size)
            raise
        try:
            access = _Access(_Location(_DEVICE, self._device), _READ_WRITE)
            self._call("cuMemSetAccess", address, size, byref(access), ctypes.c_size_t(1))
        except DriverError:
            self.unmap(mapping)
            raise
        return mapping

    def unmap(self, mapping: Mapping) -> None:
        address = ctypes.c_ulonglong(mapping.address)
        size = ctypes.c_size_t(mapping.mapped_bytes)
        self._call("cuMemUnmap", address, size)
        self._call("cuMemAddressFree", address, size)

    def release(self, handle: int) -> None:
        self._call("cuMemRelease", ctypes.c_ulonglong(handle))

    def write(self, address: int, content: bytes) -> None:
        source, size = ctypes.c_char_p(content), ctypes.c_size_t(len(content))
        self._call("cuMemcpyHtoD_v2", ctypes.c_ulonglong(address), source, size)

    def read(self, address: int, size_bytes: int) -> bytes:
        target = ctypes.create_string_buffer(size_bytes)
        source, size = ctypes.c_ulonglong(address), ctypes.c_size_t(size_bytes)
        self._call("cuMemcpyDtoH_v2", target, source, size)
        return target.raw

    def _properties(self) -> _Properties:
        location = _Location(_DEVICE, self._device)
        return _Properties(_PINNED, _POSIX_DESCRIPTOR, location, None, _Flags())

    def _call(self, name: str, *arguments: Any) -> None:
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise DriverError(f"{LIBRARY} has no {name}: it is of CUDA before 11.3") from None
        if result := function(*arguments):
            raise DriverError(f"{name}: {self._name_of(result)}")

    def _name_of(self, result: int) -> str:
        name = ctypes.c_char_p()
        if self._library.cuGetErrorName(ctypes.c_int(result), byref(name)) or name.value is None:
            return f"CUresult {result}"
        return name.value.decode()


def load() -> ctypes.CDLL:
    """Raises DriverError: this machine has no driver."""
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise DriverError(f"no NVIDIA driver on this machine: {error}") from None


def encode(regions: Sequence[Region]) -> bytes:
    return _HEAD.pack(_MAGIC, len(regions)) + b"".join(
        _ENTRY.pack(each.name.encode(), each.size_bytes, each.mapped_bytes, each.checksum)
        for each in regions
    )


def decode(message: bytes, descriptors: int) -> list[Region]:
    """The regions that a holder has sent with so many descriptors.

    Raises:
        FrameError: it is nothing of the kind, or sizes are not possible.
    """
    if len(message) < _HEAD.size or not message.startswith(_MAGIC):
        raise FrameError(f"{len(message)} bytes that describe no memory")
    _, count = _HEAD.unpack_from(message)
    if not 1 <= count <= _MOST_REGIONS:
        raise FrameError(f"{count} regions; allowed: 1 to {_MOST_REGIONS}")
    if len(message) != (right := _HEAD.size + count * _ENTRY.size):
        raise FrameError(f"{len(message)} bytes for {count} regions; allowed: {right}")
    if descriptors != count:
        raise FrameError(f"{descriptors} descriptors for {count} regions")
    regions = []
    for packed, size, mapped, checksum in _ENTRY.iter_unpack(message[_HEAD.size :]):
        name = packed.rstrip(b"\0").decode("ascii", "replace")
        if not 0 < size <= mapped <= _MOST_BYTES:
            raise FrameError(
                f"{name!r}: {size} bytes, {mapped} of them mapped; allowed: 1 to {_MOST_BYTES}, "
                f"and no more than are mapped"
            )
        regions.append(Region(name, size, mapped, checksum))
    if len({each.name for each in regions}) < count:
        raise FrameError("two regions of one name")
    return regions


def send_regions(
    connection: socket.socket, regions: Sequence[Region], descriptors: Sequence[int]
) -> None:
    """Over a socket of kind SOCK_SEQPACKET."""
    socket.send_fds(connection, [encode(regions)], list(descriptors))


def receive_regions(connection: socket.socket) -> tuple[list[Region], list[int]]:
    """Regions with their descriptors, which are the caller's from then on.

    Raises:
        FrameError: what came is something else; no descriptor is left open.
    """
    message, descriptors, flags, _ = socket.recv_fds(connection, _MOST_MESSAGE, _MOST_REGIONS)
    try:
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise FrameError("a message that is too long, or has too many descriptors")
        return decode(message, len(descriptors)), descriptors
    except FrameError:
        for descriptor in descriptors:
            with suppress(OSError):
                os.close(descriptor)
        raise


def map_all(
    driver: Driver, regions: Sequence[Region], descriptors: Sequence[int]
) -> dict[str, Mapping]:
    """Map regions that were received, by name, and close their descriptors: the mapping keeps the
    memory.
    """
    try:
        return {
            region.name: driver.map(driver.adopt(descriptor), region.mapped_bytes)
            for region, descriptor in zip(regions, descriptors, strict=True)
        }
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
