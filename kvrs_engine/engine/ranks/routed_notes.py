"""The note about how often an instance's experts are chosen, in the directory of its node's agent,
for the process that is started in its place.
"""

import logging
import math
import os
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

import msgspec

from kvrs.ids import InstanceId
from kvrs.transfer.store.directory import NOTES, PrivateDirectory
from kvrs_engine.elastic.units import Units

log = logging.getLogger(__name__)

_VERSION = 1


class _Note(msgspec.Struct, frozen=True):
    version: int
    fingerprint: str  # Of the model.
    tiles: list[list[float]]  # By layer, then by expert; of a dense layer none.


class RoutingNotes:
    """The note of one instance."""

    def __init__(self, directory: Path, instance: InstanceId) -> None:
        """`directory`: that of the agent. Without one nothing is noted."""
        self._path = directory
        self._name = f"{NOTES}{quote(instance, safe='')}"

    def read(self, fingerprint: str, units: Units) -> list[list[float]] | None:
        """The counts of the last process; None: there are none, or not of this model."""
        try:
            with (
                PrivateDirectory(self._path) as directory,
                os.fdopen(directory.open_own(self._name, os.O_RDONLY), "rb") as file,
            ):
                note = msgspec.json.decode(file.read(), type=_Note)
            if (note.version, note.fingerprint) != (_VERSION, fingerprint):
                log.info("counts of experts are of another model", extra=self._where)
                return None
            _check(note.tiles, units)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            extra = {**self._where, "cause": str(error)}
            log.warning("counts of experts cannot be read and begin anew", extra=extra)
            return None
        return note.tiles

    def write(self, fingerprint: str, tiles: Sequence[Sequence[float]]) -> None:
        """The whole note or, where it cannot be written, none."""
        content = msgspec.json.encode(_Note(_VERSION, fingerprint, [[*own] for own in tiles]))
        try:
            with PrivateDirectory(self._path) as directory:
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
                with os.fdopen(directory.open_own(f"{self._name}.new", flags), "wb") as file:
                    file.write(content)
                directory.rename(f"{self._name}.new", self._name)
        except OSError as error:
            extra = {**self._where, "cause": str(error)}
            log.debug("counts of experts cannot be noted", extra=extra)

    @property
    def _where(self) -> dict[str, str]:
        return {"file": str(self._path / self._name)}


def _check(tiles: Sequence[Sequence[float]], units: Units) -> None:
    """Raises ValueError: they are not counts of these experts."""
    experts = len(units.mlp_bytes) // units.expert_parts
    wanted = [0 if layer in units.dense_layers else experts for layer in range(units.layers)]
    # A note that was made before any batch has none.
    if tiles and [*map(len, tiles)] != wanted:
        raise ValueError(f"counts by layer: got {[*map(len, tiles)]}; allowed: {wanted}")
    wrong = [count for own in tiles for count in own if not (math.isfinite(count) and count >= 0)]
    if wrong:
        raise ValueError(f"a count: got {wrong[0]}; allowed: numbers from 0")
