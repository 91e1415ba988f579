"""What a Hugging Face directory says about a model, checked."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from kvrs.engine.layers.rotary import RopeScaling
from kvrs.errors import ConfigError


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
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    attention_bias: bool
    mlp_bias: bool
    tied_embeddings: bool
    eos_token_ids: frozenset[int]

    @classmethod
    def from_directory(cls, directory: Path) -> "ModelConfig":
        """Read `config.json` and, where there is one, `generation_config.json`.

        Raises:
            ConfigError: naming file and field: unreadable, missing, of a wrong type, or a feature that is not supported.
        """
        fields = _Fields(directory / "config.json")
        fields.demand("model_type", {"llama"})
        fields.demand("hidden_act", {"silu"}, default="silu")
        heads = fields.integer("num_attention_heads")
        kv_heads = fields.integer("num_key_value_heads", default=heads)
        if heads % kv_heads:
            fields.refuse("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads ({heads})")
        hidden = fields.integer("hidden_size")
        head_dim = fields.integer("head_dim", default=hidden // heads)
        if head_dim % 2:
            fields.refuse("head_dim", head_dim, "an even number")
        theta, scaling = _rope(fields)
        return cls(
            family=fields.text("model_type"),
            layers=fields.integer("num_hidden_layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate=fields.integer("intermediate_size"),
            vocab=fields.integer("vocab_size"),
            max_positions=fields.integer("max_position_embeddings", default=2048),
            rms_norm_eps=fields.number("rms_norm_eps", default=1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            attention_bias=fields.flag("attention_bias"),
            mlp_bias=fields.flag("mlp_bias"),
            tied_embeddings=fields.flag("tie_word_embeddings"),
            eos_token_ids=_eos_token_ids(directory, fields),
        )


class _Fields:
    """Typed access to one JSON object of a file; every refusal names file and field."""

    def __init__(self, path: Path, values: Any = None, prefix: str = "") -> None:
        self.path = path
        self.prefix = prefix
        self.values: dict[str, Any] = _read_object(path) if values is None else values

    def refuse(self, name: str, value: object, allowed: str) -> NoReturn:
        raise ConfigError([f"{self.path}: {self.prefix}{name}: got {value!r}; allowed: {allowed}"])

    def _get(self, name: str, default: Any) -> Any:
        # Hugging Face writes null for "not set".
        value = self.values.get(name)
        if value is None and default is None:
            raise ConfigError([f"{self.path}: {self.prefix}{name}: missing"])
        return default if value is None else value

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.refuse(name, value, "a whole number from 1")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            self.refuse(name, value, "a number above 0")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self._get(name, False)
        if not isinstance(value, bool):
            self.refuse(name, value, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._get(name, default)
        if not isinstance(value, str):
            self.refuse(name, value, "a string")
        return value

    def section(self, name: str) -> "_Fields | None":
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.refuse(name, value, "an object")
        return _Fields(self.path, value, f"{self.prefix}{name}.")

    def demand(self, name: str, allowed: set[str], default: str | None = None) -> None:
        value = self.text(name, default)
        if value not in allowed:
            self.refuse(name, value, ", ".join(sorted(allowed)))


def _read_object(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError([f"{path}: {error.strerror}"]) from None
    except ValueError as error:
        raise ConfigError([f"{path}: not valid JSON: {error}"]) from None
    if not isinstance(values, dict):
        raise ConfigError([f"{path}: got a {type(values).__name__}; allowed: an object"])
    return values


def _rope(fields: _Fields) -> tuple[float, RopeScaling | None]:
    """Both spellings: `rope_theta` beside `rope_scaling`, and the newer `rope_parameters` that holds all."""
    section = fields.section("rope_parameters") or fields.section("rope_scaling")
    theta = fields.number("rope_theta", default=10000.0)
    if section is None:
        return theta, None
    return section.number("rope_theta", default=theta), _rope_scaling(section)


def _rope_scaling(section: _Fields) -> RopeScaling | None:
    key = "rope_type" if "rope_type" in section.values else "type"
    section.demand(key, {"default", "linear", "llama3"}, default="default")
    kind = section.text(key, default="default")
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling(kind, section.number("factor"))
    scaling = RopeScaling(
        kind,
        section.number("factor"),
        section.number("low_freq_factor"),
        section.number("high_freq_factor"),
        section.integer("original_max_position_embeddings"),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        section.refuse("high_freq_factor", scaling.high_freq_factor, f"above low_freq_factor ({scaling.low_freq_factor})")
    return scaling


def _eos_token_ids(directory: Path, config: _Fields) -> frozenset[int]:
    """The generation configuration wins over the model's, as in Hugging Face's own `generate`."""
    path = directory / "generation_config.json"
    sources = [_Fields(path)] if path.exists() else []
    for fields in [*sources, config]:
        value = fields.values.get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
            fields.refuse("eos_token_id", value, "a token id or a list of them")
        return frozenset(ids)
    return frozenset()
