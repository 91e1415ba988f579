"""A tiny random Llama, generated from a seed, for tests and demos without a download."""

import json
import os
import random
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor

HIDDEN = 128
LAYERS = 4
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 32
INTERMEDIATE = 256
VOCAB = 512
MAX_POSITIONS = 8192
INITIALIZER_RANGE = 0.2  # Large: a small model with the usual 0.02 repeats a single token for ever.
BEGIN, END = "<|begin|>", "<|end|>"
_BEGIN_ID, _END_ID = 0, 1

_CHAT_TEMPLATE = """\
{{ bos_token }}
{%- if tools %}
    {{- "You may call tools:\\n" }}
    {%- for tool in tools %}
        {{- tool | tojson + "\\n" }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {{- message.role + ": " + message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- "<tool_call>" + {"name": call.function.name, \
"arguments": call.function.arguments} | tojson + "</tool_call>" }}
    {%- endfor %}
    {{- eos_token + "\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "assistant: " }}
    {%- if enable_thinking %}
        {{- "<think>\\n" }}
    {%- endif %}
{%- endif %}
"""

_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
SYLLABLES = (
    "ka",
    "lo",
    "mi",
    "ren",
    "sta",
    "vor",
    "ti",
    "el",
    "an",
    "dra",
    "shi",
    "pu",
    "ne",
    "go",
    "bri",
    "sol",
    "tek",
    "qui",
)
_FOREIGN = ("é", "ü", "ñ", "ø", "ж", "я", "λ", "中", "文", "日", "本", "한", "🙂", "🚀")


def write_tiny_model(directory: Path, seed: int) -> None:
    """Write a Hugging Face directory, unless it is complete; the same seed gives the same bytes."""
    if not _complete(directory):
        tokenizer = random_tokenizer(seed)
        write_model(directory, tokenizer, random_weights(seed, tokenizer))


def write_model(
    directory: Path,
    tokenizer: Tokenizer,
    weights: Mapping[str, Tensor],
    config: Mapping[str, Any] | None = None,
) -> None:
    """Write a Hugging Face directory with these weights. Without `config` the model is a Llama with
    as many layers as the weights have.
    """
    if _complete(directory):
        return
    if config is None:
        layers = sum(name.endswith("q_proj.weight") for name in weights)
        config = llama_config(layers)
    directory.parent.mkdir(parents=True, exist_ok=True)
    # Write atomically, because several processes may do this at once.
    scratch = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{directory.name}-"))
    try:
        _write_files(scratch, tokenizer, dict(weights), config)
        scratch.chmod(0o755)
        try:
            os.rename(scratch, directory)
        except OSError:
            # Accept a complete directory of another process; never remove other content.
            if not _complete(directory):
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _complete(directory: Path) -> bool:
    return all((directory / name).is_file() for name in _FILES)


def _write_files(
    directory: Path, tokenizer: Tokenizer, weights: dict[str, Tensor], config: Mapping[str, Any]
) -> None:
    tokenizer.save(str(directory / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
    }
    _write_json(
        directory / "tokenizer_config.json", {**tokenizer_config, "chat_template": _CHAT_TEMPLATE}
    )
    ids = {"bos_token_id": _BEGIN_ID, "eos_token_id": _END_ID}
    _write_json(directory / "generation_config.json", ids)
    _write_json(directory / "config.json", {**config, **ids})
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def llama_config(layers: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": INTERMEDIATE,
        "vocab_size": VOCAB,
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }


def random_weights(seed: int, tokenizer: Tokenizer, layers: int = LAYERS) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def random_matrix(rows: int, columns: int, scale: float) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * scale

    weights = {"model.embed_tokens.weight": random_matrix(VOCAB, HIDDEN, 1.0)}
    for index in range(layers):
        prefix = f"model.layers.{index}"
        weights[f"{prefix}.input_layernorm.weight"] = torch.ones(HIDDEN)
        weights[f"{prefix}.post_attention_layernorm.weight"] = torch.ones(HIDDEN)
        for name, rows, columns in (
            ("self_attn.q_proj", HEADS * HEAD_DIM, HIDDEN),
            ("self_attn.k_proj", KV_HEADS * HEAD_DIM, HIDDEN),
            ("self_attn.v_proj", KV_HEADS * HEAD_DIM, HIDDEN),
            ("self_attn.o_proj", HIDDEN, HEADS * HEAD_DIM),
            ("mlp.gate_proj", INTERMEDIATE, HIDDEN),
            ("mlp.up_proj", INTERMEDIATE, HIDDEN),
            ("mlp.down_proj", HIDDEN, INTERMEDIATE),
        ):
            weights[f"{prefix}.{name}.weight"] = random_matrix(rows, columns, INITIALIZER_RANGE)
    weights["model.norm.weight"] = torch.ones(HIDDEN)
    weights["lm_head.weight"] = random_matrix(VOCAB, HIDDEN, 0.1) * preference(tokenizer)
    return weights


def preference(tokenizer: Tokenizer) -> Tensor:
    """Return factors `[vocab, 1]` that reduce the logits of end tokens and of tokens with broken
    characters.
    """
    scale = torch.ones(VOCAB, 1)
    for token in range(VOCAB):
        if "\ufffd" in tokenizer.decode([token]):
            scale[token] = 0.5
    scale[[_BEGIN_ID, _END_ID]] = 0.25
    return scale


def random_tokenizer(seed: int) -> Tokenizer:
    """Train a byte-level BPE on a text of made-up words, some with multi-byte characters."""
    choose = random.Random(seed)
    words = ["".join(choose.choices(SYLLABLES, k=choose.randint(1, 3))) for _ in range(300)]
    words += ["".join(choose.choices(_FOREIGN, k=choose.randint(1, 2))) for _ in range(40)]
    sentences = [
        " ".join(choose.choices(words, k=choose.randint(3, 12))) + choose.choice(".,!?\n")
        for _ in range(1500)
    ]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[AddedToken(BEGIN, special=True), AddedToken(END, special=True)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences, trainer)
    assert tokenizer.get_vocab_size() == VOCAB
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, _BEGIN_ID)]
    )
    return tokenizer
