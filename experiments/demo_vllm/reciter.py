"""A tiny Llama that knows one page by heart: real words of a real engine, without a download."""

from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM

from kvrs_engine.engine.random_model import BEGIN, END, LAYERS, VOCAB, llama_config, write_model

REQUEST = "Read me the first page of Alice in Wonderland."
# Lewis Carroll, 1865.
PAGE = (
    " Alice was beginning to get very tired of sitting by her sister on the bank, and of having"
    " nothing to do: once or twice she had peeped into the book her sister was reading, but it"
    " had no pictures or conversations in it, and what is the use of a book, thought Alice,"
    " without pictures or conversations? So she was considering in her own mind, as well as she"
    " could, for the hot day made her feel very sleepy and stupid, whether the pleasure of"
    " making a daisy-chain would be worth the trouble of getting up and picking the daisies,"
    " when suddenly a White Rabbit with pink eyes ran close by her. There was nothing so very"
    " remarkable in that; nor did Alice think it so very much out of the way to hear the Rabbit"
    " say to itself, Oh dear! Oh dear! I shall be late!"
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
