"""The configuration in effect: where each value comes from, and what differs between two."""

from collections.abc import Iterator
from typing import Any

from kvrs.config.commented import KeyPath, commented_yaml, shown_path
from kvrs.config.file import Config, checked
from kvrs.config.source import Source, leaves


def origins(source: Source) -> dict[KeyPath, str]:
    """Where each value of the configuration comes from.

    Raises:
        ConfigError: the source holds faults.
    """
    plain = _plain(checked(source))
    defaults = dict(leaves(_plain(Config())))
    return {
        path: source.place_of(path) or _unnamed(path, value, defaults)
        for path, value in leaves(plain)
    }


def show(source: Source) -> str:
    """The whole configuration as YAML, with the origin of each value as its comment."""
    found = origins(source)
    return commented_yaml(_plain(checked(source)), found.get)


def show_json(source: Source) -> dict[str, Any]:
    """The same as an object: `config`, and `from` with the origin by path."""
    config = checked(source)
    found = {shown_path(path): text for path, text in origins(source).items()}
    return {"config": _plain(config), "from": found}


def differences(first: Config, second: Config) -> Iterator[dict[str, Any]]:
    """Each key that two configurations set differently in effect, with the values as `first` and
    `second`; of an item of a list that only one has, one of the two.
    """
    sides = {"first": dict(leaves(_plain(first))), "second": dict(leaves(_plain(second)))}
    for path in sides["first"] | sides["second"]:
        values = {side: found[path] for side, found in sides.items() if path in found}
        if len(values) == 1 or values["first"] != values["second"]:
            yield {"key": shown_path(path), **values}


def _unnamed(path: KeyPath, value: Any, defaults: dict[KeyPath, Any]) -> str:
    """The origin of a value that stands nowhere: defaults are constants, or set by a profile."""
    return "gossip.profile" if path[0] == "gossip" and value != defaults[path] else "default"


def _plain(config: Config) -> dict[str, Any]:
    return config.model_dump(mode="json")
