"""Copies between vLLM's blocks and staged pages: whatever ranks save, any ranks load the same."""

import pytest
import torch

from kvrs.errors import KvrsError
from kvrs.protocol.geometry import KvGeometry
from kvrs.vllm.blocks import Blocks, Ended, WorkerPart, part_of
from kvrs.vllm.staging import Staging

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU is here"),
        ],
    ),
]
GEOMETRY = KvGeometry(layers=3, kv_heads=4, head_dim=5, dtype_bytes=2, page_size_tokens=8)
BLOCKS = 6


def worker(
    device: str, tp_rank: int, tp_size: int, layers: range, whole: list[torch.Tensor] | None
) -> Blocks:
    """With the cells of `whole`, or none."""
    part = part_of(GEOMETRY.kv_heads, tp_rank, tp_size)
    tensors = {}
    for layer in layers:
        if whole is None:
            shape = (BLOCKS, len(part.heads), 8, 10)
            tensors[layer] = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        else:
            heads = slice(part.heads.start, part.heads.stop)
            tensors[layer] = whole[layer][:, heads].contiguous().to(device)
    blocks = Blocks(GEOMETRY, part, tensors)
    blocks.tensors = tensors  # type: ignore[attr-defined]
    return blocks


def workers(
    tp: int, pp: int, whole: list[torch.Tensor] | None = None, device: str = "cpu"
) -> list[Blocks]:
    stages = [range(3)] if pp == 1 else [range(2), range(2, 3)]
    return [worker(device, rank, tp, stage, whole) for stage in stages for rank in range(tp)]


def end(ended: Ended) -> None:
    while not ended():
        torch.cuda.synchronize()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("loaded", [(1, 1), (2, 1), (4, 1), (8, 1), (2, 2)])
@pytest.mark.parametrize("saved", [(1, 1), (2, 1), (4, 1), (8, 1), (4, 2)])
def test_pages_of_any_ranks_are_loaded_by_any(
    saved: tuple[int, int], loaded: tuple[int, int], device: str
) -> None:
    staging = Staging(4, GEOMETRY.page_bytes)
    whole = [torch.randn(BLOCKS, 4, 8, 10).to(torch.bfloat16) for _ in range(3)]
    for each in workers(*saved, whole, device):
        each.open(staging.place)
        end(each.save([(3, 1), (0, 5)]))
    for each in workers(*loaded, device=device):
        each.open(staging.place)
        end(each.load([(3, 2), (0, 0)]))
        heads = slice(each._part.heads.start, each._part.heads.stop)
        for layer, tensor in each.tensors.items():  # type: ignore[attr-defined]
            tensor = tensor.cpu()
            assert torch.equal(tensor[2], whole[layer][1, heads])
            assert torch.equal(tensor[0], whole[layer][5, heads])
            assert not tensor[[1, 3, 4, 5]].any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU is here")
def test_a_gpu_saves_what_was_there_and_uses_what_was_loaded() -> None:
    """A block is written again behind its save and read behind its load; the host waits for
    neither copy.
    """
    staging = Staging(4, GEOMETRY.page_bytes)
    whole = [torch.randn(BLOCKS, 4, 8, 10).to(torch.bfloat16) for _ in range(3)]
    (only,) = workers(1, 1, whole, "cuda")
    tensors = only.tensors  # type: ignore[attr-defined]
    only.open(staging.place)
    for _ in range(50):
        saved = only.save([(0, 1)])
        for tensor in tensors.values():
            tensor[1].zero_()
        end(saved)
        loaded = only.load([(0, 1)])
        used = [tensor[1].clone() for tensor in tensors.values()]
        end(loaded)
        torch.cuda.synchronize()
        assert all(
            torch.equal(used[layer].cpu(), whole[layer][1]) for layer in range(GEOMETRY.layers)
        )


def test_bytes_that_are_staged_are_those_that_are_loaded() -> None:
    staging = Staging(2, GEOMETRY.page_bytes)
    staging.view(1)[:] = bytes(range(256)) * (GEOMETRY.page_bytes // 256) + bytes(
        GEOMETRY.page_bytes % 256
    )
    (only,) = workers(1, 1)
    only.open(staging.place)
    only.load([(1, 4)])
    only.save([(0, 4)])
    assert staging.view(0) == staging.view(1)


@pytest.mark.parametrize("offset", [0, 1, 2, 4])
@pytest.mark.parametrize("head_dim", [1, 2, 3])
def test_cells_of_any_size_at_any_place_are_copied(head_dim: int, offset: int) -> None:
    """VLLM may have its layers in one allocation, one behind the other."""
    geometry = KvGeometry(2, 2, head_dim, dtype_bytes=2, page_size_tokens=3)
    shape = (BLOCKS, 2, 3, 2 * head_dim)
    count = torch.Size(shape).numel()
    layers = {
        layer: torch.randn(offset + count).to(torch.bfloat16)[offset:].view(shape)
        for layer in range(2)
    }
    before = [each[1].clone() for each in layers.values()]
    blocks, staging = Blocks(geometry, part_of(2, 0, 1), layers), Staging(2, geometry.page_bytes)
    blocks.open(staging.place)

    blocks.save([(1, 1)])
    blocks.load([(1, 4)])

    for tensor, cells in zip(layers.values(), before, strict=True):
        assert torch.equal(tensor[4], cells)
        assert torch.equal(tensor[1], cells)


def test_a_rank_with_the_heads_of_another_saves_nothing() -> None:
    staging = Staging(2, GEOMETRY.page_bytes)
    whole = [torch.ones(BLOCKS, 4, 8, 10).to(torch.bfloat16) for _ in range(3)]
    first, second = workers(8, 1, whole)[:2]
    for each, is_written in ((second, False), (first, True)):
        each.open(staging.place)
        end(each.save([(0, 1)]))
        assert any(staging.view(0)) is is_written


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (torch.zeros(6, 4, 8, 9, dtype=torch.bfloat16), "KV of shape"),
        (torch.zeros(2, 6, 4, 8, 10, dtype=torch.bfloat16), "KV of shape"),
        (torch.zeros(6, 4, 8, 10), "KV of 4 bytes"),
        (torch.zeros(6, 8, 4, 10, dtype=torch.bfloat16).transpose(1, 2), "strides"),
    ],
)
def test_another_layout_is_refused_by_name(tensor: torch.Tensor, said: str) -> None:
    with pytest.raises(KvrsError, match=said):
        Blocks(GEOMETRY, part_of(4, 0, 1), {0: tensor})


def test_layers_apart_are_refused() -> None:
    cells = torch.zeros(6, 4, 8, 10, dtype=torch.bfloat16)
    with pytest.raises(KvrsError, match=r"layers \[0, 2\]"):
        Blocks(GEOMETRY, part_of(4, 0, 1), {0: cells, 2: cells})


def test_a_layer_that_the_model_does_not_have_is_refused() -> None:
    cells = torch.zeros(6, 4, 8, 10, dtype=torch.bfloat16)
    with pytest.raises(KvrsError, match="layer 3; allowed: below 3"):
        Blocks(GEOMETRY, part_of(4, 0, 1), {3: cells})


def test_of_ranks_with_the_same_heads_one_saves_them() -> None:
    assert [part_of(4, rank, 8) for rank in range(4)] == [
        WorkerPart(range(1), saves=True),
        WorkerPart(range(1), saves=False),
        WorkerPart(range(1, 2), saves=True),
        WorkerPart(range(1, 2), saves=False),
    ]


def test_memory_of_other_pages_is_refused() -> None:
    staging = Staging(2, GEOMETRY.page_bytes * 2)
    with pytest.raises(KvrsError, match="staged pages of"):
        workers(1, 1)[0].open(staging.place)


def test_slots_are_counted() -> None:
    staging = Staging(3, 64)
    taken = staging.take(2)
    assert len(taken) == 2
    more = staging.take(2)
    assert len(more) == 1
    assert staging.take(1) == []
    staging.give_back(taken)
    assert staging.used == 1
    assert {*staging.take(9), *more} == {0, 1, 2}
