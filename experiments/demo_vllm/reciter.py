"""A tiny Llama that knows one page by heart: real words of a real engine, without a download."""

from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM

from kvrs_engine.engine.random_model import BEGIN, END, LAYERS, VOCAB, llama_config, write_model

REQUEST = "Tell me about the night the lighthouse went dark."
PAGE = (
    " The storm came over the bay before supper, and by nine o'clock the wind had put out every"
    " lamp in the village but one. Up in the tower the old keeper heard the engine cough, then"
    " stop, and for the length of a breath there was no light on the water at all. Three boats"
    " were still out there, counting on it. She did not run down to see what had broken. She had"
    " kept a second lamp trimmed and filled beside the first for thirty years, and nobody had"
    " ever asked her why. She struck one match, turned the lens by hand, and picked up the beat"
    " exactly where it had stopped. In the morning the fishermen thanked the engine for its good"
    " work, and the keeper smiled, for not one of them had noticed that it had died."
)
_STEPS, _ENOUGH = 600, 0.005


def write_reciter(directory: Path, seed: int) -> int:
    """Train the model and write it as a Hugging Face directory; return the page's tokens."""
    tokenizer = _tokenizer()
    ids = torch.tensor([tokenizer.encode(REQUEST + PAGE).ids])
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**llama_config(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(_STEPS):
        loss = model(input_ids=ids, labels=ids).loss
        if loss.item() < _ENOUGH:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    weights = {name: each.detach().contiguous() for name, each in model.state_dict().items()}
    write_model(directory, tokenizer, weights)
    return ids.shape[1] - len(tokenizer.encode(REQUEST).ids)


def _tokenizer() -> Tokenizer:
    """Byte-level BPE whose pieces are those of the page."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(each, special=True) for each in (BEGIN, END)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        min_frequency=1,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([REQUEST + PAGE], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))]
    )
    return tokenizer
