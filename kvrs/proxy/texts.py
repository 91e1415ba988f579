"""The model's tokenizer, for the little text that a proxy makes itself."""

import asyncio
from pathlib import Path

from tokenizers import Tokenizer

from kvrs.errors import ConfigError
from kvrs.text.output import load_tokenizer


class Texts:
    """Loads the tokenizer of `cluster.model` when it is first needed, and not on the event loop: a large one takes a second."""

    def __init__(self, model_directory: str | None) -> None:
        self._directory = model_directory
        self._loading: asyncio.Task[Tokenizer] | None = None

    @property
    def available(self) -> bool:
        return self._directory is not None

    async def tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            ConfigError: there is none, or it cannot be read.
        """
        if self._directory is None:
            raise ConfigError(["cluster.model: missing; the proxy needs its tokenizer to turn ids into text"])
        if self._loading is None:
            self._loading = asyncio.create_task(asyncio.to_thread(load_tokenizer, Path(self._directory)))
        # One who waits may be cancelled; the others still want it.
        return await asyncio.shield(self._loading)
