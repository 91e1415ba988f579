"""The check at start that vLLM's interface is the one which the connector is written for, by its
features and not by its version.
"""

import inspect
from abc import update_abstractmethods
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

# Of these vLLM may have none: it asks for nothing then, and what they are for is done without.
OPTIONAL = {
    "bind_gpu_block_pool",
    "get_required_kvcache_layout",
    "has_pending_push_work",
    "requires_kv_delivery",
    "reset_cache",
    "set_xfer_handshake_metadata_pp_aware",
}
ANY = ["*"]


def fill_abstract(connector: type) -> list[str]:
    """Give a connector the hooks that it must have and does not know: they do nothing. Returns
    their names.
    """
    unknown = sorted(getattr(connector, "__abstractmethods__", ()))
    for name in unknown:
        setattr(connector, name, _nothing)
    update_abstractmethods(connector)
    return unknown


def faults_of_hooks(connector: type, bases: Sequence[type]) -> Iterator[str]:
    """Differences in the hooks that the connector overrides."""
    for name, hook in vars(connector).items():
        if name.startswith("_") or not (callable(hook) or isinstance(hook, classmethod | property)):
            continue
        found = [inspect.getattr_static(base, name, None) for base in bases]
        theirs = next((each for each in found if each is not None), None)
        if theirs is None:
            if name not in OPTIONAL:
                yield f"vLLM has no hook {name}"
            continue
        taken, given = _parameters(hook), _parameters(theirs)
        if type(theirs) is not type(hook) or (given != taken and taken is not ANY):
            yield (f"vLLM's hook {name} takes ({', '.join(given)}); allowed: ({', '.join(taken)})")


def faults_of_features(needed: Iterable[tuple[Any, str]]) -> Iterator[str]:
    """Which attributes of vLLM's objects are not there, and which fields of its data classes."""
    for owner, name in needed:
        if not hasattr(owner, name) and name not in getattr(owner, "__annotations__", ()):
            yield f"vLLM's {getattr(owner, '__name__', owner)} has no {name}"


def _parameters(hook: Any) -> list[str]:
    """Names of the parameters that are always given; ANY for a hook that takes what comes."""
    if isinstance(hook, property):
        return ["self"]
    called = hook.__func__ if isinstance(hook, classmethod) else hook
    parameters = inspect.signature(called).parameters.values()
    if any(each.kind is each.VAR_POSITIONAL for each in parameters):
        return ANY
    return [each.name for each in parameters if each.kind is not each.VAR_KEYWORD]


def _nothing(*args: Any, **more: Any) -> None:
    return None
