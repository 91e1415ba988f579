"""Names of a model in requests: its own, its aliases, and those of its adapters."""

from collections import Counter
from collections.abc import Iterable

import msgspec

from kvrs.protocol.instance import InstanceInfo, Role


class ServedName(msgspec.Struct, frozen=True):
    """A model name that clients may use."""

    name: str
    # Key that an instance must have among its `name_keys` to get streams of this name; empty: every
    # instance serves the name.
    key: str = ""
    parent: str | None = None  # Base model of an adapter; None: no adapter.
    root: str | None = None  # Path of an adapter's weights; None: no adapter.

    @property
    def adapter(self) -> str:
        """The adapter's part of the salt of its pages; empty: no adapter."""
        return "" if self.parent is None else self.key


def listed_names(info: InstanceInfo) -> list[str]:
    """Names that an instance serves, for display."""
    names = info.names
    return [info.model, *names.aliases, *(adapter.name for adapter in names.adapters)]


def served_names(model: str, infos: Iterable[InstanceInfo]) -> dict[str, ServedName]:
    """All names that both a prefill and a decode instance serve, the model's own first. If
    instances load an adapter from different places, the place of most instances counts.
    """
    infos = list(infos)
    found: dict[str, ServedName] = {}
    counts: dict[Role, Counter[str]] = {role: Counter() for role in (Role.PREFILL, Role.DECODE)}
    for info in infos:
        for alias in info.names.aliases:
            found.setdefault(alias, ServedName(alias, alias))
        for adapter in info.names.adapters:
            served = ServedName(adapter.name, adapter.key, model, adapter.root)
            found.setdefault(adapter.key, served)
        for role, count in counts.items():
            if info.role in (role, Role.BOTH):
                count.update(set(info.name_keys))
    # A role without a known instance may serve any name.
    needed = [
        count for role, count in counts.items() if any(i.role in (role, Role.BOTH) for i in infos)
    ]
    names = {model: ServedName(model)}
    for each in sorted(
        found.values(), key=lambda each: sum(c[each.key] for c in needed), reverse=True
    ):
        if all(count[each.key] for count in needed):
            names.setdefault(each.name, each)
    return names


def is_served_at(info: InstanceInfo, key: str) -> bool:
    """Return whether the instance serves the name with this key."""
    return not key or key in info.name_keys
