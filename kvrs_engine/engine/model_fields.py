"""A typed reader of JSON objects in a model directory; every error names the file and the field."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any, NoReturn

from kvrs.errors import ConfigError


class Fields:
    """The top-level object of the file at `path`, or the section at `prefix`."""

    def __init__(self, path: Path, values: Any = None, prefix: str = "") -> None:
        self.path = path
        self.prefix = prefix
        self.values: dict[str, Any] = _read_object(path) if values is None else values

    def refuse(self, name: str, value: object, allowed: str) -> NoReturn:
        raise ConfigError(f"{self.path}: {self.prefix}{name}: got {value!r}; allowed: {allowed}")

    def _get(self, name: str, default: Any) -> Any:
        # Hugging Face writes null for "not set".
        value = self.values.get(name)
        if value is None and default is None:
            raise ConfigError(f"{self.path}: {self.prefix}{name}: missing")
        return default if value is None else value

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.refuse(name, value, "a whole number from 1")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            self.refuse(name, value, "a number above 0")
        return float(value)

    def flag(self, name: str, *, default: bool = False) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            self.refuse(name, value, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._get(name, default)
        if not isinstance(value, str):
            self.refuse(name, value, "a string")
        return value

    def texts(self, name: str) -> list[str]:
        """Return a list of strings, empty if the field is not set."""
        value = self._get(name, [])
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            self.refuse(name, value, "a list of strings")
        return value

    def whole_numbers(self, name: str, below: int) -> list[int]:
        """Return a list of whole numbers, empty if the field is not set."""
        value = self._get(name, [])
        if not isinstance(value, list) or not all(
            isinstance(one, int) and not isinstance(one, bool) and 0 <= one < below for one in value
        ):
            self.refuse(name, value, f"a list of whole numbers from 0 to {below - 1}")
        return value

    def section(self, name: str) -> "Fields | None":
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.refuse(name, value, "an object")
        return Fields(self.path, value, f"{self.prefix}{name}.")

    def demand(self, name: str, allowed: Collection[str], default: str | None = None) -> str:
        """Return the text of a field, which must have one of the allowed values."""
        value = self.text(name, default)
        if value not in allowed:
            self.refuse(name, value, ", ".join(sorted(allowed)))
        return value


def _read_object(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: got a {type(values).__name__}; allowed: an object")
    return values
