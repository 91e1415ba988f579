"""The part of an engine that owns weights and KV: it computes batches, and knows nothing of
requests.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from kvrs.config.engine import EngineSettings
from kvrs.errors import ConfigError
from kvrs.protocol.geometry import PAGE_LAYOUT, KvGeometry
from kvrs_engine.elastic import grain
from kvrs_engine.engine.allocator import keep_freed_memory
from kvrs_engine.engine.anchored import AnchoredMemory, AnchoredPool
from kvrs_engine.engine.kv_pool import KvPool
from kvrs_engine.engine.layers.step import build_step, pages_per_block
from kvrs_engine.engine.layers.tiles import TILE_ROWS, check_batched_products
from kvrs_engine.engine.model_config import ModelConfig
from kvrs_engine.engine.models.digests import weights_digest
from kvrs_engine.engine.models.loading import load_decoder
from kvrs_engine.engine.models.probe import probe_digest
from kvrs_engine.engine.models.reading import WeightReading
from kvrs_engine.engine.models.weights import Weights
from kvrs_engine.engine.staging import PagePool
from kvrs_engine.scheduling.sequences import Chunk

_DTYPE_BYTES = 4  # Everything is computed and kept in float32.


class ModelWorker(ABC):
    """The computing side of an engine: a `Worker`, or the ranks of an instance together."""

    pool: PagePool
    fingerprint: str
    gpus: list[str] | None  # The boards' NVML uuids; None where torch does not report them.

    def __init__(self, config: ModelConfig, settings: EngineSettings) -> None:
        self.settings, self.geometry = settings, geometry_of(config, settings)
        self.vocab_size, self.eos_token_ids = config.vocab, end_tokens_of(config)
        self.max_positions = min(settings.max_model_len, config.max_positions)
        self.gpus = []

    @abstractmethod
    def execute(self, chunks: Sequence[Chunk]) -> Tensor:
        """Compute a batch as `Worker.execute` does; several ranks may raise RanksLostError."""


class Worker(ModelWorker):
    """One copy of a model with its KV pages.

    The logits of a token depend on the tokens before it in its own sequence and on nothing else, to
    the last bit: not on the batch, not on how a prompt was cut into chunks, not on whether KV was
    computed here or brought in as pages.
    """

    pool: KvPool

    def __init__(
        self,
        model_directory: Path,
        settings: EngineSettings,
        anchored: AnchoredMemory | None = None,
        reading: WeightReading | None = None,
    ) -> None:
        """Load a Hugging Face directory, or attach what an earlier process has loaded. Then there
        are pages after `take_memory`. `reading` begins if any is read, and is told what.

        Raises:
            ConfigError: the directory or the settings are wrong.
            KvrsError: this machine's matrix library cannot compute exactly.
        """
        device = _device(settings.device)
        keep_freed_memory()
        # Four engines share a machine; and a loop split between threads would end in other SIMD
        # remainders.
        torch.set_num_threads(1)
        torch.set_float32_matmul_precision("highest")
        config = ModelConfig.from_directory(model_directory)
        weights = Weights(model_directory, reading)
        super().__init__(config, settings)
        self.gpus = _gpus(device)
        with torch.inference_mode():
            shared = None
            if anchored is not None:
                shared = anchored.decoder(config, weights, model_directory, self.max_positions)
            if shared is None:
                model = load_decoder(config, weights, self.max_positions, device)
                shared = model, weights_digest(model, model_directory, weights.files)
            self.model, root = shared
            check_attention(config, settings.page_size_tokens, device)
        self.fingerprint = fingerprint_of(arithmetic_of(config, self.geometry, device), root)
        self._memory = anchored
        self.anchored: AnchoredPool | None = None
        # Outside of inference mode: `store` writes into the pool from other threads too.
        if anchored is None:
            self.pool = KvPool(self.geometry, settings.pages, device)

    def take_memory(self, start: int) -> None:
        """Take the pages of anchored memory, as that start of the instance: to be called once, and
        before anything is computed. Without such memory there is nothing to do.

        Raises:
            ConfigError: the agent refuses.
        """
        if self._memory is None:
            return
        settings = self.settings
        self.anchored = self._memory.pool(
            start, self.geometry, settings.pages, settings.max_running, self.fingerprint
        )
        self.pool = (
            KvPool(self.geometry, settings.pages, torch.device("cpu"))
            if self.anchored is None
            else self.anchored.pool
        )

    def execute(self, chunks: Sequence[Chunk]) -> Tensor:
        """Compute one batch: its KV goes into the chunks' pages.

        Returns:
            Logits `[sum of the chunks' logits, vocab]`, float32, on the CPU, in the order of the
            chunks and of their tokens.
        """
        assert chunks, "a batch has at least one chunk"
        for chunk in chunks:
            assert chunk.first_position + len(chunk.token_ids) <= self.max_positions, (
                "the scheduler keeps to max_positions"
            )
            assert all(0 <= token < self.vocab_size for token in chunk.token_ids), (
                "token ids are checked on arrival"
            )
        with torch.inference_mode():
            return self.model.forward(build_step(chunks, self.pool), self.pool).cpu()


def geometry_of(config: ModelConfig, settings: EngineSettings) -> KvGeometry:
    return KvGeometry(
        layers=config.layers,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        dtype_bytes=_DTYPE_BYTES,
        page_size_tokens=settings.page_size_tokens,
    )


def end_tokens_of(config: ModelConfig) -> frozenset[int]:
    # Some checkpoints name end tokens that their weights do not have.
    return frozenset(token_id for token_id in config.eos_token_ids if token_id < config.vocab)


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "cluster.engine.device: got 'cuda'; allowed: 'cpu' (this machine has no "
            "CUDA device that torch can use)"
        )
    return torch.device(name)


def _gpus(device: torch.device) -> list[str] | None:
    """The boards' NVML uuids; None where this torch does not report them."""
    if device.type != "cuda":
        return []
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return None if uuid is None else [f"GPU-{uuid}"]


def check_attention(config: ModelConfig, page_size_tokens: int, device: torch.device) -> None:
    """Prove on this machine that attention over pages of that size is exact.

    Raises:
        KvrsError: it is not.
    """
    rows = config.heads // config.kv_heads * TILE_ROWS
    block_tokens = pages_per_block(page_size_tokens) * page_size_tokens
    check_batched_products(rows, config.head_dim, block_tokens, device)
    check_batched_products(rows, block_tokens, config.head_dim, device)


def fingerprint_of(arithmetic: bytes, weights_root: bytes) -> str:
    """Equal for two workers exactly when their KV pages are the same bits."""
    total = hashlib.blake2b(digest_size=16, person=b"kvrs-model")
    total.update(arithmetic)
    total.update(weights_root)
    return total.hexdigest()


def arithmetic_of(config: ModelConfig, geometry: KvGeometry, device: torch.device) -> bytes:
    """All that decides bits beside the weights.

    The same weights on other hardware, or under another release of torch, give nearly the same
    numbers: near enough to look right, not near enough to continue a stream exactly. So the
    arithmetic is part of the fingerprint: its names, and results of it. So are the names of the
    fields of ModelConfig and KvGeometry, but no name of a class or module. Models without experts
    had no field of them when their pages were first exchanged, and all had those of forms that are
    not served any more.
    """
    # A set has no order of its own, and the end token is no part of what KV means.
    fields = {
        name: value
        for name, value in msgspec.to_builtins(config).items()
        if name != "eos_token_ids" and (name, value) != ("experts", None)
    }
    fields |= {"embedding": config.hidden}
    fields |= dict.fromkeys(("norm_affine", "norm_first", "final_norm"), True)
    where = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else torch.backends.cpu.get_cpu_capability()
    )
    return msgspec.json.encode(
        [
            *(fields, geometry, PAGE_LAYOUT, grain.VERSION),
            *(device.type, where, str(torch.__version__)),
            probe_digest(config, geometry.page_size_tokens, device).hex(),
        ],
        order="sorted",
    )
