"""LoRA adapters in the keys of rows. vLLM identifies an adapter by name and path, where another
server may have other files, so keys at agents also contain the files' digest.

Only the connector sees a request's adapter; the tier and the policy find the adapter here while
vLLM calls them for the request.
"""

import hashlib
import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvrs.engines import fingerprint
from kvrs.errors import KvrsError

log = logging.getLogger(__name__)

_GROUP_BYTES = 4  # Bytes at the end of vLLM's key that hold the number of the KV cache group.


class LoraAdapter:
    """The files of an adapter, whose digest is part of the keys of the adapter's rows. `path` None:
    the base model.
    """

    def __init__(self, path: str | None) -> None:
        self._directory = None if path is None else Path(path)
        self._lock = threading.Lock()
        self._paths: list[Path] = []
        self._digest = b""
        self._signature: fingerprint.Signature | None = None
        self._refused = False

    def learn(self) -> None:
        """Compute the digest of the adapter's files, once; this may take a while."""
        with self._lock:
            if self._directory is None or self._signature is not None or self._refused:
                return
            try:
                if not self._directory.is_dir():
                    raise KvrsError(f"{self._directory} is not a directory")
                found = sorted(self._directory.rglob("*"))
                self._paths = [*fingerprint.on_the_way(self._directory), *found]
                signature = fingerprint.signature_of(self._paths)
                digest = fingerprint.digest_of(each for each in found if each.is_file())
                if signature != fingerprint.signature_of(self._paths):
                    raise KvrsError(f"{self._directory} changes")
                self._digest, self._signature = digest, signature
            except (KvrsError, OSError) as error:
                self._refuse(error)

    def scoped(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """Return the keys under which agents know these rows; empty if the adapter's files are
        unknown, or have changed since the engine read them.
        """
        if self._directory is None:
            return keys
        if self._signature is None or self._refused:
            return []
        try:
            if fingerprint.signature_of(self._paths) != self._signature:
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
    """Set the adapter of the request that vLLM passes to the tier next, until `end`."""
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
    """Return the adapter of the request for which vLLM calls the tier now; None: no request."""
    return _current
