"""SwiftTransformer's model classes, computed by the decoder of kvrs: same tokens and KV bits as the
embedded engine.
"""

import time
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from distserve_patches.cpu.group import Group
from distserve_patches.cpu.memory import handle_of, open_handle, with_zero_row
from distserve_patches.cpu.shards import ShardedPool
from kvrs.errors import ConfigError
from kvrs.protocol.geometry import KvGeometry
from kvrs_engine.engine.allocator import keep_freed_memory
from kvrs_engine.engine.layers.step import build_step
from kvrs_engine.engine.model_config import ModelConfig
from kvrs_engine.engine.models.decoder import Decoder
from kvrs_engine.engine.models.loading import load_decoder
from kvrs_engine.engine.models.weights import Weights
from kvrs_engine.engine.sampler import SamplingParams, sample
from kvrs_engine.engine.worker import check_attention
from kvrs_engine.scheduling.pace import Pace
from kvrs_engine.scheduling.sequences import Chunk

_GREEDY = SamplingParams(temperature=0.0)

_pace: Pace | None = None


def keep_pace(pace: Pace | None) -> None:
    """Make steps and loads of this process last as long as on the machine of `pace`; None: no
    delay.
    """
    global _pace
    _pace = pace


def _sleep_until(end_s: float) -> None:
    time.sleep(max(0.0, end_s - time.perf_counter()))


def llama(*given: Any) -> "Model":
    """Take SwiftTransformer's arguments; the checkpoint has the unused ones."""
    _vocab, positions, _hidden, layers, _heads, kv_heads, head_dim, _intermediate, *rest = given
    return Model(layers, kv_heads, head_dim, positions, *rest)


def opt(*given: Any) -> "Model":
    """Take SwiftTransformer's arguments, like `llama`."""
    _vocab, positions, _hidden, layers, heads, head_dim, *rest = given
    return Model(layers, heads, head_dim, positions, *rest)


def gpt2(*_: Any) -> NoReturn:
    raise ConfigError(
        "model: GPT-2 is not among the models that run off the GPU; allowed: llama, opt"
    )


class Model:
    """The model of one rank. The leader of a stage loads the whole model and computes for all
    ranks; each rank holds its own KV.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        positions: int,
        dtype: str,
        block_size: int,
        blocks_per_request: int,
        parallel: list[int],
    ) -> None:
        """Raises ConfigError: an option needs a GPU."""
        if dtype != "fp32":
            raise ConfigError(
                f"dtype: got {dtype!r}; allowed: 'fp32' (off the GPU everything is "
                f"computed in float32)"
            )
        if block_size & (block_size - 1):
            raise ConfigError(
                f"--block-size: got {block_size}; allowed off the GPU: a power of two"
            )
        self._geometry = KvGeometry(
            layers=layers,
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype_bytes=4,
            page_size_tokens=block_size,
        )
        self._positions = positions
        self._blocks_per_request = blocks_per_request
        self._parallel = parallel
        self.group: Group | None = None
        self._decoder: Decoder | None = None
        self._pool: ShardedPool | None = None
        self._met = False

    def init_communicator(self, tensor_group: list[int], pipeline_group: list[int]) -> None:
        """Join the ranks of the stage. Only the pipeline's id is the same for all ranks."""
        del tensor_group
        self.group = Group(pipeline_group, self._parallel)

    def init_dummy_weights(self) -> None:
        raise ConfigError(
            "--use-dummy-weights: not off the GPU; `python -m kvrs_engine.engine.tiny "
            "DIRECTORY SEED` writes a small model"
        )

    def load_weight(self, path: str) -> None:
        """Load a Hugging Face directory, if this rank computes.

        Raises:
            ConfigError: incomplete, or another shape than upstream read from config.json.
        """
        assert self.group is not None, "the communicator comes first"
        if not self.group.leads:
            return
        started_s = time.perf_counter()
        keep_freed_memory()
        torch.set_num_threads(1)
        torch.set_float32_matmul_precision("highest")
        directory = Path(path)
        config = ModelConfig.from_directory(directory)
        own, theirs = self._geometry, (config.layers, config.kv_heads, config.head_dim)
        if theirs != (own.layers, own.kv_heads, own.head_dim):
            raise ConfigError(
                f"{directory}: DistServe takes head_dim to be hidden_size / "
                f"num_attention_heads; this model differs"
            )
        with torch.inference_mode():
            self._decoder = load_decoder(
                config, Weights(directory), self._positions, torch.device("cpu")
            )
            check_attention(config, own.page_size_tokens, torch.device("cpu"))
        if _pace is not None:
            _sleep_until(started_s + _pace.load_s)

    def forward(
        self,
        token_ids: list[list[int]],
        first_positions: list[int],
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: list[list[int]],
    ) -> list[int]:
        """Compute each request's new tokens behind its earlier ones; return the next tokens if this
        rank leads.
        """
        assert self.group is not None, "the communicator comes first"
        if not self._met:
            self._meet(self.group, k_cache, v_cache)
        with self.group.together():
            return (
                self._compute(token_ids, first_positions, block_tables) if self.group.leads else []
            )

    def _meet(self, group: Group, k_cache: Tensor, v_cache: Tensor) -> None:
        handles = group.caches((handle_of(k_cache), handle_of(v_cache)))
        self._met = True
        if not group.leads:
            return

        def shard(rank: tuple[int, int]) -> tuple[Tensor, Tensor]:
            caches = (
                (k_cache, v_cache)
                if rank == group.rank
                else (open_handle(handle) for handle in handles[rank])
            )
            keys, values = (with_zero_row(cache) for cache in caches)
            return keys, values

        stages, ranks = range(group.pipeline_size), range(group.tensor_size)
        self._pool = ShardedPool(
            self._geometry, [[shard((stage, rank)) for rank in ranks] for stage in stages]
        )

    def _compute(
        self, token_ids: list[list[int]], first_positions: list[int], block_tables: list[list[int]]
    ) -> list[int]:
        assert self._decoder is not None, "the leader has loaded the weights"
        assert self._pool is not None, "the leader has met the others"
        started_s, chunks = time.perf_counter(), []
        for tokens, first, blocks in zip(token_ids, first_positions, block_tables, strict=True):
            if len(blocks) > self._blocks_per_request:
                raise ValueError(
                    f"a request has {len(blocks)} blocks; --max-num-blocks-per-req is "
                    f"{self._blocks_per_request}"
                )
            if first + len(tokens) > self._positions:
                raise ValueError(
                    f"a request reaches position {first + len(tokens)}; the model has "
                    f"{self._positions}"
                )
            chunks.append(Chunk(tokens, first, blocks, logits=1))
        with torch.inference_mode():
            logits = self._decoder.forward(build_step(chunks, self._pool), self._pool)
        sampled = [sample(row, _GREEDY, 0) for row in logits]
        if _pace is not None:
            _sleep_until(started_s + _pace.batch_s(chunks))
        return sampled
