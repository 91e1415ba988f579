"""The storage that SGLang loads, without SGLang: with stand-ins for what is imported of it.
Whatever goes wrong is a miss, with one line, and ends nothing.
"""

import importlib
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kvrs.engines import fingerprint
from kvrs.protocol.rows import SGLANG_VARIABLE
from kvrs.transfer.rows.ledger import LedgerView
from kvrs_testkit.row_agent import until
from kvrs_testkit.sglang_arguments import server_arguments

PAGE, LAYERS, HEADS, DIM = 4, 2, 2, 8
KEYS = [f"{number:064x}" for number in range(1, 7)]
INDICES = torch.arange(len(KEYS) * PAGE)
MISSES = [False] * len(KEYS)


class MHATokenToKVPoolHost:
    """HiCache's host memory of a plain model, as its `layer_first` has it."""

    layout, page_size, dtype = "layer_first", PAGE, torch.bfloat16
    layer_num, start_layer, end_layer, head_num, head_dim = LAYERS, 0, LAYERS, HEADS, DIM

    def __init__(self, pages: int = len(KEYS)) -> None:
        self.kv = torch.zeros((2, LAYERS, pages * PAGE, HEADS, DIM), dtype=self.dtype)

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros((2, LAYERS, PAGE, HEADS, DIM), dtype=self.dtype).flatten()

    def get_data_page(self, index: int) -> torch.Tensor:
        return self.kv[:, :, index : index + PAGE].flatten()

    def set_from_flat_data_page(self, index: int, page: torch.Tensor) -> None:
        self.kv[:, :, index : index + PAGE] = page.reshape(2, LAYERS, PAGE, HEADS, DIM)


class WeightUpdater:
    """The stand-in for SGLang's own, which notes what it has done."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def update_weights_from_disk(self, path: str) -> bool:
        self.done.append(path)
        return True


class HiCacheStorage:
    """SGLang's base class."""

    mem_pool_host: Any

    def register_mem_pool_host(self, pool: Any) -> None:
        self.mem_pool_host = pool

    def register_mem_host_pool_v2(self, pool: Any, name: str) -> None:
        pass


@pytest.fixture
def arguments(tmp_path: Path) -> SimpleNamespace:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"weights")
    return server_arguments(
        model, device="cpu", served_model_name="tiny", hicache_storage_backend="dynamic"
    )


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch, arguments: SimpleNamespace) -> ModuleType:
    empty = SimpleNamespace(empty=lambda: "nothing")
    stand_ins: dict[str, dict[str, Any]] = {
        "sglang": {"__version__": "0.5.23"},
        "sglang.srt": {},
        "sglang.srt.mem_cache": {},
        "sglang.srt.mem_cache.hicache_storage": {
            "HiCacheStorage": HiCacheStorage,
            "PoolTransferResult": empty,
        },
        "sglang.srt.model_executor": {},
        "sglang.srt.model_executor.model_runner_components": {},
        "sglang.srt.model_executor.model_runner_components.weight_updater": {
            # Each test has a class of its own, since its methods are changed.
            "WeightUpdater": type("WeightUpdater", (WeightUpdater,), dict(vars(WeightUpdater)))
        },
        "sglang.srt.runtime_context": {
            "get_server_args": lambda: arguments,
            "get_memory": lambda: arguments,
        },
    }
    for name, members in stand_ins.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "kvrs.sglang.storage", raising=False)
    # The server starts behind all that the test writes.
    monkeypatch.setattr(fingerprint, "STARTED_NS", time.time_ns() + 10**12)
    monkeypatch.setenv("KVRS_SECRET", "s" * 32)
    return importlib.import_module("kvrs.sglang.storage")


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    """No agent runs."""
    config = tmp_path / "kvrs.yaml"
    config.write_text(
        f"backup: {{mode: local, directory: {tmp_path}}}\n"
        "cluster:\n  backend: sglang\n  nodes:\n"
        "  - id: n0\n    instances: [{id: d0, role: decode, port: 30000}]\n"
    )
    return {"config": str(config), "instance": "d0", "region_bytes": 1 << 16, "interface_v1": 1}


Builder = Callable[..., Any]


@pytest.fixture
def build(storage: ModuleType, options: dict[str, Any]) -> Builder:
    def build(pool: Any = None, **changed: Any) -> Any:
        config = SimpleNamespace(
            extra_config={**options, **changed},
            tp_rank=0,
            tp_size=1,
            pp_rank=0,
            pp_size=1,
            is_mla_model=False,
            attn_cp_size=1,
            dcp_size=1,
            should_split_heads=False,
        )
        made = storage.KvrsStorage(config, {})
        made.register_mem_pool_host(pool or filled())
        made.on_host_pools_registered()
        until(lambda: made._pages is not None or made.switch.off_reason is not None)
        return made

    return build


def filled() -> MHATokenToKVPoolHost:
    pool = MHATokenToKVPoolHost()
    pool.kv.copy_(torch.arange(pool.kv.numel()).reshape(pool.kv.shape))
    return pool


def shared(made: Any) -> int:
    """How many pages an agent would find."""
    view = LedgerView(made._pages.region.ledger.descriptor)
    return sum(1 for each in view.sequences() if each and not each & 1)


def test_pages_come_back_as_they_were(build: Builder) -> None:
    """By the calls with places in host memory, of which decode makes one for each page."""
    made = build()
    before = made.mem_pool_host.kv.clone()
    for at in range(len(KEYS)):
        places = INDICES[at * PAGE : (at + 1) * PAGE]
        assert made.batch_set_v1(KEYS[at : at + 1], places) == [True]
    made.mem_pool_host.kv.zero_()

    assert made.batch_exists([*KEYS, "ff" * 32]) == len(KEYS)
    assert made.batch_get_v1(KEYS, INDICES) == [True] * len(KEYS)
    assert torch.equal(made.mem_pool_host.kv, before)
    made.close()


def test_pages_come_back_by_calls_with_tensors(build: Builder) -> None:
    made = build()
    pages = [made.mem_pool_host.get_data_page(at * PAGE) for at in range(len(KEYS))]
    assert made.batch_set(KEYS, pages)
    targets = [made.mem_pool_host.get_dummy_flat_data_page() for _ in range(len(KEYS) + 1)]
    *found, none = made.batch_get([*KEYS, "ff" * 32], targets)
    assert none is None
    assert all(map(torch.equal, found, pages))
    assert made.exists(KEYS[0])
    made.close()


def test_nothing_is_shared_after_clear(build: Builder) -> None:
    made = build()
    made.batch_set_v1(KEYS, INDICES)
    assert shared(made) == len(KEYS)
    made.clear()
    assert shared(made) == 0
    assert made.batch_exists(KEYS) == 0
    assert made.batch_get_v1(KEYS, INDICES) == MISSES
    made.close()


def test_nothing_is_shared_once_weights_change(build: Builder, storage: ModuleType) -> None:
    """Pages of both versions would have the same keys."""
    made = build()
    made.batch_set_v1(KEYS, INDICES)
    updater = storage.WeightUpdater()

    assert updater.update_weights_from_disk("/other")

    assert updater.done == ["/other"]
    assert shared(made) == 0
    made.batch_set_v1(KEYS, INDICES)
    assert shared(made) == 0
    assert made.batch_exists(KEYS) == 0
    made.close()


def off(build: Builder, caplog: pytest.LogCaptureFixture, **changed: Any) -> tuple[Any, str]:
    """A storage that starts off, and its one line."""
    with caplog.at_level(logging.ERROR):
        made = build(**changed)
        until(lambda: bool(caplog.records))
    (line,) = [record.getMessage() for record in caplog.records]
    return made, line


def assert_idle(made: Any) -> None:
    assert made.batch_exists(KEYS) == 0
    assert made.batch_set_v1(KEYS, INDICES) == [True] * len(KEYS)
    assert made.batch_get_v1(KEYS, INDICES) == MISSES
    assert made.batch_get(KEYS, [None] * len(KEYS)) == [None] * len(KEYS)
    assert made.batch_set(KEYS, [None] * len(KEYS))
    made.clear()
    made.close()


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"config": "/nowhere.yaml"}, "nowhere.yaml"),
        ({"instance": "d7"}, "d7"),
        ({"region_bytes": 1}, "region_bytes"),
        ({"region_bytes": 1 << 60}, "region_bytes"),
        ({"region_bytes": "much"}, "region_bytes"),
        ({"pool": SimpleNamespace()}, "SimpleNamespace"),
    ],
)
def test_what_is_set_wrongly_is_one_line_and_no_more(
    build: Builder, caplog: pytest.LogCaptureFixture, changed: dict[str, Any], reason: str
) -> None:
    made, line = off(build, caplog, **changed)
    assert reason in line
    assert_idle(made)


def test_without_a_secret_sglang_starts(
    build: Builder, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVRS_SECRET")
    made, line = off(build, caplog)
    assert "KVRS_SECRET" in line
    assert_idle(made)


def test_what_is_attached_at_run_time_shares_nothing(
    build: Builder, caplog: pytest.LogCaptureFixture, arguments: SimpleNamespace
) -> None:
    """Its model's files may be others than what weights have been updated to."""
    arguments.hicache_storage_backend = None
    made, line = off(build, caplog)
    assert "at run time" in line
    assert_idle(made)


def test_an_error_in_a_call_turns_it_off(build: Builder) -> None:
    made = build()
    made.batch_set_v1(KEYS, INDICES)

    assert made.batch_set_v1(["no key"], INDICES) == [True]

    assert "no key" in made.switch.off_reason or "fromhex" in made.switch.off_reason
    assert shared(made) == 0
    assert_idle(made)


def test_further_kinds_of_memory_are_refused_and_all_their_calls_are_misses(build: Builder) -> None:
    made = build()
    made.batch_set_v1(KEYS, INDICES)
    transfer = SimpleNamespace(name="swa", keys=KEYS)

    made.register_mem_host_pool_v2(MHATokenToKVPoolHost(), "swa")

    assert "swa" in made.switch.off_reason
    assert shared(made) == 0
    assert made.batch_exists_v2(KEYS, [transfer]) == "nothing"
    assert made.batch_get_v2([transfer]) == {"swa": MISSES}
    assert_idle(made)


def test_the_pool_of_keys_and_values_itself_is_no_other_one(build: Builder) -> None:
    made = build()
    made.register_mem_host_pool_v2(made.mem_pool_host, "kv")
    assert made.switch.off_reason is None
    made.close()


@pytest.mark.parametrize("alike", [True, False])
def test_a_page_of_an_agent_is_what_this_server_computes(build: Builder, alike: bool) -> None:
    """The first one that is another page turns kvrs off: nothing more is loaded or shared."""
    made = build(pool=filled())
    key = bytes.fromhex(KEYS[2])
    ours = made.mem_pool_host.get_data_page(2 * PAGE).view(torch.uint8)
    theirs = bytearray(ours.numpy().tobytes() if alike else bytes(ours.numel()))
    made._pages.proofs._theirs = key, theirs

    made.batch_set_v1(KEYS, INDICES)

    assert shared(made) == (len(KEYS) if alike else 0)
    assert made.switch.off_reason == (
        None if alike else "a page of an agent is not what this server computes"
    )
    made.close()


@pytest.mark.parametrize("is_set", [True, False, None])
def test_the_log_tells_that_pages_of_aborted_transfers_are_not_held(
    storage: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_set: bool | None,
) -> None:
    """By SGLang's own reading of the environment; a version without it is not judged."""
    environ = ModuleType("sglang.srt.environ")
    variables = {} if is_set is None else {SGLANG_VARIABLE: SimpleNamespace(get=lambda: is_set)}
    environ.envs = SimpleNamespace(**variables)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sglang.srt.environ", environ)

    assert storage._holds_aborted() is is_set

    said = [record for record in caplog.records if SGLANG_VARIABLE in record.getMessage()]
    assert len(said) == (is_set is False)
