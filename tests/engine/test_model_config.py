"""A model directory is checked, and refused by file and field."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvrs.config.cluster import EngineSettings
from kvrs.errors import ConfigError
from kvrs_engine.engine.model_config import ExpertsConfig, ModelConfig, Rope, RopeScaling
from kvrs_engine.engine.worker import Worker


@pytest.fixture
def directory(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def change(directory: Path, file: str = "config.json", **fields: Any) -> None:
    path = directory / file
    values = json.loads(path.read_text()) | fields
    path.write_text(
        json.dumps({name: value for name, value in values.items() if value != "absent"})
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"model_type": "mamba"},
            r"config.json: model_type: got 'mamba'; allowed: llama, mixtral, opt, "
            r"qwen3_moe$",
        ),
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            r"architectures: got \['LlamaForSequenceClassification'\]; allowed: "
            r"LlamaForCausalLM \(model_type is llama\)",
        ),
        (
            {"architectures": "LlamaForCausalLM"},
            "architectures: got 'LlamaForCausalLM'; allowed: a list of strings",
        ),
        ({"hidden_act": "gelu"}, "hidden_act: got 'gelu'; allowed: silu"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0}},
            "rope_scaling.type: got 'yarn'; allowed: default, llama3",
        ),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_parameters.rope_type: got 'dynamic'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.rope_type: got 'linear'"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling.factor: missing"),
        (
            {"num_key_value_heads": 3},
            r"num_key_value_heads: got 3; allowed: a divisor of num_attention_heads \(4\)",
        ),
        (
            {"num_hidden_layers": "four"},
            "num_hidden_layers: got 'four'; allowed: a whole number from 1",
        ),
        ({"vocab_size": "absent"}, "vocab_size: missing"),
        ({"head_dim": 31}, "head_dim: got 31; allowed: an even number"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings: got 'no'; allowed: true or false"),
        ({"rms_norm_eps": 0}, "rms_norm_eps: got 0; allowed: a number above 0"),
    ],
)
def test_what_is_not_supported_is_refused_by_field(
    directory: Path, fields: dict[str, Any], message: str
) -> None:
    """A model that is computed a little wrong is worse than one that does not start."""
    change(directory, **fields)

    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_directory(directory)


SLIDING = "use_sliding_window: got True; allowed: false"
LAYER_TYPES = "layer_types: got 'sliding_attention'; allowed: full_attention"


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        (
            "qwen3_moe",
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "rope_scaling.rope_type: got 'yarn'",
        ),
        ("mixtral", {"sliding_window": 64}, "sliding_window: got 64; allowed: null"),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 64}, SLIDING),
        ("qwen3_moe", {"layer_types": ["full_attention", "sliding_attention"]}, LAYER_TYPES),
        ("mixtral", {"num_local_experts": "absent"}, "num_local_experts: missing"),
        ("mixtral", {"num_experts_per_tok": "absent"}, "num_experts_per_tok: missing"),
        (
            "mixtral",
            {"num_experts_per_tok": 9},
            r"num_experts_per_tok: got 9; allowed: 1 to num_local_experts \(8\)",
        ),
        (
            "qwen3_moe",
            {"num_experts": 4, "num_experts_per_tok": 5},
            r"num_experts_per_tok: got 5; allowed: 1 to num_experts \(4\)",
        ),
        ("qwen3_moe", {"num_local_experts": 0}, "num_local_experts: got 0; allowed: a whole"),
        ("qwen3_moe", {"moe_intermediate_size": "absent"}, "moe_intermediate_size: missing"),
        ("qwen3_moe", {"norm_topk_prob": 1}, "norm_topk_prob: got 1; allowed: true or false"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step: got 0; allowed: a whole"),
        (
            "qwen3_moe",
            {"mlp_only_layers": [1, 4]},
            r"mlp_only_layers: got \[1, 4\]; allowed: a list of whole numbers from 0 to 3$",
        ),
        (
            "qwen3_moe",
            {"shared_expert_intermediate_size": 64},
            r"shared_expert_intermediate_size: got 64; allowed: 0 or null \(shared experts",
        ),
        ("mixtral", {"n_shared_experts": 2}, "n_shared_experts: got 2; allowed: 0 or null"),
        ("opt", {"activation_function": "gelu"}, "activation_function: got 'gelu'; allowed: relu"),
        (
            "opt",
            {"hidden_size": 66},
            r"num_attention_heads: got 4; allowed: a divisor of hidden_size \(66\)",
        ),
        ("opt", {"ffn_dim": "absent"}, "ffn_dim: missing"),
        (
            "opt",
            {"do_layer_norm_before": "yes"},
            "do_layer_norm_before: got 'yes'; allowed: true or false",
        ),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before: got False; allowed: true"),
        ("opt", {"enable_bias": False}, "enable_bias: got False; allowed: true"),
        ("opt", {"_remove_final_layer_norm": True}, "_layer_norm: got True; allowed: false"),
        (
            "opt",
            {"word_embed_proj_dim": 64},
            r"word_embed_proj_dim: got 64; allowed: hidden_size \(128\)",
        ),
    ],
)
def test_what_other_families_cannot_do_here_is_refused_by_field(
    directory: Path, family: str, fields: dict[str, Any], message: str
) -> None:
    """A window that is ignored would go unnoticed until prompts are longer than it."""
    experts: dict[str, Any] = {"num_local_experts": 8, "num_experts_per_tok": 2}
    experts["moe_intermediate_size"] = 64
    change(directory, model_type=family, architectures="absent", ffn_dim=64, **experts)
    change(directory, **fields)

    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_directory(directory)


def test_a_window_without_its_flag_is_of_no_effect(directory: Path) -> None:
    """Hugging Face writes one into every configuration of Qwen."""
    plain: dict[str, Any] = {
        "sliding_window": 4096,
        "use_sliding_window": False,
        "layer_types": ["full_attention"] * 4,
    }
    plain |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    change(directory, model_type="qwen3_moe", architectures="absent", **plain)

    assert ModelConfig.from_directory(directory).family == "qwen3_moe"


def test_layers_without_experts_are_those_that_hugging_face_computes_so(directory: Path) -> None:
    """Either field makes a layer dense; a model all of whose layers are has no experts."""
    experts: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2}
    experts["moe_intermediate_size"] = 64
    change(directory, model_type="qwen3_moe", architectures="absent", **experts)
    plain = ModelConfig.from_directory(directory).experts
    change(directory, decoder_sparse_step=2, mlp_only_layers=[1])
    mixed = ModelConfig.from_directory(directory).experts
    change(directory, decoder_sparse_step=5)

    assert plain == ExpertsConfig(8, 2, 64, renormalise=False, dense_layers=frozenset())
    assert mixed is not None
    assert mixed.dense_layers == {0, 1, 2}
    assert ModelConfig.from_directory(directory).experts is None


def test_mixtral_has_defaults_of_its_own(directory: Path) -> None:
    """Those of Llama would give slightly other numbers."""
    left_out = {"rope_theta": "absent", "rms_norm_eps": "absent"}
    change(directory, model_type="mixtral", architectures="absent", **left_out)
    change(directory, num_local_experts=4, num_experts_per_tok=1)

    config = ModelConfig.from_directory(directory)

    assert (config.rope, config.norm_eps) == (Rope(1e6, None), 1e-5)
    assert config.experts == ExpertsConfig(4, 1, 256, renormalise=True, dense_layers=frozenset())


def test_both_spellings_of_rope_mean_the_same(directory: Path) -> None:
    """Checkpoints of all ages are around."""
    factors = {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    factors |= {"original_max_position_embeddings": 64}
    change(directory, rope_theta=5e5, rope_scaling={"type": "llama3", **factors})
    old = ModelConfig.from_directory(directory)

    change(
        directory,
        rope_theta="absent",
        rope_scaling="absent",
        rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **factors},
    )
    new = ModelConfig.from_directory(directory)

    assert old == new
    assert new.rope == Rope(5e5, RopeScaling("llama3", 2.0, 1.0, 4.0, 64))


def test_generation_config_names_the_end_tokens(directory: Path) -> None:
    """It wins over config.json, and may hold several."""
    change(directory, eos_token_id=3)
    change(directory, "generation_config.json", eos_token_id=[5, 7])
    both = ModelConfig.from_directory(directory).eos_token_ids
    change(directory, "generation_config.json", eos_token_id="absent")

    assert both == {5, 7}
    assert ModelConfig.from_directory(directory).eos_token_ids == {3}


def test_missing_weights_are_named(directory: Path) -> None:
    """Tensor or file, the message names it."""
    change(directory, attention_bias=True)
    with pytest.raises(
        ConfigError, match=r"tensor model\.layers\.0\.self_attn\.o_proj\.bias: missing"
    ):
        Worker(directory, EngineSettings(pages=2))

    change(directory, attention_bias=False, intermediate_size=300)
    with pytest.raises(
        ConfigError, match=r"gate_proj\.weight: got shape \[256, 128\]; allowed: \[300, 128\]"
    ):
        Worker(directory, EngineSettings(pages=2))

    (directory / "model.safetensors").write_bytes(b"no")
    with pytest.raises(ConfigError, match=r"model\.safetensors: "):
        Worker(directory, EngineSettings(pages=2))

    (directory / "model.safetensors").unlink()
    with pytest.raises(
        ConfigError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"
    ):
        Worker(directory, EngineSettings(pages=2))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_json_that_is_nested_too_deeply_is_named(directory: Path, name: str) -> None:
    """Python's reader of JSON has a limit that is no error of the text."""
    (directory / "model.safetensors").unlink()
    (directory / name).write_text("[" * 100_000)

    with pytest.raises(ConfigError, match=rf"{name}: .*recursion"):
        Worker(directory, EngineSettings(pages=2))


def test_an_index_cannot_name_files_elsewhere(directory: Path) -> None:
    """Nothing outside of the directory is read because a file in it names it."""
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "../other.safetensors"}}))

    with pytest.raises(
        ConfigError, match=r"weight_map: other\.safetensors: not a file of this directory"
    ):
        Worker(directory, EngineSettings(pages=2))
