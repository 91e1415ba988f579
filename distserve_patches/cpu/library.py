"""SwiftTransformer's operator library in Python, which upstream loads as a shared object."""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from distserve_patches.cpu import memory, migration, model
from distserve_patches.cpu.group import new_group_id

_PATH_ENV = "SWIFT_TRANSFORMER_LIB_PATH"

_OPERATORS: Mapping[str, Mapping[str, Callable[..., Any]]] = {
    "nccl_ops": {"generate_nccl_id": new_group_id},
    "block_migration_ops": {
        "get_ipc_mem_handle": memory.handle_of,
        "register_ipc_mem_handle": migration.register,
        "migrate_blocks": migration.migrate_blocks,
    },
    "swapping_ops": {"swap": migration.swap},
}
_CLASSES: Mapping[str, Mapping[str, Callable[..., Any]]] = {
    "gpt_ops": {"Llama2Op": model.llama, "OptOp": model.opt, "Gpt2Op": model.gpt2},
}


@contextlib.contextmanager
def offered() -> Iterator[None]:
    """Offer the library to upstream during its import."""
    load_shared_object, path = torch.ops.load_library, os.environ.get(_PATH_ENV)
    os.environ[_PATH_ENV] = __file__
    torch.ops.load_library = _load  # type: ignore[method-assign] # The one call by which upstream gets its operators.
    try:
        yield
    finally:
        torch.ops.load_library = load_shared_object  # type: ignore[method-assign]
        if path is None:
            del os.environ[_PATH_ENV]
        else:
            os.environ[_PATH_ENV] = path


def _load(path: str) -> None:
    assert path == __file__, f"{path} is a library that kvrs does not stand for"
    homes: list[tuple[Any, Any]] = [(torch.ops, _OPERATORS), (torch.classes, _CLASSES)]
    for home, table in homes:
        for namespace, functions in table.items():
            for name, function in functions.items():
                setattr(getattr(home, namespace), name, function)
