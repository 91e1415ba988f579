"""Which memory is used by no process, and since when.

Pure: `now_s` is an argument, and whether memory is in use is told by its locks.
"""

from collections.abc import Mapping


class OrphanBook:
    """Since when each piece of memory has been unused."""

    def __init__(self, orphan_s: float) -> None:
        self._orphan_s = orphan_s
        self._since_s: dict[str, float] = {}

    def look(self, used: Mapping[str, bool], now_s: float) -> list[str]:
        """All memory that there is, and whether it is in use. Returns what is to be given back."""
        self._since_s = {
            name: self._since_s.get(name, now_s) for name, is_used in used.items() if not is_used
        }
        return [
            name for name, since_s in self._since_s.items() if now_s - since_s >= self._orphan_s
        ]
