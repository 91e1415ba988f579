"""vLLM with one of the names changed that kvrs uses, as a later version may have it.

As a connector's module (`kv_connector_module_path`) it changes what KVRS_CHANGED says; `python -m
kvrs_testkit.vllm_changed` prints, as a line of JSON, the faults that each change is found by.
"""

import json
import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

_OFFLOAD = "vllm.v1.kv_offload"


def _owner(module: str, name: str) -> Any:
    return getattr(import_module(f"{_OFFLOAD}.{module}"), name)


def _without(module: str, owner: str, name: str) -> None:
    """Also as a field of a data class, or set by `__init__`."""
    found = _owner(module, owner)
    found.__annotations__ = {
        each: of for each, of in getattr(found, "__annotations__", {}).items() if each != name
    }
    if hasattr(found, name):
        delattr(found, name)
    if "__init__" in vars(found):
        code = found.__init__.__code__
        names = tuple(each if each != name else "other" for each in code.co_names)
        found.__init__.__code__ = code.replace(co_names=names)


def _with(module: str, owner: str, name: str, hook: Callable[..., Any]) -> None:
    setattr(_owner(module, owner), name, hook)


TIER, POLICY = ("tiering.base", "SecondaryTierManager"), ("cpu.policies.base", "CachePolicy")
LRU = ("cpu.policies.lru", "LRUCachePolicy")
CHANGES: dict[str, Callable[[], None]] = {
    "lookup": lambda: _with(*TIER, "lookup", lambda self, keys, req_context: None),
    "submit_load": lambda: _with(*TIER, "submit_load", lambda self, job, deadline_s: None),
    "drain_jobs": lambda: _without(*TIER, "drain_jobs"),
    "block_size_bytes": lambda: _without(*TIER, "block_size_bytes"),
    "SecondaryTierManager.__init__": lambda: _with(*TIER, "__init__", lambda self, spec: None),
    "chunk_ids": lambda: _without("tiering.base", "TransferJob", "chunk_ids"),
    "successful_keys": lambda: _without("tiering.base", "JobResult", "successful_keys"),
    "on_store_miss": lambda: _without(*POLICY, "on_store_miss"),
    "mark_evictable": lambda: _with(*LRU, "mark_evictable", lambda self, key, now_s: None),
    "insert": lambda: _with(*LRU, "insert", lambda self, chunks: None),
    "_push_evictable": lambda: _without(*LRU, "_push_evictable"),
    "_ranks": lambda: _without(*LRU, "_ranks"),
    "chunk_id": lambda: _without("cpu.policies.base", "ChunkStatus", "chunk_id"),
    "get_run_config": lambda: _without("file_mapper", "FileMapper", "get_run_config"),
    "mmap_path": lambda: _without("cpu.shared_offload_region", "SharedOffloadRegion", "mmap_path"),
    "_scheduler_mmap": lambda: _without("tiering.spec", "TieringOffloadingSpec", "_scheduler_mmap"),
}


def main() -> None:
    """Each change in a process of its own."""
    from kvrs.vllm.offloading import KvrsOffloading
    from kvrs.vllm.start_check import faults_of_tier

    found = {}
    unchanged: dict[str, Callable[[], None]] = {"": lambda: None}
    for name, change in (unchanged | CHANGES).items():
        read, write = os.pipe()
        if not os.fork():
            change()
            try:
                faults = [*faults_of_tier(KvrsOffloading)]
            except Exception as error:
                faults = [f"{type(error).__name__}: {error}"]
            os.write(write, json.dumps(faults).encode())
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as answer:
            found[name] = json.load(answer)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
elif change := os.environ.get("KVRS_CHANGED"):
    CHANGES[change]()
    from kvrs.vllm.offloading import KvrsOffloading  # noqa: F401 - vLLM takes it from here.
