"""Parts of a model's tensors, read from safetensors files by range: no more bytes than the parts
have.
"""

import json
import math
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvrs.errors import ConfigError
from kvrs_engine.engine.models.weights import Weights, check_tensor

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # As the format's own readers have it.
_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_ANY_TYPE = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies in its file."""

    kind: str
    shape: tuple[int, ...]
    start: int  # In the file.


class RangeReader:
    """Rows and columns of a model's tensors, widened to float32."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._headers: dict[Path, Mapping[str, StoredTensor]] = {}
        self._files: dict[Path, int] = {}
        self._maps: dict[Path, mmap.mmap] = {}
        self.read_bytes = 0  # Of tensors, since the start.

    def rows(self, name: str, shape: tuple[int, ...], own: range, into: Tensor) -> None:
        """Rows `own` of a tensor of that shape.

        Raises:
            ConfigError: it is missing, or of another shape or type, or its file is broken.
        """
        width = math.prod(shape[1:])
        path, stored = self.stored(name, shape)
        numbers = torch.empty(len(own) * width, dtype=_TYPES[stored.kind])
        first = stored.start + own.start * width * numbers.element_size()
        self._fill(path, numbers.view(torch.uint8).numpy().data, first)
        self.read_bytes += numbers.nbytes
        into.view(-1).copy_(numbers)

    def columns(self, name: str, shape: tuple[int, int], own: range, into: Tensor) -> None:
        """Read columns as `rows` does; they are a run of each row. They are copied out of the
        mapped file, since a call for each run takes twenty times as long.
        """
        path, stored = self.stored(name, shape)
        memory, count, kind = self._map(path), math.prod(shape), _TYPES[stored.kind]
        if (stop := stored.start + count * kind.itemsize) > len(memory):
            raise ConfigError(f"{path}: ends before byte {stop}")
        whole = torch.frombuffer(memory, dtype=kind, count=count, offset=stored.start)
        columns = whole.view(shape)[:, own.start : own.stop]
        self.read_bytes += columns.numel() * columns.element_size()
        into.copy_(columns)

    def close(self) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()
        self._maps.clear()  # Tensors of them keep the memory alive.

    def stored(self, name: str, shape: tuple[int, ...]) -> tuple[Path, StoredTensor]:
        """The file of a tensor, and where in it; raises ConfigError as `rows` does."""
        path = self._weights.file_of(name)
        stored = self._header(path).get(name)
        if stored is None:
            raise ConfigError(f"{path}: tensor {name}: missing")
        check_tensor(path, name, stored.shape, shape, _TYPES.get(stored.kind, stored.kind))
        return path, stored

    def _fill(self, path: Path, view: memoryview, offset: int) -> None:
        file = self._file(path)
        while view:
            try:
                count = os.preadv(file, [view], offset)
            except OSError as error:
                raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
            if not count:
                raise ConfigError(f"{path}: ends before byte {offset + len(view)}")
            view, offset = view[count:], offset + count

    def _map(self, path: Path) -> mmap.mmap:
        """All of a file, of which nothing is read that is not looked at."""
        if path not in self._maps:
            try:
                # Private and writable: torch warns of tensors in memory that it must not write.
                found = mmap.mmap(self._file(path), 0, access=mmap.ACCESS_COPY)
            except (OSError, ValueError) as error:
                raise ConfigError(f"{path}: cannot be read: {error}") from None
            found.madvise(mmap.MADV_RANDOM)
            self._maps[path] = found
        return self._maps[path]

    def _file(self, path: Path) -> int:
        if path not in self._files:
            self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return self._files[path]

    def _header(self, path: Path) -> Mapping[str, StoredTensor]:
        if path not in self._headers:
            self._headers[path] = read_header(path)
        return self._headers[path]


def read_header(path: Path) -> Mapping[str, StoredTensor]:
    """Which tensors a safetensors file has, and where.

    Raises:
        ConfigError: it has no header that could be true.
    """
    try:
        with path.open("rb") as file:
            total = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            most = max(0, min(_MAX_HEADER_BYTES, total - _LENGTH_BYTES))
            if length > most:
                raise ConfigError(f"{path}: a header of {length} bytes; allowed: 0 to {most}")
            document = json.loads(file.read(length))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"{path}: the header is no JSON") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: the header is no object")
    first = _LENGTH_BYTES + length
    spans, found = [], {}
    for name, entry in document.items():
        if name == "__metadata__":
            continue
        kind, shape, start, stop = _entry(path, name, entry, total - first)
        spans.append((start, stop, name))
        found[name] = StoredTensor(kind, shape, first + start)
    spans.sort()
    for (_, stop, one), (start, _, other) in pairwise(spans):
        if start < stop:
            raise ConfigError(f"{path}: tensors {one} and {other} lie one over the other")
    return found


def _entry(
    path: Path, name: str, entry: Any, data_bytes: int
) -> tuple[str, tuple[int, ...], int, int]:
    try:
        kind, shape = entry["dtype"], tuple(entry["shape"])
        start, stop = entry["data_offsets"]
        whole = [*shape, start, stop]
        if kind not in _ANY_TYPE or any(type(number) is not int or number < 0 for number in whole):
            raise ValueError
    except (ValueError, TypeError, KeyError):
        raise ConfigError(f"{path}: tensor {name}: the header's entry is broken") from None
    if not start <= stop <= data_bytes:
        raise ConfigError(
            f"{path}: tensor {name}: bytes [{start}, {stop}); allowed: within [0, {data_bytes})"
        )
    if stop - start != math.prod(shape) * _ANY_TYPE[kind]:
        raise ConfigError(
            f"{path}: tensor {name}: {stop - start} bytes for shape {list(shape)} of {kind}"
        )
    return kind, shape, start, stop
