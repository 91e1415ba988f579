"""Names under which a model is asked for: its own, its aliases, and those of its adapters."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import msgspec

from kvrs.protocol.instance import InstanceInfo, Role


class ServedName(msgspec.Struct, frozen=True):
    """A name that clients may ask for."""

    name: str
    # An instance needs it among its `name_keys` to get a stream of the name; empty: all have it.
    key: str = ""
    parent: str | None = None  # Of an adapter: the model that it changes.
    root: str | None = None  # Of an adapter: where its weights lie.

    @property
    def adapter(self) -> str:
        """The part of the salt of its pages that its KV needs; empty: none."""
        return "" if self.parent is None else self.key


def listed_names(info: InstanceInfo) -> list[str]:
    """The names that an instance serves, for people."""
    names = info.names
    return [info.model, *names.aliases, *(adapter.name for adapter in names.adapters)]


def served_names(model: str, infos: Iterable[InstanceInfo]) -> dict[str, ServedName]:
    """All names that both a prefill and a decode instance serve, the model's own first. An adapter
    that instances have from different places is that of most instances, as a whole.
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
    # A role of which no instance is known yet may have anything.
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


class NameBook:
    """All names that clients may ask for, until what the instances serve has changed."""

    def __init__(self, infos: Callable[[], Iterable[InstanceInfo | None]]) -> None:
        self._infos = infos
        self._found: Mapping[str, ServedName] | None = None

    def changed(self) -> None:
        self._found = None

    def served(self, model: str | None) -> Mapping[str, ServedName]:
        """By name, the model's own first; none before an instance has come up."""
        if model is None:
            return {}
        if self._found is None:
            self._found = served_names(model, (i for i in self._infos() if i is not None))
        return self._found


def is_served_at(info: InstanceInfo | None, key: str) -> bool:
    """True if an instance serves the name of this key."""
    return not key or (info is not None and key in info.name_keys)
