"""Experiments that are measured in parts: a run goes on from the cells that the same code has
measured before, and adds as many as fit into its time.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from experiments.record import Record
from experiments.results import is_of_this_code, run_of


class Cells:
    """The cells of one result by name, kept under `cells` beside the settings that they have in
    common; `runs` has the circumstances of the runs before the last one, and `waiting` the names of
    the cells that are left to another run.
    """

    def __init__(self, out: Path, name: str, settings: Mapping[str, Any]) -> None:
        """Cells of other code, of other settings and of a void run do not count."""
        self._out, self._name, self._settings = out, name, dict(settings)
        self.found: dict[str, Any] = {}
        self._wanted: list[str] = []
        self._runs: list[Any] = []
        path = out / f"{name}.json"
        if not is_of_this_code(path):
            return
        document = json.loads(path.read_text())
        # As they come back from the file.
        same = json.loads(json.dumps(self._settings))
        if {key: document.get(key) for key in same} == same:
            self.found = document["cells"]
            self._runs = [*document["runs"], run_of(path)]

    def measure(
        self, names: Iterable[str], limit_s: float, measure: Callable[[str], Any], tell: Any = print
    ) -> None:
        """Those that are missing, in this order; none is begun that would go beyond the limit, if
        it took as long as the longest one before it. One of which `measure` returns None is left
        to another run.
        """
        begun_s, longest_s = time.monotonic(), 0.0
        self._wanted = [*names]
        for name in self._wanted:
            at_s = time.monotonic()
            if name in self.found:
                continue
            if longest_s and at_s - begun_s + longest_s > limit_s:
                tell(f"{name} and what follows: in another run")
                return
            cell = measure(name)
            took_s = time.monotonic() - at_s
            longest_s = max(longest_s, took_s)
            if cell is None:
                tell(f"{name}: in another run")
                continue
            self.found[name] = cell
            tell(f"{name}: {took_s:.0f} s")

    def keep(self, record: Record, figures: Mapping[str, Any], text: str) -> bool:
        """Keep the record; a void run replaces no result that holds. True if it is void."""
        document = {**self._settings, **figures, "cells": self.found, "runs": self._runs}
        if waiting := [name for name in self._wanted if name not in self.found]:
            document["waiting"] = waiting
        return record.keep_beside(self._out, self._name, document, text)
