"""The model's tokenizer, for text that the proxy makes."""

import asyncio
import logging
from pathlib import Path

from tokenizers import Tokenizer

from kvrs.errors import ConfigError
from kvrs.proxy.backends.model_files import ModelFiles
from kvrs.text.output import load_tokenizer

log = logging.getLogger(__name__)

_CONVERT = "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) of transformers writes it"


class LazyTokenizer:
    """Loads the model's tokenizer once, off the event loop, because a large one takes a second: at
    the proxy's start, or when the first vLLM has named the model.
    """

    def __init__(self, files: ModelFiles) -> None:
        self.files = files
        # Characters of the longest token; None: not known yet.
        self.longest_token: int | None = None
        self._loading: asyncio.Task[Tokenizer] | None = None

    @property
    def available(self) -> bool:
        """Return whether the model has a tokenizer; if a vLLM names the model, it may be found
        later.
        """
        return self.files.has_tokenizer

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
                extra={"model": self.files.directory, "remedy": self._remedy()},
            )

    async def found(self) -> None:
        """Load a tokenizer that was found since the proxy's start; without a tokenizer, or with an
        unreadable file, do nothing.
        """
        if not self.available or self._loading is not None:
            return
        try:
            await self.load()
        except ConfigError as error:
            self.files.has_tokenizer = False
            log.warning("the tokenizer that was found is not used", extra={"cause": str(error)})

    async def load(self) -> Tokenizer:
        """Load and return the tokenizer.

        Raises:
            ConfigError: no tokenizer, or an unreadable one.
        """
        directory = self.files.directory
        if directory is None:
            raise ConfigError(
                "cluster.model: missing; the proxy needs its tokenizer to turn ids into text"
            )
        if not self.available:
            raise ConfigError(f"cluster.model: {directory} has no tokenizer.json; {self._remedy()}")
        if self._loading is None:
            self._loading = asyncio.create_task(asyncio.to_thread(self._load, directory))
        # Shield the task: a waiter may be cancelled while others still wait for it.
        return await asyncio.shield(self._loading)

    def _load(self, directory: Path) -> Tokenizer:
        tokenizer = load_tokenizer(directory)
        self.longest_token = max(map(len, tokenizer.get_vocab(with_added_tokens=True)), default=1)
        return tokenizer

    def _remedy(self) -> str:
        assert self.files.directory is not None
        slow = self.files.directory / "tokenizer.model"
        return f"{_CONVERT}, from {slow.name}" if slow.exists() else _CONVERT
