"""Stands in for torchvision, of which SGLang imports names for images: every submodule and every
name exists, and none can be used.
"""

import enum
import importlib.machinery
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType
from typing import Any

__version__ = "0.0.0"


class InterpolationMode(enum.Enum):
    NEAREST, NEAREST_EXACT, BILINEAR, BICUBIC, BOX, HAMMING, LANCZOS = range(7)


def _any_name(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    if name == "InterpolationMode":
        return InterpolationMode
    return type(name, (), {"__init__": _refuse})


def _refuse(*_: object, **__: object) -> None:
    raise NotImplementedError("torchvision has no stand-in for what takes images")


class _AnySubmodule(MetaPathFinder, Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith("torchvision."):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = _any_name  # type: ignore[method-assign]


sys.meta_path.insert(0, _AnySubmodule())
