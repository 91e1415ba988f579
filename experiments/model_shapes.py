"""Shapes of the profiled models, from their config.json on the Hugging Face hub."""

from dataclasses import dataclass, replace

from kvrs.errors import ConfigError
from kvrs_engine.elastic.grain import Grain
from kvrs_engine.elastic.units import Units


@dataclass(frozen=True, slots=True)
class ModelShape:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    gated: bool = True
    tied: bool = False  # The LM head shares the embeddings.
    experts: int = 1
    chosen: int = 1  # Number of experts to which a row is routed.

    def units(self, weight_bytes: int = 2) -> Units:
        """Return the model's units; every tile of every expert is a unit."""
        units = self._units(self._grain, weight_bytes)
        return replace(units, mlp_bytes=units.mlp_bytes * self.experts)

    @property
    def _grain(self) -> Grain:
        return Grain.of(
            heads=self.heads,
            kv_heads=self.kv_heads,
            intermediate=self.intermediate,
            vocab=self.vocab,
        )

    def _units(self, grain: Grain, weight_bytes: int) -> Units:
        return Units.of(
            grain,
            layers=self.layers,
            hidden=self.hidden,
            head_dim=self.head_dim,
            gated=self.gated,
            weight_bytes=weight_bytes,
            common_bytes=0 if self.tied else self.vocab * self.hidden * weight_bytes,
        )


SHAPES = {
    "meta-llama/Llama-3.1-8B": ModelShape(32, 4096, 32, 8, 128, 14336, 128256),
    "meta-llama/Llama-3.1-70B": ModelShape(80, 8192, 64, 8, 128, 28672, 128256),
    "mistralai/Mixtral-8x22B-v0.1": ModelShape(
        56, 6144, 48, 8, 128, 16384, 32768, experts=8, chosen=2
    ),
    "facebook/opt-13b": ModelShape(40, 5120, 40, 40, 128, 20480, 50272, gated=False, tied=True),
    "facebook/opt-66b": ModelShape(64, 9216, 72, 72, 128, 36864, 50272, gated=False, tied=True),
    "Qwen/Qwen3-14B": ModelShape(40, 5120, 40, 8, 128, 17408, 151936),
    "Qwen/Qwen3-32B": ModelShape(64, 5120, 64, 8, 128, 25600, 151936),
}


def shape_of(model: str) -> ModelShape:
    """Return the shape of a profiled model.

    Raises:
        ConfigError: the model has no profile.
    """
    if model not in SHAPES:
        raise ConfigError(f"model {model!r}; allowed: {', '.join(sorted(SHAPES))}")
    return SHAPES[model]
