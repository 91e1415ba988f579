"""Check at start that vLLM has the interface that kvrs is written for, by features and not by
version.
"""

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from importlib import import_module
from typing import Any

ANY = ["*"]
_OFFLOAD = "vllm.v1.kv_offload"
# Attributes of vLLM that kvrs reads, by module and class: class attributes, fields, or attributes
# that `__init__` sets.
READS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    f"{_OFFLOAD}.base": {
        "LookupResult": ("HIT", "MISS", "RETRY"),
        "Medium": ("CPU",),
        "OffloadPolicy": ("REQUEST_LEVEL",),
        "OffloadingSpec": ("config", "blocks_per_chunk", "tokens_per_block"),
        "ReqContext": ("req_id", "kv_transfer_params"),
    },
    f"{_OFFLOAD}.config": {"OffloadingConfig": ("canonical_layout", "kv_cache_layout")},
    f"{_OFFLOAD}.cpu.policies.base": {
        "CachePolicy": ("cache_capacity",),
        "ChunkStatus": ("chunk_id",),
    },
    f"{_OFFLOAD}.cpu.policies.lru": {"LRUCachePolicy": ("chunks", "_ranks", "_evictable")},
    f"{_OFFLOAD}.cpu.shared_offload_region": {
        "SharedOffloadRegion": ("fd", "mmap_path", "_creator"),
    },
    f"{_OFFLOAD}.tiering.base": {
        "JobResult": (
            *("job_id", "success", "successful_keys", "transfer_time", "transfer_bytes"),
        ),
        "SecondaryTierManager": ("block_size_bytes",),
        "TransferJob": ("job_id", "keys", "chunk_ids", "req_context"),
    },
    f"{_OFFLOAD}.tiering.spec": {"TieringOffloadingSpec": ("_scheduler_mmap",)},
    "vllm.v1.request": {"Request": ("lora_request",)},
    "vllm.lora.request": {"LoRARequest": ("lora_path",)},
}
# Functions of vLLM that kvrs calls, by module and name, with the positional arguments that kvrs
# gives.
CALLS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    f"{_OFFLOAD}.base": {
        "RequestOffloadingContext": ("policy",),
        "ReqContext.get_state": ("self", "kind"),
        "ReqContext.set_state": ("self", "state"),
    },
    f"{_OFFLOAD}.cpu.policies.lru": {
        "LRUCachePolicy": ("capacity",),
        "LRUCachePolicy._assign_new_rank": ("self", "key"),
        "LRUCachePolicy._push_evictable": ("self", "key"),
    },
    f"{_OFFLOAD}.file_mapper": {
        "FileMapper.from_offloading_spec": ("root", "spec", "chunks", "agnostic"),
        "FileMapper.get_run_config": ("self",),
    },
    f"{_OFFLOAD}.tiering.base": {
        "SecondaryTierManager.__init__": ("self", "spec", "view", "kind", "detector"),
    },
    "vllm.v1.core.kv_cache_utils": {"get_none_hash_seed": ()},
}


def faults_of_tier(connector: type) -> Iterator[str]:
    """Yield the differences between this vLLM and the parts of it that the tier, the policy and
    their connector use.

    Raises:
        ImportError: a missing module, or a missing name in it.
    """
    ledger, tier = (import_module(f"kvrs.vllm.{name}") for name in ("ledger", "tier"))
    own = {"hold", "release", "give_up"}  # Methods of the policy that vLLM's policy does not have.
    for ours in (connector, tier.KvrsTier, ledger.KvrsPolicy):
        yield from faults_of_hooks(ours, ours.__bases__, own)
        yield from (
            f"vLLM wants a hook {name}" for name in sorted(getattr(ours, "__abstractmethods__", ()))
        )
    yield from faults_of_reads(READS)
    yield from faults_of_calls(CALLS)


def faults_of_hooks(
    connector: type, bases: Sequence[type], own: Set[str] = frozenset()
) -> Iterator[str]:
    """Yield the hooks of vLLM that the connector overrides and that are missing in `bases` or have
    other parameters; methods in `own` are not hooks.
    """
    for name, hook in vars(connector).items():
        if (
            name.startswith("_")
            or name in own
            or not (callable(hook) or isinstance(hook, classmethod | property))
        ):
            continue
        found = [inspect.getattr_static(base, name, None) for base in bases]
        theirs = next((each for each in found if each is not None), None)
        if theirs is None:
            yield f"vLLM has no hook {name}"
            continue
        taken, given = _parameters(hook), _parameters(theirs)
        if type(theirs) is not type(hook) or (given != taken and taken is not ANY):
            yield (f"vLLM's hook {name} takes ({', '.join(given)}); allowed: ({', '.join(taken)})")


def faults_of_reads(needed: Mapping[str, Mapping[str, tuple[str, ...]]]) -> Iterator[str]:
    """Yield the attributes of `needed` that vLLM's classes and their objects lack.

    Raises:
        ImportError: a missing module.
    """
    for path, classes in needed.items():
        module = import_module(path)
        yield from faults_of_features((module, owner) for owner in classes)
        for owner, names in classes.items():
            if (found := getattr(module, owner, None)) is not None:
                yield from faults_of_features((found, name) for name in names)


def faults_of_calls(needed: Mapping[str, Mapping[str, tuple[str, ...]]]) -> Iterator[str]:
    """Yield the functions and methods of `needed` that vLLM lacks, or that cannot be called with
    these arguments.

    Raises:
        ImportError: a missing module.
    """
    for path, calls in needed.items():
        for name, arguments in calls.items():
            found: Any = import_module(path)
            for part in name.split("."):
                found = getattr(found, part, None)
            if found is None:
                yield f"vLLM's {path} has no {name}"
                continue
            try:
                inspect.signature(found).bind(*arguments)
            except TypeError as error:
                given = ", ".join(arguments)
                yield f"vLLM's {name} cannot be called with ({given}): {error}"


def faults_of_features(needed: Iterable[tuple[Any, str]]) -> Iterator[str]:
    """Yield the attributes that vLLM's classes lack, where fields of data classes and attributes
    set by `__init__` count as present.
    """
    for owner, name in needed:
        sets = getattr(getattr(owner, "__init__", None), "__code__", None)
        if (
            not hasattr(owner, name)
            and name not in getattr(owner, "__annotations__", ())
            and name not in getattr(sets, "co_names", ())
        ):
            yield f"vLLM's {getattr(owner, '__name__', owner)} has no {name}"


def _parameters(hook: Any) -> list[str]:
    """Return the names of a hook's required parameters; ANY: the hook accepts any arguments."""
    if isinstance(hook, property):
        return ["self"]
    called = hook.__func__ if isinstance(hook, classmethod) else hook
    parameters = inspect.signature(called).parameters.values()
    if any(each.kind is each.VAR_POSITIONAL for each in parameters):
        return ANY
    return [each.name for each in parameters if each.kind is not each.VAR_KEYWORD]
