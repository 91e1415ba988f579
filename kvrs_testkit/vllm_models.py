"""Tiny random models of the kinds that vLLM's CPU backend runs, generated from a seed.

Their architectures are those of `transformers`, so this runs in vLLM's interpreter: `python -m
kvrs_testkit.vllm_models KIND DIRECTORY SEED` writes a model with the tokenizer of the tiny Llama.
`adapter` writes a LoRA adapter for that Llama, and `eagle` a head that drafts for it.
"""

import json
import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from kvrs_engine.engine.random_model import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    KV_HEADS,
    LAYERS,
    VOCAB,
    random_tokenizer,
    write_model,
)

_SHAPE = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "intermediate_size": INTERMEDIATE,
    "vocab_size": VOCAB,
    "max_position_embeddings": 8192,
    # Large: a small model with the usual 0.02 repeats a single token for ever.
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
_EXPERTS = {"moe_intermediate_size": 64, "num_experts_per_tok": 2}
# Class of the configuration in transformers, and what it has beside the shape.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "experts": ("Qwen3MoeConfig", _EXPERTS | {"num_experts": 8}),
    "window": (
        "Gemma3TextConfig",
        {
            "sliding_window": 128,
            "query_pre_attn_scalar": HEAD_DIM,
            "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
        },
    ),
    "mla": (
        "DeepseekV2Config",
        _EXPERTS
        | {
            "num_key_value_heads": HEADS,
            "head_dim": 64,
            "q_lora_rank": None,
            "kv_lora_rank": 512,  # The CPU backend has no other sizes.
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 64,
            "v_head_dim": 32,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "greedy",
            "first_k_dense_replace": 1,
        },
    ),
}
# MiMo, whose file has a layer for drafts behind those of a Qwen2.
_MTP = {
    "architectures": ["MiMoForCausalLM"],
    "num_hidden_layers": LAYERS,
    "num_nextn_predict_layers": 1,
}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "initializer_range": 0.5,  # Large: with the usual 0.02 all pictures are alike.
}
IMAGE, IMAGE_PIXELS = "<image>", 32
ADAPTER_RANK = 8


def write(kind: str, directory: Path, seed: int) -> None:
    """Write a directory of Hugging Face: the same seed gives the same weights."""
    weights, document = _drawn(*MODELS[kind], seed)
    write_model(directory, random_tokenizer(seed), weights, document)


def _drawn(name: str, more: dict[str, Any], seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Weights and `config.json` of a model of transformers."""
    config = getattr(transformers, name)(**_SHAPE | more)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():  # As the tiny Llama's: embeddings decide more than positions.
        model.get_input_embeddings().weight.normal_()
        model.get_output_embeddings().weight.normal_(std=0.1)
    with TemporaryDirectory() as saved:  # Under the names of the hub.
        model.save_pretrained(saved)
        weights = load_file(Path(saved) / "model.safetensors")
        return weights, json.loads((Path(saved) / "config.json").read_text())


def write_mtp(directory: Path, seed: int) -> None:
    """A model of which the last layer drafts the token behind the next one."""
    more = {"num_hidden_layers": LAYERS + 1}
    weights, document = _drawn("Qwen2Config", more, seed)
    last, drafts = f"model.layers.{LAYERS}.", "model.mtp_layers.0."
    weights = {name.replace(last, drafts): tensor for name, tensor in weights.items()}
    weights[f"{drafts}input_proj.weight"] = torch.randn(HIDDEN, 2 * HIDDEN) * 0.1
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        weights[f"{drafts}{name}.weight"] = torch.ones(HIDDEN)
    document["layer_types"] = document["layer_types"][:LAYERS]
    write_model(directory, random_tokenizer(seed), weights, document | _MTP)


def write_eagle(directory: Path, seed: int) -> None:
    """A head of one layer for the tiny Llama."""
    weights, document = _drawn("LlamaConfig", {"num_hidden_layers": 1}, seed)
    head = {
        name.removeprefix("model."): tensor
        for name, tensor in weights.items()
        if name.startswith("model.layers.") and "input_layernorm" not in name  # It has none.
    }
    head["fc.weight"] = torch.randn(HIDDEN, 2 * HIDDEN) * 0.1
    write_model(directory, random_tokenizer(seed), head, document)


def write_images(directory: Path, seed: int) -> None:
    """A Blip2 whose language model is a Llama of the tiny one's shape: a picture is 16 tokens."""
    tokenizer = random_tokenizer(seed)
    tokenizer.add_special_tokens([IMAGE])
    config = transformers.Blip2Config(
        vision_config=_VISION | {"image_size": IMAGE_PIXELS, "patch_size": 8},
        qformer_config=_VISION | {"encoder_hidden_size": _VISION["hidden_size"]},
        text_config=_SHAPE | {"vocab_size": VOCAB + 1, "model_type": "llama"},
        num_query_tokens=16,
        image_token_index=VOCAB,
    )
    torch.manual_seed(seed)
    model = transformers.Blip2ForConditionalGeneration(config).float()
    with torch.no_grad():
        model.get_input_embeddings().weight.normal_()
        model.get_output_embeddings().weight.normal_(std=0.1)
        model.query_tokens.normal_()
        model.language_projection.weight.normal_()  # Pictures decide as much as words.
    with TemporaryDirectory() as saved:
        model.save_pretrained(saved)
        weights = load_file(Path(saved) / "model.safetensors")
        document = json.loads((Path(saved) / "config.json").read_text())
    write_model(directory, tokenizer, weights, document)
    size = {"height": IMAGE_PIXELS, "width": IMAGE_PIXELS}
    transformers.BlipImageProcessorPil(size=size).save_pretrained(directory)
    processor = {"processor_class": "Blip2Processor", "num_query_tokens": 16}
    (directory / "processor_config.json").write_text(json.dumps(processor))


def write_adapter(directory: Path, seed: int) -> None:
    """For the query and value projections of the tiny Llama."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(LAYERS):
        for name, rows in (("q_proj", HEADS * HEAD_DIM), ("v_proj", KV_HEADS * HEAD_DIM)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for part, shape in (("A", (ADAPTER_RANK, HIDDEN)), ("B", (rows, ADAPTER_RANK))):
                drawn = torch.randn(*shape, generator=generator) * 0.2
                weights[f"{prefix}.lora_{part}.weight"] = drawn
    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    (directory / "adapter_config.json").write_text(
        json.dumps(
            {
                "peft_type": "LORA",
                "r": ADAPTER_RANK,
                "lora_alpha": 2 * ADAPTER_RANK,
                "target_modules": ["q_proj", "v_proj"],
                "bias": "none",
            }
        )
    )


def main() -> None:
    kind, directory, seed = sys.argv[1:]
    others = {
        "adapter": write_adapter,
        "eagle": write_eagle,
        "images": write_images,
        "mtp": write_mtp,
    }
    others.get(kind, partial(write, kind))(Path(directory), int(seed))


if __name__ == "__main__":
    main()
