"""LoRA adapters in the keys of rows: vLLM names an adapter by its name and path, which may have
other files on another server. At agents a key has the digest of the files beside these.

The connector is told of the request with its adapter, the tier and the policy are only given the
context of the request: they find the adapter in it.
"""

import hashlib
import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvrs.engines import files
from kvrs.errors import KvrsError

log = logging.getLogger(__name__)

_GROUP_BYTES = 4  # vLLM's number of the KV cache group, at the end of a key.


class LoraAdapter:
    """The files of one adapter, by which its keys differ. `path` None: the model alone."""

    def __init__(self, path: str | None) -> None:
        self._directory = None if path is None else Path(path)
        self._lock = threading.Lock()
        self._paths: list[Path] = []
        self._digest = b""
        self._signature: files.Signature | None = None
        self._refused = False

    def learn(self) -> None:
        """Read the files at the first call, which may take a while."""
        with self._lock:
            if self._directory is None or self._signature is not None or self._refused:
                return
            try:
                if not self._directory.is_dir():
                    raise KvrsError(f"{self._directory} is no directory; allowed: the adapter's")
                found = sorted(self._directory.rglob("*"))
                self._paths = [*files.on_the_way(self._directory), *found]
                signature = files.signature_of(self._paths)
                digest = files.digest_of(each for each in found if each.is_file())
                if signature != files.signature_of(self._paths):
                    raise KvrsError(f"{self._directory} changes")
                self._digest, self._signature = digest, signature
            except (KvrsError, OSError) as error:
                self._refuse(error)

    def scoped(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """The keys at agents; none where the files are not known, or are others than those that the
        engine has read.
        """
        if self._directory is None:
            return keys
        if self._signature is None or self._refused:
            return []
        try:
            if files.signature_of(self._paths) != self._signature:
                raise KvrsError(f"{self._directory} has changed")
        except (KvrsError, OSError) as error:
            self._refuse(error)
            return []
        return [hashlib.sha256(self._digest + key).digest() + key[-_GROUP_BYTES:] for key in keys]

    def _refuse(self, error: Exception) -> None:
        if not self._refused:
            log.error("rows of an adapter are not shared: %s", error)
        self._refused = True


BASE = LoraAdapter(None)
_adapters: dict[str, LoraAdapter] = {}
_current: LoraAdapter | None = None


def begin(lora_request: Any) -> None:
    """Let the tier find the adapter of the request that it is told of next, until `end`."""
    global _current
    if lora_request is None:
        _current = BASE
        return
    path = str(lora_request.lora_path)
    if path not in _adapters:
        _adapters[path] = LoraAdapter(path)
        threading.Thread(target=_adapters[path].learn, name="kvrs-adapter", daemon=True).start()
    _current = _adapters[path]


def end() -> None:
    global _current
    _current = None


def current() -> LoraAdapter | None:
    """Return the adapter of the request that the connector is told of; None: of none."""
    return _current
