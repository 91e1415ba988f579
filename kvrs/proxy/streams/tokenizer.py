"""The model's tokenizer, for text that the proxy makes."""

import asyncio
import logging
from pathlib import Path

from tokenizers import Tokenizer

from kvrs.errors import ConfigError
from kvrs.proxy.backends.model_files import LocalModel, ModelFiles
from kvrs.text.output import load_tokenizer

log = logging.getLogger(__name__)

_CONVERT = "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) of transformers writes it"


class LazyTokenizer:
    """Loads the served model's tokenizer once, off the event loop, because a large one takes a
    second: at the proxy's start, or before the first vLLM that names the model is used.
    """

    def __init__(self, files: ModelFiles) -> None:
        self.files = files
        self._loading: dict[Path, asyncio.Task[Tokenizer]] = {}

    @property
    def available(self) -> bool:
        """Return whether the model has a tokenizer; if a vLLM names the model, it may be found
        later.
        """
        return self.files.served is not None and self.files.served.has_tokenizer

    async def check(self) -> None:
        """Load the tokenizer; without one, log what is missing and the consequences.

        Raises:
            ConfigError: its file cannot be read, or is not a tokenizer.
        """
        if self.available:
            await self.load()
        elif self.files.directory is not None:
            log.warning(
                "no tokenizer.json: streams of plain engines are continued inexactly",
                extra={"model": self.files.directory, "remedy": _remedy(self.files.directory)},
            )

    async def prepare(self, root: str) -> None:
        """Load the tokenizer of a model that a server reports, before the server may be used;
        without one, or with an unreadable file, do nothing.
        """
        model = self.files.of(root) if root else self.files.served
        if model is None or model.directory is None or not model.has_tokenizer:
            return
        try:
            await self._load(model, model.directory)
        except ConfigError as error:
            model.has_tokenizer = False
            log.warning("the tokenizer that was found is not used", extra={"cause": str(error)})

    async def load(self) -> Tokenizer:
        """Load and return the tokenizer.

        Raises:
            ConfigError: no tokenizer, or an unreadable one.
        """
        model, directory = self.files.served, self.files.directory
        if model is None or directory is None:
            raise ConfigError(
                "cluster.model: missing; the proxy needs its tokenizer to turn ids into text"
            )
        if not self.available:
            raise ConfigError(
                f"cluster.model: {directory} has no tokenizer.json; {_remedy(directory)}"
            )
        return await self._load(model, directory)

    async def _load(self, model: LocalModel, directory: Path) -> Tokenizer:
        if (loading := self._loading.get(directory)) is None:
            loading = asyncio.create_task(asyncio.to_thread(_read, model, directory))
            self._loading[directory] = loading
        # Shield the task: a waiter may be cancelled while others still wait for it.
        return await asyncio.shield(loading)


def _read(model: LocalModel, directory: Path) -> Tokenizer:
    tokenizer = load_tokenizer(directory)
    model.longest_token = max(map(len, tokenizer.get_vocab(with_added_tokens=True)), default=1)
    return tokenizer


def _remedy(directory: Path) -> str:
    slow = directory / "tokenizer.model"
    return f"{_CONVERT}, from {slow.name}" if slow.exists() else _CONVERT
