"""The model's tokenizer, for the text that a proxy makes itself."""

import asyncio
import logging
from pathlib import Path

from tokenizers import Tokenizer

from kvrs.errors import ConfigError
from kvrs.text.output import load_tokenizer

log = logging.getLogger(__name__)

_CONVERT = "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) of transformers writes it"


class LazyTokenizer:
    """Loads the tokenizer of `cluster.model` once, off the event loop: a large one takes a second.
    A proxy does so when it starts.
    """

    def __init__(self, model_directory: str | None) -> None:
        self._directory = None if model_directory is None else Path(model_directory)
        # Fixed here: what is promised to a client at admission must hold at its recovery.
        self.available = (
            self._directory is not None and (self._directory / "tokenizer.json").exists()
        )
        self.longest_token: int | None = None  # In characters; None: not known yet.
        self._loading: asyncio.Task[Tokenizer] | None = None

    async def check(self) -> None:
        """Load the tokenizer; where there is none, log what is missing and what follows.

        Raises:
            ConfigError: its file cannot be read, or is none.
        """
        if self.available:
            await self.load()
        elif self._directory is not None:
            log.warning(
                "no tokenizer.json: streams of plain engines are continued inexactly",
                extra={"model": self._directory, "remedy": self._remedy()},
            )

    async def load(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            ConfigError: there is none, or it cannot be read.
        """
        if self._directory is None:
            raise ConfigError(
                "cluster.model: missing; the proxy needs its tokenizer to turn ids into text"
            )
        if not self.available:
            raise ConfigError(
                f"cluster.model: {self._directory} has no tokenizer.json; {self._remedy()}"
            )
        if self._loading is None:
            self._loading = asyncio.create_task(asyncio.to_thread(self._load, self._directory))
        # A waiter may be cancelled while others still wait.
        return await asyncio.shield(self._loading)

    def _load(self, directory: Path) -> Tokenizer:
        tokenizer = load_tokenizer(directory)
        self.longest_token = max(map(len, tokenizer.get_vocab(with_added_tokens=True)), default=1)
        return tokenizer

    def _remedy(self) -> str:
        assert self._directory is not None
        slow = self._directory / "tokenizer.model"
        return f"{_CONVERT}, from {slow.name}" if slow.exists() else _CONVERT
