"""The configuration of a model, read from a Hugging Face directory and checked.

The config.json of each family is mapped to the same few options of `decoder.py`. The names of the
fields are part of the engine's fingerprint.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from kvrs_engine.elastic.grain import Grain
from kvrs_engine.elastic.units import Units
from kvrs_engine.engine.model_fields import Fields

_WEIGHT_BYTES = 4


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """The scaling of rotary frequencies beyond a model's training length (Llama 3.1)."""

    kind: str  # "llama3"
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


@dataclass(frozen=True, slots=True)
class Rope:
    theta: float
    scaling: RopeScaling | None


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """The experts of a model's layers, of which each row uses a few."""

    count: int
    chosen: int  # Number of experts per row.
    width: int  # Inner dimension of an expert.
    renormalise: bool  # The weights of the chosen experts are divided by their sum.
    dense_layers: frozenset[int]  # Layers without experts.


@dataclass(frozen=True, slots=True)
class ModelConfig:
    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_positions: int
    norm: Literal["rms", "layer"]
    norm_eps: float
    head_norm: bool  # Queries and keys are normalised head by head (Qwen3).
    rope: Rope | None  # None: positions are learned and added to the embeddings.
    mlp: Literal["gated silu", "relu"]
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    tied_embeddings: bool
    eos_token_ids: frozenset[int]
    experts: ExpertsConfig | None = None

    @property
    def grain(self) -> Grain:
        grain = Grain.of(
            heads=self.heads,
            kv_heads=self.kv_heads,
            intermediate=self.intermediate,
            vocab=self.vocab,
        )
        if (experts := self.experts) is None:
            return grain
        return grain.with_experts(
            experts.count, experts.width, experts.dense_layers, experts.chosen
        )

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and layer not in self.experts.dense_layers

    @property
    def units(self) -> Units:
        """The model's units with their sizes in memory, in float32."""
        embeddings = self.vocab * self.hidden
        learned = 0 if self.rope else self.max_positions * self.hidden
        norms = (2 * self.layers + 1) * self.hidden
        routers = sum(map(self.has_experts, range(self.layers))) * self.hidden
        routers *= self.experts.count if self.experts else 0
        return Units.of(
            self.grain,
            layers=self.layers,
            hidden=self.hidden,
            head_dim=self.head_dim,
            gated=self.mlp == "gated silu",
            weight_bytes=_WEIGHT_BYTES,
            common_bytes=(embeddings + learned + norms + routers) * _WEIGHT_BYTES,
        )

    @property
    def units_of_ranks(self) -> Units:
        """The units that ranks exchange, without the common weights, which each rank loads."""
        return replace(self.units, common_bytes=0)

    @classmethod
    def from_directory(cls, directory: Path) -> "ModelConfig":
        """Read `config.json` and, if present, `generation_config.json`.

        Raises:
            ConfigError: a file or a field is unreadable, missing, of a wrong type or unsupported;
                the message names it.
        """
        fields = Fields(directory / "config.json")
        family = fields.demand("model_type", _FAMILIES)
        architecture, read = _FAMILIES[family]
        architectures = fields.texts("architectures")
        if architectures and architecture not in architectures:
            fields.refuse(
                "architectures", architectures, f"{architecture} (model_type is {family})"
            )
        return read(fields)


def _llama(fields: Fields) -> ModelConfig:
    bias = fields.flag("attention_bias")
    return _rotary_decoder(
        fields, qkv_bias=bias, output_bias=bias, mlp_bias=fields.flag("mlp_bias")
    )


def _mixtral(fields: Fields) -> ModelConfig:
    if (window := fields.values.get("sliding_window")) is not None:
        fields.refuse("sliding_window", window, "null (sliding windows are not supported)")
    config = _rotary_decoder(fields, qkv_bias=False, norm_eps=1e-5, rope_theta=1e6)
    # In this family `intermediate_size` is the width of an expert.
    return _with_experts(config, fields, config.intermediate, renormalise=True)


def _qwen3_moe(fields: Fields) -> ModelConfig:
    _refuse_sliding_window(fields)
    bias = fields.flag("attention_bias")
    config = _rotary_decoder(fields, qkv_bias=bias, output_bias=bias, head_norm=True)
    step = fields.integer("decoder_sparse_step", default=1)
    dense = fields.whole_numbers("mlp_only_layers", below=config.layers)
    return _with_experts(
        config,
        fields,
        fields.integer("moe_intermediate_size"),
        renormalise=fields.flag("norm_topk_prob"),
        dense_layers=frozenset(
            layer for layer in range(config.layers) if layer in dense or (layer + 1) % step
        ),
    )


_SHARED_EXPERTS = (
    "n_shared_experts",
    "num_shared_experts",
    "shared_expert_intermediate_size",
    "moe_shared_expert_intermediate_size",
)


def _with_experts(
    config: ModelConfig,
    fields: Fields,
    width: int,
    *,
    renormalise: bool,
    dense_layers: frozenset[int] = frozenset(),
) -> ModelConfig:
    for name in _SHARED_EXPERTS:
        if value := fields.values.get(name):
            fields.refuse(name, value, "0 or null (shared experts are not supported)")
    # Newer releases of Hugging Face's library use the second name for all families.
    is_older = fields.values.get("num_experts") is not None
    name = "num_experts" if is_older else "num_local_experts"
    count, chosen = fields.integer(name), fields.integer("num_experts_per_tok")
    if chosen > count:
        fields.refuse("num_experts_per_tok", chosen, f"1 to {name} ({count})")
    if len(dense_layers) == config.layers:
        return config
    return replace(config, experts=ExpertsConfig(count, chosen, width, renormalise, dense_layers))


def _rotary_decoder(
    fields: Fields,
    *,
    qkv_bias: bool,
    output_bias: bool = False,
    mlp_bias: bool = False,
    head_norm: bool = False,
    norm_eps: float = 1e-6,
    rope_theta: float = 10000.0,
) -> ModelConfig:
    """Return the common configuration of Llama and related families."""
    fields.demand("hidden_act", {"silu"}, default="silu")
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", default=heads)
    if heads % kv_heads:
        fields.refuse(
            "num_key_value_heads", kv_heads, f"a divisor of num_attention_heads ({heads})"
        )
    hidden = fields.integer("hidden_size")
    head_dim = fields.integer("head_dim", default=hidden // heads)
    if head_dim % 2:
        fields.refuse("head_dim", head_dim, "an even number")
    return ModelConfig(
        family=fields.text("model_type"),
        layers=fields.integer("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=fields.integer("intermediate_size"),
        vocab=fields.integer("vocab_size"),
        max_positions=fields.integer("max_position_embeddings", default=2048),
        norm="rms",
        norm_eps=fields.number("rms_norm_eps", default=norm_eps),
        head_norm=head_norm,
        rope=_rope(fields, rope_theta),
        mlp="gated silu",
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        tied_embeddings=fields.flag("tie_word_embeddings"),
        eos_token_ids=_eos_token_ids(fields),
    )


# The supported values; OPT-350M and Galactica have others.
_OPT_FORM = {
    "do_layer_norm_before": True,
    "enable_bias": True,
    "layer_norm_elementwise_affine": True,
    "_remove_final_layer_norm": False,
}


def _opt(fields: Fields) -> ModelConfig:
    fields.demand("activation_function", {"relu"}, default="relu")
    heads, hidden = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    if hidden % heads:
        fields.refuse("num_attention_heads", heads, f"a divisor of hidden_size ({hidden})")
    for name, only in _OPT_FORM.items():
        if (given := fields.flag(name, default=only)) != only:
            fields.refuse(name, given, str(only).lower())
    if (width := fields.integer("word_embed_proj_dim", default=hidden)) != hidden:
        fields.refuse("word_embed_proj_dim", width, f"hidden_size ({hidden})")
    return ModelConfig(
        family=fields.text("model_type"),
        layers=fields.integer("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        intermediate=fields.integer("ffn_dim"),
        vocab=fields.integer("vocab_size"),
        max_positions=fields.integer("max_position_embeddings", default=2048),
        norm="layer",
        norm_eps=1e-5,
        head_norm=False,
        rope=None,
        mlp="relu",
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        tied_embeddings=fields.flag("tie_word_embeddings", default=True),
        eos_token_ids=_eos_token_ids(fields),
    )


# By `model_type`: the Hugging Face class with these weights and head, and the reader of its
# configuration.
_FAMILIES: dict[str, tuple[str, Callable[[Fields], ModelConfig]]] = {
    "llama": ("LlamaForCausalLM", _llama),
    "mixtral": ("MixtralForCausalLM", _mixtral),
    "opt": ("OPTForCausalLM", _opt),
    "qwen3_moe": ("Qwen3MoeForCausalLM", _qwen3_moe),
}


def _refuse_sliding_window(fields: Fields) -> None:
    # Hugging Face writes a window even without the flag, when it has no effect.
    if fields.flag("use_sliding_window"):
        fields.refuse("use_sliding_window", True, "false (sliding windows are not supported)")
    for kind in fields.texts("layer_types"):
        if kind != "full_attention":
            fields.refuse("layer_types", kind, "full_attention")


def _rope(fields: Fields, theta: float) -> Rope:
    """Read the rotary parameters in either spelling: `rope_theta` and `rope_scaling`, or the newer
    `rope_parameters`. `theta` is the default.
    """
    section = fields.section("rope_parameters") or fields.section("rope_scaling")
    theta = fields.number("rope_theta", default=theta)
    if section is None:
        return Rope(theta, None)
    return Rope(section.number("rope_theta", default=theta), _rope_scaling(section))


def _rope_scaling(section: Fields) -> RopeScaling | None:
    key = "rope_type" if "rope_type" in section.values else "type"
    kind = section.demand(key, {"default", "llama3"}, default="default")
    if kind == "default":
        return None
    scaling = RopeScaling(
        kind,
        section.number("factor"),
        section.number("low_freq_factor"),
        section.number("high_freq_factor"),
        section.integer("original_max_position_embeddings"),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        section.refuse(
            "high_freq_factor",
            scaling.high_freq_factor,
            f"above low_freq_factor ({scaling.low_freq_factor})",
        )
    return scaling


def _eos_token_ids(config: Fields) -> frozenset[int]:
    """Return the end tokens; the generation configuration takes precedence over the model's, as in
    Hugging Face's `generate`.
    """
    path = config.path.parent / "generation_config.json"
    sources = [Fields(path)] if path.exists() else []
    for fields in [*sources, config]:
        value = fields.values.get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(
            isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids
        ):
            fields.refuse("eos_token_id", value, "a token id or a list of them")
        return frozenset(ids)
    return frozenset()
