"""Readers of a model's tensors, whole or in part, in one or several safetensors files."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvrs.errors import ConfigError
from kvrs_engine.engine.models.reading import WeightReading

_WIDENED = ("F32", "F16", "BF16")


class Weights:
    """The tensors of a model directory by name, each widened to float32 when it is read."""

    def __init__(self, directory: Path, reading: WeightReading | None = None) -> None:
        """Find the file of each tensor. `reading` tracks the progress.

        Raises:
            ConfigError: there is no weight file, or the index is broken.
        """
        self._directory, self.reading = directory, reading
        self._files = _files_by_tensor(directory)
        self._open: dict[Path, Any] = {}  # Open safetensors files.
        self.read_bytes = 0  # Bytes of tensors read since the start.

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a copy of one tensor in its own aligned memory.

        Raises:
            ConfigError: the tensor is missing, has another shape or type, or its file is broken.
        """
        copied = self._read(name, shape, None).to(torch.float32, copy=True)
        self.close()  # An open file stays mapped where it was read.
        return copied

    def rows(self, name: str, shape: tuple[int, ...], own: range, into: Tensor) -> None:
        """Read rows `own` of a tensor; errors as in `take`."""
        part = self._read(name, shape, (slice(own.start, own.stop),))
        into.view(part.shape).copy_(part)

    def columns(self, name: str, shape: tuple[int, int], own: range, into: Tensor) -> None:
        """Read columns `own` of a tensor; errors as in `take`."""
        part = self._read(name, shape, (slice(None), slice(own.start, own.stop)))
        into.view(part.shape).copy_(part)

    def close(self) -> None:
        """Close the files; later reads open them again."""
        self._open.clear()

    @property
    def files(self) -> list[Path]:
        return sorted(set(self._files.values()))

    def _read(self, name: str, shape: tuple[int, ...], place: tuple[slice, ...] | None) -> Tensor:
        """Return a part of a tensor, as it is stored; `place` None: the whole tensor."""
        if (path := self._files.get(name)) is None:
            raise ConfigError(f"{self._directory}: tensor {name}: missing")
        if self.reading is not None:
            self.reading.begin()
        try:
            if path not in self._open:
                self._open[path] = safe_open(path, framework="pt")
            stored = self._open[path].get_slice(name)
            _check_tensor(path, name, stored.get_shape(), shape, stored.get_dtype())
            part: Tensor = self._open[path].get_tensor(name) if place is None else stored[place]
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{path}: tensor {name}: {error}") from None
        self.read_bytes += part.nbytes
        if self.reading is not None:
            self.reading.took(part.nbytes)
        return part


def _check_tensor(
    path: Path, name: str, got: Sequence[int], shape: Sequence[int], kind: torch.dtype | str
) -> None:
    """Check the shape and the type of a tensor; raises ConfigError."""
    if tuple(got) != tuple(shape):
        raise ConfigError(
            f"{path}: tensor {name}: got shape {list(got)}; allowed: {list(shape)}, from "
            f"config.json"
        )
    if kind not in _WIDENED:
        raise ConfigError(f"{path}: tensor {name}: got {kind}; allowed: float32, float16, bfloat16")


def _files_by_tensor(directory: Path) -> Mapping[str, Path]:
    index = directory / "model.safetensors.index.json"
    single = directory / "model.safetensors"
    if index.exists():
        return _files_of_index(index)
    try:
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), single)
    except FileNotFoundError:
        raise ConfigError(
            f"{directory}: neither model.safetensors nor model.safetensors.index.json is there"
        ) from None
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{single}: {error}") from None


def _files_of_index(index: Path) -> Mapping[str, Path]:
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {tensor: index.parent / name for tensor, name in names.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{index}: weight_map: cannot be read: {error}") from None
    for path in set(files.values()):
        # An index must not name files outside its directory.
        if path.parent != index.parent or not path.is_file():
            raise ConfigError(f"{index}: weight_map: {path.name}: not a file of this directory")
    return files
