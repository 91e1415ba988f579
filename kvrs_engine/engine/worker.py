"""The part of an engine that has the weights and the KV and computes batches."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from kvrs.config.cluster import EngineSettings
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

_DTYPE_BYTES = 4  # Weights and computations are in float32.


class ModelWorker(ABC):
    """The computing part of an engine: a `Worker`, or all ranks of an instance."""

    pool: PagePool
    fingerprint: str
    gpus: list[str] | None  # NVML uuids of the boards; None: torch does not report them.

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

    The logits of a token depend, to the last bit, only on the earlier tokens of its own sequence:
    not on the batch, not on the chunks of a prompt, and not on whether KV was computed or fetched.
    """

    pool: KvPool

    def __init__(
        self,
        model_directory: Path,
        settings: EngineSettings,
        anchored: AnchoredMemory | None = None,
        reading: WeightReading | None = None,
    ) -> None:
        """Load a Hugging Face directory, or attach `anchored` weights; then pages are available
        after `take_memory`. `reading` tracks the progress.

        Raises:
            ConfigError: the directory or the settings are wrong.
            KvrsError: this machine's matrix library cannot compute exactly.
        """
        device = _device(settings.device)
        keep_freed_memory()
        # Engines share a machine, and splitting a loop among threads would change SIMD remainders.
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
        # Outside of inference mode, because other threads write into the pool too.
        if anchored is None:
            self.pool = KvPool(self.geometry, settings.pages, device)

    def take_memory(self, start: int | None) -> None:
        """Take the pages of anchored memory, if any, for start number `start`; None: take pages of
        this process's own. Call this once, before any computation.

        Raises:
            ConfigError: the agent refuses.
        """
        if self._memory is None:
            return
        settings = self.settings
        if start is not None:
            self.anchored = self._memory.pool(
                start, self.geometry, settings.pages, settings.max_running, self.fingerprint
            )
        self.pool = (
            KvPool(self.geometry, settings.pages, torch.device("cpu"))
            if self.anchored is None
            else self.anchored.pool
        )

    def execute(self, chunks: Sequence[Chunk]) -> Tensor:
        """Compute one batch, and write its KV into the chunks' pages.

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
    # Some checkpoints name end tokens beyond their vocabulary.
    return frozenset(token_id for token_id in config.eos_token_ids if token_id < config.vocab)


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "cluster.engine.device: got 'cuda'; allowed: 'cpu' (this machine has no "
            "CUDA device that torch can use)"
        )
    return torch.device(name)


def _gpus(device: torch.device) -> list[str] | None:
    """Return the NVML uuids of the boards; None: torch does not report them."""
    if device.type != "cuda":
        return []
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return None if uuid is None else [f"GPU-{uuid}"]


def check_attention(config: ModelConfig, page_size_tokens: int, device: torch.device) -> None:
    """Prove on this machine that attention over pages of this size is exact.

    Raises:
        KvrsError: attention is not exact.
    """
    rows = config.heads // config.kv_heads * TILE_ROWS
    block_tokens = pages_per_block(page_size_tokens) * page_size_tokens
    check_batched_products(rows, config.head_dim, block_tokens, device)
    check_batched_products(rows, block_tokens, config.head_dim, device)


def fingerprint_of(arithmetic: bytes, weights_root: bytes) -> str:
    """Return the fingerprint, equal for two workers if their KV pages have the same bits."""
    total = hashlib.blake2b(digest_size=16, person=b"kvrs-model")
    total.update(arithmetic)
    total.update(weights_root)
    return total.hexdigest()


def arithmetic_of(config: ModelConfig, geometry: KvGeometry, device: torch.device) -> bytes:
    """Return a digest of all that determines the bits of KV beside the weights.

    The same weights on other hardware, or with another release of torch, give slightly different
    numbers, which cannot continue a stream exactly. So the digest covers the names of the hardware
    and the software, and sample results. It also covers the names of the fields of ModelConfig and
    KvGeometry. For compatibility with older pages, models without experts have no field of experts,
    and all models have the fields of forms that are no longer served.
    """
    # Sets have no order, and end tokens do not affect KV.
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
