"""The stand-ins for SwiftTransformer's model classes are exact, and refuse by name."""

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from torch import Tensor

from distserve_patches.cpu import memory, model
from distserve_patches.cpu.group import Group, new_group_id
from kvrs.config.cluster import EngineSettings
from kvrs.errors import ConfigError
from kvrs.profiles import catalog
from kvrs_engine.engine import random_model
from kvrs_engine.engine.worker import Worker
from kvrs_engine.scheduling.pace import Pace
from kvrs_engine.scheduling.sequences import Chunk

pytestmark = pytest.mark.engine

BLOCK, BLOCKS = 16, 12
PROMPT = [0, *range(40, 77)]
OUTPUT_TOKENS = 14
LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2)]  # Tensor and pipeline parallel sizes.
TINY = (
    random_model.VOCAB,
    random_model.MAX_POSITIONS,
    random_model.HIDDEN,
    random_model.LAYERS,
    random_model.HEADS,
    random_model.KV_HEADS,
    random_model.HEAD_DIM,
    random_model.INTERMEDIATE,
)


class Stage:
    """The ranks of one stage, each in a thread as it would be in a process."""

    def __init__(self, directory: Path, layout: tuple[int, int]) -> None:
        tensor_size, pipeline_size = layout
        self.layers, self.heads = (
            random_model.LAYERS // pipeline_size,
            random_model.KV_HEADS // tensor_size,
        )
        shape = (BLOCKS, self.layers, self.heads, BLOCK, random_model.HEAD_DIM)
        places = list(itertools.product(range(pipeline_size), range(tensor_size)))
        self.caches = [[memory.allocate(shape, torch.float32) for _ in "kv"] for _ in places]
        self.models = [
            model.llama(
                *TINY, "fp32", BLOCK, BLOCKS, [tensor_size, tensor, pipeline_size, pipeline]
            )
            for pipeline, tensor in places
        ]
        self.places = places
        self.pool = ThreadPoolExecutor(len(places))
        group = new_group_id()
        self.each(lambda rank: rank.init_communicator(new_group_id(), group))
        self.each(lambda rank: rank.load_weight(str(directory)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.shutdown()
        for rank in self.models:
            assert rank.group is not None
            rank.group.close()

    def each(self, call: Callable[..., Any]) -> list[Any]:
        return list(self.pool.map(call, self.models))

    def step(
        self, token_ids: list[list[int]], firsts: list[int], tables: list[list[int]]
    ) -> list[int]:
        calls = [
            self.pool.submit(rank.forward, token_ids, firsts, keys, values, tables)
            for rank, (keys, values) in zip(self.models, self.caches, strict=True)
        ]
        results = [call.result(30) for call in calls]
        (answer,) = [result for result in results if result]
        assert answer is results[self.places.index((max(self.places)[0], 0))], (
            "upstream reads the last stage's first rank"
        )
        return answer

    def whole(self, block: int) -> Tensor:
        """The block as a page of the embedded engine, `[layers, heads, 2, block, head_dim]`."""
        page = torch.zeros(
            random_model.LAYERS, random_model.KV_HEADS, 2, BLOCK, random_model.HEAD_DIM
        )
        for (pipeline, tensor), caches in zip(self.places, self.caches, strict=True):
            layers = slice(pipeline * self.layers, (pipeline + 1) * self.layers)
            heads = slice(tensor * self.heads, (tensor + 1) * self.heads)
            for kind, cache in enumerate(caches):
                page[layers, heads, kind] = cache[block]
        return page


def embedded(directory: Path) -> tuple[list[int], Tensor]:
    """The embedded engine's greedy continuation, and its pages."""
    worker = Worker(directory, EngineSettings(pages=BLOCKS, page_size_tokens=BLOCK))
    tokens, pages = list(PROMPT), [3, 0, 7, 9]
    first = 0
    for _ in range(OUTPUT_TOKENS):
        logits = worker.execute([Chunk(tokens[first:], first, pages, logits=1)])
        first = len(tokens)
        tokens.append(int(logits[0].argmax()))
    return tokens[len(PROMPT) :], worker.pool.tensor[pages]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_tokens_and_kv_equal_the_embedded_engines(
    tiny_model: Path, layout: tuple[int, int]
) -> None:
    """To the last bit, however many ranks hold the KV, and beside another request."""
    table, other = [5, 2, 11, 1], [4, 6, 8, 10]

    with Stage(tiny_model, layout) as stage:
        tokens = stage.step([PROMPT], [0], [table])
        beside = stage.step([PROMPT[:21]], [0], [other])
        while len(tokens) < OUTPUT_TOKENS:
            firsts = [len(PROMPT) + len(tokens) - 1, 20 + len(beside)]
            own, neighbour = stage.step([tokens[-1:], beside[-1:]], firsts, [table, other])
            tokens.append(own)
            beside.append(neighbour)
        blocks = torch.stack([stage.whole(block) for block in table])

    expected, pages = embedded(tiny_model)
    assert tokens == expected
    assert torch.equal(blocks, pages)


def test_a_block_is_clean_for_its_next_owner(tiny_model: Path) -> None:
    """KV left by an earlier request, even if it is no number, reaches no other request."""
    with Stage(tiny_model, (1, 1)) as stage:
        for cache in stage.caches[0]:
            cache.fill_(torch.nan)

        token = stage.step([PROMPT], [0], [[5, 2, 11]])

    assert token == embedded(tiny_model)[0][:1]


def test_a_family_without_rotary_embeddings_equals_transformers(tmp_path: Path) -> None:
    """OPT, the other family that upstream knows and kvrs computes."""
    from transformers import OPTConfig, OPTForCausalLM

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "num_attention_heads": 2,
        "ffn_dim": 64,
        "num_hidden_layers": 2,
        "word_embed_proj_dim": 64,
    }
    theirs = OPTForCausalLM(
        OPTConfig(vocab_size=96, max_position_embeddings=64, init_std=0.4, **sizes)
    ).eval()
    theirs.save_pretrained(tmp_path)
    prompt = list(range(5, 27))
    expected = theirs.generate(
        torch.tensor([prompt]), max_new_tokens=10, do_sample=False, eos_token_id=None
    )[0].tolist()

    ours = model.opt(96, 64, 64, 2, 2, 32, "fp32", BLOCK, 4, [1, 0, 1, 0])
    ours.init_communicator(new_group_id(), new_group_id())
    ours.load_weight(str(tmp_path))
    keys, values = [memory.allocate((4, 2, 2, BLOCK, 32), torch.float32) for _ in "kv"]
    tokens = list(prompt)
    first = 0
    for _ in range(10):
        (token,) = ours.forward([tokens[first:]], [first], keys, values, [[0, 1]])
        first = len(tokens)
        tokens.append(token)

    assert tokens == expected


def test_what_only_a_gpu_can_do_is_refused_by_name() -> None:
    """A setting for GPUs only is refused by name."""
    with pytest.raises(ConfigError, match=r"dtype: got 'fp16'; allowed: 'fp32'"):
        model.llama(*TINY, "fp16", BLOCK, BLOCKS, [1, 0, 1, 0])
    with pytest.raises(ConfigError, match="--block-size: got 12"):
        model.llama(*TINY, "fp32", 12, BLOCKS, [1, 0, 1, 0])
    with pytest.raises(ConfigError, match="GPT-2"):
        model.gpt2(*TINY, "fp32", BLOCK, BLOCKS, [1, 0, 1, 0])
    with pytest.raises(ConfigError, match="--use-dummy-weights"):
        model.llama(*TINY, "fp32", BLOCK, BLOCKS, [1, 0, 1, 0]).init_dummy_weights()


def test_a_request_with_more_blocks_than_allowed_is_an_error(tiny_model: Path) -> None:
    """SwiftTransformer's tables have that many columns."""
    ours = model.llama(*TINY, "fp32", BLOCK, 2, [1, 0, 1, 0])
    ours.init_communicator(new_group_id(), new_group_id())
    ours.load_weight(str(tiny_model))
    keys, values = [
        memory.allocate(
            (BLOCKS, random_model.LAYERS, random_model.KV_HEADS, BLOCK, random_model.HEAD_DIM),
            torch.float32,
        )
        for _ in "kv"
    ]

    with pytest.raises(ValueError, match="--max-num-blocks-per-req is 2"):
        ours.forward([PROMPT], [0], keys, values, [[0, 1, 2]])


def test_a_step_lasts_as_long_as_that_of_the_profile(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt by the prefill table, tokens by the decode table; the weights take their time,
    too.
    """
    profile = "opt-13b-a100-distserve-tp1"
    ends_s: list[float] = []
    monkeypatch.setattr(model, "_pace", Pace(profile))
    monkeypatch.setattr(model, "_sleep_until", ends_s.append)
    monkeypatch.setattr("time.perf_counter", lambda: 0.0)

    with Stage(tiny_model, (2, 1)) as stage:
        (token,) = stage.step([PROMPT], [0], [[5, 2, 11, 1]])
        stage.step([[token]], [len(PROMPT)], [[5, 2, 11, 1]])

    assert ends_s == pytest.approx(
        [
            catalog.load_s(profile),
            catalog.prefill_table(profile).seconds_for(len(PROMPT)),
            catalog.decode_table(profile).seconds_for(1, len(PROMPT) + 1),
        ]
    )


def test_no_rank_leaves_a_step_before_the_leader() -> None:
    """A rank that went on would swap out, or hand over, what is not computed yet."""
    group_id = new_group_id()
    left: list[tuple[int, int]] = []
    computed = threading.Event()

    def rank(pipeline: int, tensor: int) -> None:
        group = Group(group_id, [2, tensor, 2, pipeline])
        with group.together():
            if group.leads:
                assert not left
                computed.set()
        assert computed.is_set()
        left.append(group.rank)
        group.close()

    with ThreadPoolExecutor(4) as pool:
        for call in [pool.submit(rank, *place) for place in itertools.product(range(2), range(2))]:
            call.result(30)

    assert sorted(left) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_a_step_fails_when_a_rank_is_gone() -> None:
    """No rank waits for ever: the leader's step raises, and the others come back."""
    group_id = new_group_id()
    with ThreadPoolExecutor(3) as pool:
        groups = [
            call.result(30)
            for call in [pool.submit(Group, group_id, [3, rank, 1, 0]) for rank in range(3)]
        ]
        leader, gone, other = groups
        gone.close()

        def enter(group: Group) -> str:
            try:
                with group.together():
                    return "computed" if group.leads else "left"
            except OSError:
                return "failed"

        calls = [pool.submit(enter, group) for group in (leader, other)]

        assert [call.result(30) for call in calls] == ["failed", "left"]
    leader.close()
    other.close()
