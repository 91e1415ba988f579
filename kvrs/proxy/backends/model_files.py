"""Files of models on this machine: the shape of the KV, the size, the tokenizer; and which of the
models the cluster serves.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvrs.errors import ConfigError
from kvrs.profiles.guess import ModelSize, size_of
from kvrs.protocol.geometry import KvGeometry
from kvrs.proxy.backends.model_config import (
    default_max_tokens,
    default_sampling,
    geometry_of,
    read_config,
)

log = logging.getLogger(__name__)

_CONFIG, _TOKENIZER = "config.json", "tokenizer.json"
# KV of Llama-3.1-8B in 16 bits, assumed for a model without files here.
_USUAL_KV = KvGeometry(layers=32, kv_heads=8, head_dim=128, dtype_bytes=2, page_size_tokens=16)
# Fields of a config.json in which two models differ, and two copies of one do not.
_SHAPE = (
    *("architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
)
# Models that are remembered: those of servers that were looked at last.
_MOST_MODELS = 16


def find_model(model: str) -> Path | None:
    """Return the directory with the files of a model: the path itself, or the snapshot of that name
    in the cache of the Hugging Face hub; None: neither exists here. Nothing is downloaded.
    """
    if (Path(model) / _CONFIG).is_file():
        return Path(model)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(model, _CONFIG)
    except HFValidationError:  # Not a valid name of a model in the hub.
        return None
    return Path(found).parent if isinstance(found, str) else None


def how_to_get(model: str) -> str:
    """Return the command that downloads the files that kvrs reads into the hub's cache."""
    name = "NAME" if Path(model).is_absolute() else model
    return f"`hf download {name} --include '*.json'` (no weights)"


def fault_of_model(model: str) -> str:
    """Return the error line for a configured model whose files are not on this machine."""
    return (
        f"cluster.model: {model!r} is no directory with a config.json, and not in the cache of the "
        f"Hugging Face hub; allowed: such a directory, or a name, after {how_to_get(model)}"
    )


def _shape(fields: Mapping[str, Any]) -> list[Any]:
    return [fields.get(name) for name in _SHAPE]


class LocalModel:
    """One model, and what its files on this machine say of it."""

    def __init__(self, name: str, directory: Path | None, *, is_given: bool = False) -> None:
        self.name = name  # Path or name, as configured, or as a server reports it.
        self.directory = directory  # None: its files are not on this machine.
        self._is_given = is_given
        # The files are read only once: what the proxy promised when it admitted a stream must hold
        # at the recovery.
        self.has_tokenizer = directory is not None and (directory / _TOKENIZER).exists()
        self.longest_token: int | None = None  # Characters; None: its tokenizer is not loaded.
        # Output limit of a chat without `max_tokens`; None: none.
        self.default_max_tokens = None if directory is None else default_max_tokens(directory)
        self.default_sampling = dict[str, float]()
        if directory is not None:
            self.default_sampling = default_sampling(directory)

    def geometry(self, page_size_tokens: int) -> KvGeometry:
        """Return the shape of the model's KV; without files, that of a typical model.

        Raises:
            ConfigError: the configured directory lacks the file, or the file lacks a field.
        """
        if self.directory is not None:
            try:
                path = self.directory / _CONFIG
                return geometry_of(path, read_config(path), page_size_tokens)
            except ConfigError as error:
                if self._is_given:
                    raise
                log.warning("the size of the model's KV is assumed", extra={"cause": str(error)})
        return KvGeometry(
            _USUAL_KV.layers,
            _USUAL_KV.kv_heads,
            _USUAL_KV.head_dim,
            _USUAL_KV.dtype_bytes,
            page_size_tokens,
        )

    def size(self) -> ModelSize | None:
        """Size of the model; None: unknown."""
        return None if (fields := self.fields()) is None else size_of(fields)

    @property
    def vocabulary(self) -> int | None:
        """Number of the model's token ids; None: unknown."""
        size = (self.fields() or {}).get("vocab_size")
        return size if isinstance(size, int) else None

    def fields(self) -> dict[str, Any] | None:
        """Return the fields of the model's config.json; None: it is not here, or cannot be read."""
        if self.directory is None:
            return None
        try:
            return read_config(self.directory / _CONFIG)
        except ConfigError:
            return None


class ModelFiles:
    """The model that the cluster serves: the configured one or, if none is, the model of the first
    instance that was accepted. Models of other servers are looked at and never believed.
    """

    def __init__(self, given: str | None) -> None:
        self._given: LocalModel | None = None
        if given is not None:
            self._given = LocalModel(given, find_model(given) or Path(given), is_given=True)
        self.served = self._given  # None: not known yet.
        self._seen: dict[str, LocalModel] = {}  # By path or name, the last one looked at last.

    def of(self, root: str) -> LocalModel:
        """Return the model of a server that reports this path: the configured one, whose path may
        be another one here than there, or else that of the path.

        Raises:
            ConfigError: the path is here, too, and its config.json is not the configured model's.
        """
        if self._given is not None:
            if root != self._given.name and (directory := find_model(root)) is not None:
                theirs, own = LocalModel(root, directory).fields(), self._given.fields()
                if theirs and own and _shape(theirs) != _shape(own):
                    raise ConfigError(f"its model is {root!r}, cluster.model says {self.name!r}")
            return self._given
        found = self._seen.pop(root, None) or LocalModel(root, find_model(root))
        self._seen[root] = found
        if len(self._seen) > _MOST_MODELS:
            del self._seen[next(iter(self._seen))]
        return found

    def accept(self, root: str) -> None:
        """Take the model of an accepted instance as the served one, with all of its files or
        none.
        """
        if self._given is not None or not root or (self.name == root):
            return
        self.served = model = self.of(root)
        if model.directory is not None:
            log.info("model found", extra={"model": root, "directory": model.directory})
        else:
            extra = {"model": root, "remedy": f"cluster.model, or {how_to_get(root)}"}
            log.warning("no files of the model here: the size of its KV is assumed", extra=extra)

    def has_tokenizer_of(self, root: str) -> bool:
        """Return whether the model at `root` has the served model's tokenizer, as far as both are
        here.
        """
        served, other = self.served, self.of(root)
        if served is None or not (served.has_tokenizer and other.has_tokenizer):
            return True
        assert served.directory is not None
        assert other.directory is not None
        try:
            one, two = (
                (directory / _TOKENIZER).read_bytes()
                for directory in (served.directory, other.directory)
            )
        except OSError:
            return False
        return one == two

    @property
    def name(self) -> str | None:
        """Path or name of the served model; None: not known yet."""
        return None if self.served is None else self.served.name

    @property
    def directory(self) -> Path | None:
        """Directory of the served model; None: unknown, or not on this machine."""
        return None if self.served is None else self.served.directory
