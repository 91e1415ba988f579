"""Comparison of a checkout's functions with those that kvrs was written for: each one that kvrs
wraps, overrides or relies on, by name.

`python -m distserve_patches.fingerprints` prints the table for the checkout that DISTSERVE_HOME
names.
"""

import functools
import hashlib
import importlib
import inspect
from typing import Any

from distserve_patches import checkout
from distserve_patches.fingerprint_table import COMMIT, TABLE
from kvrs.errors import ConfigError


def check() -> None:
    """Compare every function of the table.

    Raises:
        ConfigError: naming each that is missing or differs.
    """
    faults = []
    for module, hashes in TABLE.items():
        for name, expected in hashes.items():
            if (found := fingerprint(module, name)) != expected:
                what = "is not there" if found is None else "differs"
                faults.append(
                    f"{module}.{name}: {what}; kvrs was written for DistServe at commit {COMMIT}"
                )
    if faults:
        raise ConfigError(faults)


def fingerprint(module: str, name: str) -> str | None:
    """Hash of a function's source as upstream wrote it; none if there is no such function."""
    try:
        function = functools.reduce(_member, name.split("."), importlib.import_module(module))
    except (AttributeError, ImportError):
        return None
    # The source of a function that kvrs has wrapped is still the wrapped one's.
    return hashlib.blake2b(inspect.getsource(function).encode(), digest_size=8).hexdigest()


def _member(holder: Any, name: str) -> Any:
    found = getattr(holder, name)
    # Below Ray's decorator lies the class as upstream wrote it.
    metadata = getattr(found, "__ray_metadata__", None)
    return found if metadata is None else metadata.modified_class.__ray_actor_class__


def _print_table() -> None:
    checkout.import_plain(checkout.find(None), off_gpu=True)
    for module, names in TABLE.items():
        print(f'    "{module}": {{')
        for name in names:
            print(f'        "{name}": "{fingerprint(module, name)}",')
        print("    },")


if __name__ == "__main__":
    _print_table()
