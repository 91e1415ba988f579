"""Files of the served model on this machine: the shape of its KV, its size, its tokenizer."""

import logging
from pathlib import Path

from kvrs.errors import ConfigError
from kvrs.profiles.guess import ModelSize, size_of
from kvrs.protocol.geometry import KvGeometry
from kvrs.proxy.backends.generation_config import default_max_tokens, default_sampling
from kvrs.proxy.backends.model_geometry import geometry_of, read_config

log = logging.getLogger(__name__)

_CONFIG = "config.json"
# KV of Llama-3.1-8B in 16 bits, assumed for a model without files here.
_USUAL_KV = KvGeometry(layers=32, kv_heads=8, head_dim=128, dtype_bytes=2, page_size_tokens=16)


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


class ModelFiles:
    """Files of the model that is configured or, if none is, of the model whose path a vLLM server
    reports (`root`).
    """

    def __init__(self, given: str | None) -> None:
        self._is_given = given is not None
        self.model = given  # Path or name of the model; None: not known yet.
        # Directory of the model; None: unknown, or not on this machine.
        self.directory: Path | None = None
        self.has_tokenizer = False
        # Output limit of a chat without `max_tokens`, by the model's files; None: none.
        self.default_max_tokens: int | None = None
        self.default_sampling: dict[str, float] = {}
        if given is not None:
            self._found(find_model(given) or Path(given))

    def report(self, root: str) -> None:
        """Take the path of the model that a vLLM serves, and look for its files, if no model is
        configured.
        """
        if self._is_given or self.model == root:
            return
        self.model = root
        directory = find_model(root)
        if directory is not None:
            self._found(directory)
            log.info("model found", extra={"model": root, "directory": directory})
        else:
            extra = {"model": root, "remedy": f"cluster.model, or {how_to_get(root)}"}
            log.warning("no files of the model here: the size of its KV is assumed", extra=extra)

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
        if self.directory is None:
            return None
        try:
            return size_of(read_config(self.directory / _CONFIG))
        except ConfigError:
            return None

    @property
    def vocabulary(self) -> int | None:
        """Number of the model's token ids; None: unknown."""
        if self.directory is None:
            return None
        try:
            size = read_config(self.directory / _CONFIG).get("vocab_size")
        except ConfigError:
            return None
        return size if isinstance(size, int) else None

    def _found(self, directory: Path) -> None:
        self.directory = directory
        # Read only once: what the proxy promised when it admitted a stream must hold at the
        # recovery.
        self.has_tokenizer = (directory / "tokenizer.json").exists()
        self.default_max_tokens = default_max_tokens(directory)
        self.default_sampling = default_sampling(directory)
