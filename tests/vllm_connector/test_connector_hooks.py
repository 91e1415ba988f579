"""The connector as vLLM calls it, beside stand-ins for vLLM's classes: what is unknown, wrong or
foreign turns it off or is left alone, and never raises.
"""

import logging
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import msgspec
import pytest
import torch

from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.connector import connector_key, seal
from kvrs.protocol.instance import (
    EPOCHS_PER_START,
    CheckpointTarget,
    KvrsParams,
    SourceRange,
)
from kvrs.vllm.blocks import WorkerPart
from kvrs.vllm.guard import Switch
from kvrs.vllm.scheduler import Done, WorkerStep
from kvrs.vllm.staging import StagingPlace, pages_per_step
from kvrs.vllm.tracked import CopyRequest
from kvrs_testkit.vllm_interface import V1, Role, load_connector

SECRET = b"x" * 32
AGENT = InstanceId("agent-n0")
STREAM = StreamId("ab" * 16)
BASE = f"{V1}.base"
YAML = """
cluster:
  backend: vllm
  model: MODEL
  nodes:
  - {id: n0, instances: [{id: d0, role: decode, port: 8100, connector_port: 8101}]}
profiles: {prefill: opt-13b-a100-distserve-tp1}
backup: {mode: local}
"""

Change = Callable[[Any], None]


class Port:
    """The page port: it keeps what it is made with."""

    failure: str | None = None
    made: ClassVar["list[Port]"] = []

    def __init__(self, *args: Any) -> None:
        self.geometry, self.fingerprint, self.staging = args[4:7]
        self.off_reason: Callable[[], str | None] = args[8]
        self.pinned_blocks: Callable[[], int] = args[9]
        self.epoch: int = args[10]
        self.restores: list[Any] = []
        self.released: list[Any] = []
        self.followed: list[Any] = []
        self.is_closed = False
        Port.made = [self]

    def start(self) -> None: ...
    def close(self) -> None:
        self.is_closed = True

    def ended(self, saved: Any, *, send_rest: bool) -> None: ...
    def is_sent(self, saved: Any) -> bool:
        return True

    def is_fenced(self, stream: StreamId, attempt: tuple[int, int]) -> bool:
        return False

    def fetch(self, restore: Any) -> None:
        self.restores.append(restore)

    def release(self, restore: Any) -> None:
        self.released.append(restore)

    def follow(self, saved: Any, checkpoints: Any, *, handed_over: bool) -> None:
        self.followed.append((saved, handed_over))

    def settled(self, *loaded: Any) -> None: ...
    def filled(self, fills: Any) -> None: ...
    def copied(self, copies: Any) -> None: ...


class FullAttentionSpec(SimpleNamespace):
    pass


class Vllm:
    """vLLM's configuration, and a connector in each of its processes."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        model = path / "model"
        model.mkdir()
        (model / "model.safetensors").write_bytes(bytes(64))
        (path / "cluster.yaml").write_text(YAML.replace("MODEL", str(model)))
        monkeypatch.setenv("KVRS_SECRET", SECRET.decode())
        self.options = {"config": str(path / "cluster.yaml"), "instance": "d0"}
        # A connector has memory for pages of this test from its start.
        monkeypatch.setattr("kvrs.protocol.connector.STAGING_BYTES", 1 << 20)
        self._monkeypatch = monkeypatch
        self.module: ModuleType | None = None
        spec = FullAttentionSpec(head_size=4, dtype=torch.float16, block_size=4)
        self.groups: list[Any] = [SimpleNamespace(kv_cache_spec=spec)]
        self.config = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(kv_connector_extra_config={"kvrs": self.options}),
            model_config=SimpleNamespace(
                dtype="half",
                quantization=None,
                hf_overrides=None,
                model=str(model),
                hf_text_config=SimpleNamespace(num_hidden_layers=2),
                get_total_num_kv_heads=lambda: 2,
            ),
            cache_config=SimpleNamespace(cache_dtype="auto"),
            parallel_config=SimpleNamespace(world_size=1, tensor_parallel_size=1),
        )

    def load(self, change: Change = lambda _: None) -> ModuleType:
        return load_connector(self._monkeypatch, change)

    def start(self, role: Role = Role.SCHEDULER, module: ModuleType | None = None) -> Any:
        module = self.module = module or self.module or self.load()
        self._monkeypatch.setattr(module, "ConnectorPort", Port)
        return module.KvrsConnector(self.config, role, SimpleNamespace(kv_cache_groups=self.groups))


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Vllm:
    return Vllm(tmp_path, monkeypatch)


def request(params: object = None, tokens: int = 18, **others: Any) -> Any:
    known = {
        "request_id": "r",
        "kv_transfer_params": params,
        "all_token_ids": list(range(tokens)),
        "num_tokens": tokens,
        "num_computed_tokens": 0,
        "cache_salt": None,
        "lora_request": None,
        "mm_features": [],
        "status": SimpleNamespace(name="FINISHED_LENGTH_CAPPED"),
    }
    return SimpleNamespace(**known | others)


def sealed(params: KvrsParams, secret: bytes = SECRET) -> Any:
    key = connector_key(secret, InstanceId("d0"))
    return {"kvrs": msgspec.to_builtins(seal(params, key))}


RESTORED = KvrsParams(
    STREAM,
    2,
    1,
    sources=[SourceRange(AGENT, 0, 4, 7)],
    checkpoints=[CheckpointTarget(AGENT, 1 << 20)],
)


class Output(SimpleNamespace):
    """vLLM's scheduler output."""

    def __init__(self, **tokens: int) -> None:
        super().__init__(
            num_scheduled_tokens=tokens,
            finished_req_ids=set(),
            scheduled_new_reqs=[
                SimpleNamespace(req_id=name, block_ids=([*range(100, 120)],)) for name in tokens
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[], resumed_req_ids=set(), new_block_ids=[]
            ),
        )


def allocated(connector: Any, asked: Any, tokens: int) -> None:
    """Blocks 30 to 34 for a request."""
    blocks = SimpleNamespace(get_block_ids=lambda: ([30, 31, 32, 33, 34],))
    connector.update_state_after_alloc(asked, blocks, tokens)


def call_all_hooks(connector: Any) -> None:
    """Call what vLLM calls in the life of a request, in both processes."""
    asked = request(sealed(RESTORED))
    connector.bind_gpu_block_pool(SimpleNamespace(blocks=[]))
    connector.on_new_request(asked)
    assert connector.get_num_new_matched_tokens(asked, 0) == (0, False)
    allocated(connector, asked, 0)
    connector._connector_metadata = connector.build_connector_meta(Output(r=18))
    connector.register_kv_caches({"model.layers.0.attn": torch.zeros(1)})
    connector.start_load_kv(None)
    connector.wait_for_layer_load("x")
    connector.save_kv_layer("x", None, None)
    connector.wait_for_save()
    assert connector.get_finished(set()) == (None, None)
    assert connector.get_block_ids_with_load_errors() == set()
    connector.build_connector_worker_meta()
    connector.update_connector_output(SimpleNamespace(kv_connector_worker_meta=None))
    assert connector.has_pending_push_work() is False
    assert connector.request_finished_all_groups(asked, ([1, 2],)) == (False, None)
    assert connector.requires_kv_delivery is False
    connector.shutdown()


def test_a_known_vllm_is_served(vllm: Vllm) -> None:
    connector = vllm.start()
    assert connector.switch.off_reason is None
    assert Port.made[0].geometry.page_size_tokens == 4
    assert vllm.start(Role.WORKER).switch.off_reason is None


def without(module: str, owner: str, name: str) -> Change:
    def change(stand_ins: Any) -> None:
        stand_ins[module][owner].__abstractmethods__ = frozenset()
        delattr(stand_ins[module][owner], name)

    return change


def with_hook(name: str, hook: Any) -> Change:
    return lambda stand_ins: setattr(stand_ins[BASE]["KVConnectorBase_V1"], name, hook)


def further_hook(stand_ins: Any) -> None:
    hook: Any = lambda self: None  # noqa: E731
    hook.__isabstractmethod__ = True
    known = stand_ins[BASE]["KVConnectorBase_V1"]
    made = type(known)("KVConnectorBase_V1", (known,), {"bless": hook})
    stand_ins[BASE]["KVConnectorBase_V1"] = made


def without_blocks(stand_ins: Any) -> None:
    del stand_ins["vllm.v1.core.sched.output"]["CachedRequestData"].__annotations__["req_ids"]


def with_member(path: str, name: str, member: Any = None) -> Change:
    """Another member of a class (`Class.member`) or of a module; None: it is not there."""

    def change(stand_ins: Any) -> None:
        owner, _, last = name.rpartition(".")
        members: Any = stand_ins[path]
        if not owner:
            members[last] = member
        elif member is None:
            delattr(members[owner], last)
        else:
            setattr(members[owner], last, member)

    return change


CORE = "vllm.v1.core"


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (further_hook, "vLLM wants a hook bless, which is not known"),
        (
            without(BASE, "KVConnectorBase_V1", "on_new_request"),
            "vLLM has no hook on_new_request",
        ),
        (
            with_hook("request_finished", lambda self, request, block_ids, reason: None),
            r"request_finished takes \(self, request, block_ids, reason\); allowed: \(self, req",
        ),
        (
            with_hook("update_connector_output", lambda self, output: None),
            r"update_connector_output takes \(self, output\)",
        ),
        (with_hook("requires_kv_delivery", lambda self: True), "hook requires_kv_delivery takes"),
        (without_blocks, "CachedRequestData has no req_ids"),
        (
            with_member(f"{CORE}.kv_cache_manager", "KVCacheBlocks.get_block_ids"),
            "kv_cache_manager has no KVCacheBlocks.get_block_ids",
        ),
        (
            with_member(
                f"{CORE}.kv_cache_manager",
                "KVCacheBlocks.get_block_ids",
                lambda self, group: [],
            ),
            r"get_block_ids cannot be called with \(self\): missing a required .* 'group'",
        ),
        (
            with_member(f"{CORE}.block_pool", "BlockPool.touch", lambda self: None),
            r"touch cannot be called with \(self, blocks\)",
        ),
        (with_member(f"{CORE}.block_pool", "BlockPool.__init__"), "BlockPool has no blocks"),
        (with_member(f"{CORE}.kv_cache_utils", "KVCacheBlock.block_hash"), "has no block_hash"),
        (
            with_member("vllm.v1.request", "Request.__init__", lambda self: None),
            "Request has no request_id; .*; vLLM's Request has no all_token_ids",
        ),
        (with_member("vllm.v1.request", "Request.num_tokens"), "Request has no num_tokens"),
        (with_member("vllm.v1.request", "RequestStatus", Role), "no FINISHED_LENGTH_CAPPED"),
        (
            with_member("vllm.v1.outputs", "KVConnectorOutput.__annotations__", {}),
            "KVConnectorOutput has no kv_connector_worker_meta",
        ),
        (
            with_member("vllm.distributed.parallel_state", "get_tensor_model_parallel_rank"),
            "parallel_state has no get_tensor_model_parallel_rank",
        ),
        (lambda all_: all_[BASE].pop("KVConnectorWorkerMetadata"), "no KVConnectorWorkerMetadata"),
        (lambda all_: all_.pop("vllm.v1.core.sched.output"), "No module named"),
    ],
)
def test_an_unknown_interface_is_left_alone_and_named(
    vllm: Vllm,
    caplog: pytest.LogCaptureFixture,
    change: Change,
    said: str,
    role: Role,
) -> None:
    """No hook of such a vLLM raises, also where it gives more arguments than are known."""
    Port.made = []

    with caplog.at_level(logging.ERROR):
        connector = vllm.start(role, vllm.load(change))

    assert re.search(said, connector.switch.off_reason)
    assert connector.switch.off_reason in caplog.text
    if role is Role.SCHEDULER:
        assert Port.made[0].off_reason() == connector.switch.off_reason
    call_all_hooks(connector)
    assert connector.on_new_request(request(), "more") is None
    assert connector.get_num_new_matched_tokens(request(), 0, more=1) == (0, False)
    assert connector.build_connector_meta(Output(), 1, more=2).step.loads == []
    connector.start_load_kv(None, "more")
    assert connector.get_finished(set(), 1) == (None, None)


@pytest.mark.parametrize("name", ["HND", "LBHNC"])
def test_the_layout_has_the_name_that_vllm_s_connectors_use(vllm: Vllm, name: str) -> None:
    """`MultiConnector` compares names, and raises where they differ."""

    def change(stand_ins: Any) -> None:
        if name == "LBHNC":
            layouts = SimpleNamespace(KVCacheLayout=SimpleNamespace(LBHNC=1))
            stand_ins["vllm.v1.kv_cache_layout"] = vars(layouts)

    connector = vllm.start(module=vllm.load(change))

    assert connector.get_required_kvcache_layout(None) == name
    connector.set_xfer_handshake_metadata_pp_aware({(1, 0): "of NIXL"})
    assert connector.switch.off_reason is None


@pytest.mark.parametrize("name", ["has_pending_push_work", "bind_gpu_block_pool"])
def test_a_vllm_that_lends_no_blocks_is_served_without(vllm: Vllm, name: str) -> None:
    connector = vllm.start(module=vllm.load(without(BASE, "KVConnectorBase_V1", name)))

    connector.bind_gpu_block_pool(SimpleNamespace(blocks=[]))

    assert connector.switch.off_reason is None
    has_pool = connector._scheduler.ended.pool is not None
    assert has_pool is (name == "bind_gpu_block_pool")


def test_fields_of_a_newer_kv_cache_that_change_nothing_are_fine(vllm: Vllm) -> None:
    """VLLM 0.32 has all of them, for full attention that is not quantised."""
    vars(vllm.groups[0].kv_cache_spec).update(
        sliding_window=None, kv_quant_mode=SimpleNamespace(value=0, name="NONE"), head_size_v=4
    )
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        setattr(vllm.config.parallel_config, name, 1)
    assert vllm.start().switch.off_reason is None


class SlidingWindowSpec(FullAttentionSpec):
    pass


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ([], "0 groups of KV layers"),
        ([None, None], "2 groups of KV layers"),
        ([SlidingWindowSpec()], "KV of kind SlidingWindowSpec"),
        ([FullAttentionSpec(sliding_window=128)], "a sliding window"),
        (
            [FullAttentionSpec(kv_quant_mode=SimpleNamespace(value=1, name="FP8"))],
            "KV quantised as FP8",
        ),
        ([FullAttentionSpec(head_size=4, head_size_v=2)], "keys and values of different sizes"),
        ([FullAttentionSpec(head_size=4, head_size_v=8)], "keys and values of different sizes"),
        ([FullAttentionSpec()], "AttributeError"),
    ],
)
def test_another_kind_of_kv_is_left_alone_and_named(
    vllm: Vllm, groups: list[Any], said: str, role: Role
) -> None:
    vllm.groups = [SimpleNamespace(kv_cache_spec=spec) for spec in groups]

    connector = vllm.start(role)

    assert said in connector.switch.off_reason
    if role is Role.SCHEDULER:
        assert said in (Port.made[0].off_reason() or "")
        assert Port.made[0].fingerprint == ""
        assert Port.made[0].staging.pages == 2  # Its memory is vLLM's.
    call_all_hooks(connector)


@pytest.mark.parametrize("name", ["decode_context_parallel_size", "prefill_context_parallel_size"])
def test_context_parallelism_is_left_alone(vllm: Vllm, name: str) -> None:
    setattr(vllm.config.parallel_config, name, 2)
    assert f"{name}: got 2" in vllm.start().switch.off_reason


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("model_config", "dtype", "float"),
        ("model_config", "quantization", "awq"),
        ("model_config", "hf_overrides", {"rope_theta": 1}),
        ("cache_config", "cache_dtype", "fp8"),
    ],
)
def test_settings_by_which_equal_weights_give_other_kv_are_in_the_fingerprint(
    vllm: Vllm, part: str, name: str, value: Any
) -> None:
    vllm.start()
    before = Port.made[0].fingerprint

    setattr(getattr(vllm.config, part), name, value)
    vllm.start()

    assert Port.made[0].fingerprint not in ("", before)


def test_a_secret_may_be_rotated(vllm: Vllm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Proxies that have the one before are heard as well."""
    monkeypatch.setenv("KVRS_SECRET", f"{'y' * 32}\n{SECRET.decode()}")
    connector = vllm.start()
    for secret in (SECRET, b"y" * 32):
        connector.on_new_request(request(sealed(RESTORED, secret)))
    assert len(Port.made[0].restores) == 2


def test_staged_pages_count_as_pinned(vllm: Vllm) -> None:
    vllm.start()
    Port.made[0].staging.take(3)
    assert Port.made[0].pinned_blocks() == 3


def test_a_worker_copies_staged_pages_into_blocks_and_back(
    vllm: Vllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers go by the numbers in their names, pages through the memory of the scheduler's side."""
    ranks = ModuleType("vllm.distributed.parallel_state")
    ranks.get_tensor_model_parallel_rank = lambda: 0  # type: ignore[attr-defined]
    connector, worker = vllm.start(), vllm.start(Role.WORKER)
    port = connector._port
    monkeypatch.setitem(sys.modules, ranks.__name__, ranks)
    layers = {number: torch.zeros(120, 2, 4, 8, dtype=torch.float16) for number in (1, 0)}
    worker.register_kv_caches(
        {f"model.layers.{number}.attn": tensor for number, tensor in layers.items()}
    )
    asked = request(sealed(RESTORED))
    connector.on_new_request(asked)
    (restore,) = port.restores
    restore.slots += port.staging.take(2)
    restore.is_over = True
    pages = torch.randn(2, 2, 2, 4, 8).to(torch.float16)  # Of two pages each layer's cells.
    for slot, page in zip(restore.slots, pages, strict=True):
        port.staging.view(slot)[:] = page.numpy().tobytes()

    assert connector.get_num_new_matched_tokens(asked, 0) == (8, True)
    allocated(connector, asked, 8)
    worker._connector_metadata = connector.build_connector_meta(Output())
    worker.start_load_kv(None)
    assert worker.get_finished(set()) == (None, {"r"})
    for number, tensor in layers.items():
        assert torch.equal(tensor[30:32], pages[:, number])
        tensor[101] = tensor[31]

    worker.build_connector_worker_meta()
    (slot,) = port.staging.take(1)
    copied: list[int] = []
    connector._scheduler.requested.append(CopyRequest("r", 1, [slot], copied.append))
    worker._connector_metadata = connector.build_connector_meta(Output(r=18))
    worker.wait_for_save()
    assert bytes(port.staging.view(slot)) == pages[1].numpy().tobytes()
    assert (worker.switch.off_reason, connector.switch.off_reason) == (None, None)


def test_a_run_of_vllm_s_own_copies_nothing(vllm: Vllm) -> None:
    """No step of the connector is bound in one, for example as vLLM profiles itself."""
    worker = vllm.start(Role.WORKER)
    for bound in (None, object()):
        worker._connector_metadata = bound
        worker.start_load_kv(None)
        worker.wait_for_save()
        assert worker.get_finished(set()) == (None, None)


def test_a_model_without_weights_in_a_directory_is_left_alone(vllm: Vllm) -> None:
    vllm.config.model_config.model = "someone/model"
    assert "no *.safetensors" in vllm.start().switch.off_reason
    assert "no *.safetensors" in (Port.made[0].off_reason() or "")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (None, "allowed: an object with config"),
        ("x", "allowed: an object with config"),
        ({"instance": "d9"}, "allowed: d0"),
        ({"config": "/none"}, "/none"),
        ({"staging_bytes": "much"}, "much"),
        ({"staging_bytes": 0}, "staging_bytes"),
        ({"deadline_s": 0}, "deadline_s"),
        ({"deadline_s": float("inf")}, "deadline_s"),
        ({"deadline_s": float("nan")}, "deadline_s"),
        ({"dead_line_s": 5}, "dead_line_s"),
    ],
)
def test_wrong_options_turn_it_off(vllm: Vllm, options: Any, said: str) -> None:
    whole = vllm.options | options if isinstance(options, dict) else options
    vllm.config.kv_transfer_config.kv_connector_extra_config = {"kvrs": whole}

    connector = vllm.start()

    assert said in connector.switch.off_reason
    call_all_hooks(connector)


@pytest.mark.parametrize(
    ("one", "other", "are_alike"),
    [(None, "", True), ("a", "a", True), ("a", "b", False), (None, "a", False)],
)
def test_pages_of_another_salt_are_other_pages(
    vllm: Vllm, one: str | None, other: str | None, are_alike: bool
) -> None:
    connector = vllm.start()

    for salt in (one, other):
        connector.on_new_request(request(sealed(RESTORED), cache_salt=salt))

    first, second = Port.made[0].restores
    assert (first.tags == second.tags) is are_alike


def test_options_are_those_that_were_given(vllm: Vllm) -> None:
    """Room for ten pages, and seven seconds."""
    options = vllm.options | {"staging_bytes": 10 * 256, "deadline_s": 7.0}
    vllm.config.kv_transfer_config.kv_connector_extra_config = {"kvrs": options}

    connector = vllm.start()
    connector.on_new_request(request(sealed(RESTORED)))

    port = Port.made[0]
    assert (port.geometry.page_bytes, port.staging.pages) == (256, 10)
    assert 6.0 < port.restores[0].deadline_s - time.monotonic() <= 7.0


def promised(connector: Any, asked: Any) -> Any:
    """The restore of a request, of which one page has come and vLLM knows: workers may copy."""
    connector.on_new_request(asked)
    (restore,) = Port.made[0].restores
    restore.slots.append(5)
    restore.is_over = True
    assert connector.get_num_new_matched_tokens(asked, 0) == (4, True)
    allocated(connector, asked, 4)
    return restore


def test_a_load_has_ended_when_all_ranks_have_answered(vllm: Vllm) -> None:
    """VLLM puts their answers to one step together."""
    vllm.config.parallel_config.world_size = 2
    connector, asked = vllm.start(), request(sealed(RESTORED))
    restore = promised(connector, asked)
    connector.build_connector_meta(Output())
    assert vllm.module is not None
    one, other = (vllm.module.KvrsWorkerMetadata(Done(loads={"r": 1})) for _ in range(2))

    connector.update_connector_output(SimpleNamespace(kv_connector_worker_meta=None))
    assert Port.made[0].released == []
    whole = one.aggregate(other)
    connector.update_connector_output(SimpleNamespace(kv_connector_worker_meta=whole))

    assert Port.made[0].released == [restore]
    assert connector.switch.off_reason is None


def test_a_rank_has_the_heads_that_vllm_gives_it(
    vllm: Vllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm.config.parallel_config.tensor_parallel_size = 2
    worker = vllm.start(Role.WORKER)
    ranks = sys.modules["vllm.distributed.parallel_state"]
    monkeypatch.setattr(ranks, "get_tensor_model_parallel_rank", lambda: 1)

    worker.register_kv_caches(
        {
            f"model.layers.{number}.attn": torch.zeros(9, 1, 4, 8, dtype=torch.float16)
            for number in range(2)
        }
    )

    assert worker.switch.off_reason is None
    assert worker._blocks._part == WorkerPart(range(1, 2), saves=True)


def test_the_end_of_its_port_turns_it_off(vllm: Vllm) -> None:
    """Nothing would be fetched or saved, and requests would wait for their deadlines."""
    connector = vllm.start()
    Port.made[0].failure = "no descriptor is left"

    connector.build_connector_meta(Output())

    assert "its port has ended: no descriptor is left" in connector.switch.off_reason


def test_the_port_ends_with_vllm_s_engine(vllm: Vllm) -> None:
    connector = vllm.start()
    connector.shutdown()
    assert Port.made[0].is_closed


DEEP: Any = []
for _ in range(2000):
    DEEP = [DEEP]
HUGE = KvrsParams(STREAM, 2, 1, token_ids=list(range(30_000)))


@pytest.mark.parametrize(
    "params",
    [
        None,
        "text",
        [1],
        {},
        {"kvrs": None},
        {"kvrs": "text"},
        {"kvrs": {"params": "{}"}},
        {"kvrs": {"params": "{}", "mac": "00" * 32}},
        {"kvrs": {"params": "{}", "mac": "\udc80" * 64}},
        {"kvrs": {"params": "\ud800", "mac": "00" * 32}},
        {"kvrs": DEEP},
        {"kvrs": msgspec.to_builtins(RESTORED)},
        sealed(RESTORED, b"y" * 32),
        sealed(HUGE),
        {"kvrs": sealed(RESTORED)["kvrs"] | {"more": 1}},
    ],
    ids=lambda _: "",
)
def test_parameters_that_are_no_proxy_s_are_served_without_pages(vllm: Vllm, params: Any) -> None:
    connector = vllm.start()

    connector.on_new_request(request(params))

    assert connector.get_num_new_matched_tokens(request(params), 0) == (0, False)
    assert connector.switch.off_reason is None
    assert Port.made[0].restores == []
    assert Port.made[0].followed == []


def test_a_mac_is_of_one_instance(vllm: Vllm) -> None:
    other = seal(RESTORED, connector_key(SECRET, InstanceId("d1")))
    connector = vllm.start()
    connector.on_new_request(request({"kvrs": msgspec.to_builtins(other)}))
    assert Port.made[0].restores == []


@pytest.mark.parametrize(
    "others",
    [{"lora_request": object()}, {"mm_features": [object()]}, {"prompt_embeds": object()}],
    ids=["adapter", "image", "embeddings"],
)
def test_kv_that_is_not_of_the_tokens_alone_is_left_alone_and_said_once(
    vllm: Vllm, caplog: pytest.LogCaptureFixture, others: dict[str, Any]
) -> None:
    connector = vllm.start()

    for name in ("r", "s"):
        connector.on_new_request(request(sealed(RESTORED), request_id=name, **others))

    (said,) = [each.getMessage() for each in caplog.records]
    assert said.startswith("request r is neither saved nor restored")
    assert Port.made[0].restores == []
    assert Port.made[0].followed == []
    assert connector.switch.off_reason is None


@pytest.mark.parametrize("handed_over", [False, True])
def test_the_history_of_a_hand_off_is_saved_by_prefill(vllm: Vllm, handed_over: bool) -> None:
    connector = vllm.start()
    nixl = {"do_remote_prefill": True} if handed_over else {}
    connector.on_new_request(request(sealed(RESTORED) | nixl))
    ((_, found),) = Port.made[0].followed
    assert found is handed_over


class Block(SimpleNamespace):
    """vLLM's block, with its count of users."""


@pytest.mark.parametrize(
    ("hands_on", "status", "is_pinned"),
    [
        (True, "FINISHED_LENGTH_CAPPED", True),
        (True, "FINISHED_ABORTED", False),
        (False, "FINISHED_LENGTH_CAPPED", False),
    ],
)
def test_only_what_is_handed_on_outlives_its_request(
    vllm: Vllm, hands_on: bool, status: str, is_pinned: bool
) -> None:
    connector = vllm.start()
    pinned: list[int] = []

    freed: list[int] = []

    def free_blocks(blocks: list[Any]) -> None:
        for block in blocks:
            pinned.remove(block.number)
            freed.append(block.number)

    pool = SimpleNamespace(
        blocks=[Block(number=number, block_hash=number) for number in range(200)],
        touch=lambda blocks: pinned.extend(block.number for block in blocks),
        free_blocks=free_blocks,
    )
    connector.bind_gpu_block_pool(pool)
    asked = request(
        sealed(RESTORED) | {"do_remote_decode": hands_on}, status=SimpleNamespace(name=status)
    )
    connector.on_new_request(asked)
    connector.build_connector_meta(Output(r=18))

    assert connector.request_finished_all_groups(asked, ([*range(100, 105)],)) == (False, None)

    assert pinned == ([100, 101, 102, 103] if is_pinned else [])
    assert Port.made[0].pinned_blocks() == len(pinned)
    connector.build_connector_meta(Output())
    assert pinned == []
    # The last ones are the first to be used anew.
    assert freed == ([103, 102, 101, 100] if is_pinned else [])


@pytest.mark.parametrize("bound", ["by the configuration", "by staging"])
def test_so_many_blocks_outlive_their_requests_as_are_allowed(vllm: Vllm, bound: str) -> None:
    if bound == "by the configuration":
        path = Path(vllm.options["config"])
        backup = "{mode: local, staging_pages: 2}"
        path.write_text(path.read_text().replace("{mode: local}", backup))
    else:
        options = vllm.options | {"staging_bytes": 2 * 256}
        vllm.config.kv_transfer_config.kv_connector_extra_config = {"kvrs": options}
    connector = vllm.start()
    blocks = [Block(number=number, block_hash=number) for number in range(200)]
    connector.bind_gpu_block_pool(SimpleNamespace(blocks=blocks, touch=lambda _: None))
    asked = request(sealed(RESTORED) | {"do_remote_decode": True})
    connector.on_new_request(asked)
    connector.build_connector_meta(Output(r=18))

    connector.request_finished_all_groups(asked, ([*range(100, 105)],))

    assert Port.made[0].pinned_blocks() == 2


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize(("local_tokens", "failed"), [(0, {30, 31}), (4, {31})])
def test_a_load_that_was_not_begun_is_answered_by_a_connector_that_is_off(
    vllm: Vllm, policy: str, local_tokens: int, failed: set[int]
) -> None:
    """vLLM waits for a load for ever. Its blocks are reported as failed, with either policy; not
    those of vLLM's own cache, with which requests fail that share them.
    """
    vllm.config.kv_transfer_config.kv_load_failure_policy = policy
    connector, worker = vllm.start(), vllm.start(Role.WORKER)
    asked = request(sealed(RESTORED))
    connector.on_new_request(asked)
    (restore,) = Port.made[0].restores
    restore.slots += [5, 6]
    restore.is_over = True
    found = 8 - local_tokens
    assert connector.get_num_new_matched_tokens(asked, local_tokens) == (found, True)
    allocated(connector, asked, found)

    connector._scheduler.step = None  # An error in the step that would begin the load.
    worker._connector_metadata = connector.build_connector_meta(Output())

    assert "NoneType" in connector.switch.off_reason
    worker.start_load_kv(None)
    assert worker.get_finished(set()) == (None, {"r"})
    assert worker.get_block_ids_with_load_errors() == failed
    # The next step may have other requests in these blocks.
    assert worker.get_block_ids_with_load_errors() == set()
    worker.build_connector_worker_meta()
    assert connector.build_connector_meta(Output()).step.loads == []
    assert worker.get_finished(set()) == (None, None)


def test_a_load_that_workers_have_is_not_answered_once_more(vllm: Vllm) -> None:
    """VLLM ends its engine at an answer for a request that it has no more."""
    connector = vllm.start()
    asked = request(sealed(RESTORED))
    promised(connector, asked)
    assert connector.build_connector_meta(Output()).step.loads == [("r", [(5, 30)])]

    connector.reset_cache()

    assert connector.build_connector_meta(Output()).step.loads == []


def test_a_request_of_no_proxy_ends_without_a_trace(vllm: Vllm) -> None:
    """Those of clients that reach vLLM's own port have no parameters."""
    connector = vllm.start()
    others: list[object] = [None, "text", {}]
    for params in others:
        asked = request(params)
        connector.on_new_request(asked)
        connector.build_connector_meta(Output(r=18))
        assert connector.request_finished_all_groups(asked, ([100],)) == (False, None)
    assert connector.switch.off_reason is None


def test_the_epoch_rises_with_every_start(vllm: Vllm, monkeypatch: pytest.MonkeyPatch) -> None:
    """By more than the fences of a process: what the one before pulled or was told is over."""
    epochs = []
    for now_s in (1000.0, 1000.01):
        monkeypatch.setattr("time.time", lambda now_s=now_s: now_s)
        vllm.start()
        epochs.append(Port.made[0].epoch)
    assert epochs[1] - epochs[0] >= EPOCHS_PER_START


class Broken:
    """A part of the connector with an error at every use."""

    def __getattribute__(self, name: str) -> Any:
        raise ZeroDivisionError(name)


# Hooks that use the scheduler's side, and what they answer.
HOOKS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "bind_gpu_block_pool": (lambda each: each.bind_gpu_block_pool(object()), None),
    "on_new_request": (lambda each: each.on_new_request(request(sealed(RESTORED))), None),
    "get_num_new_matched_tokens": (
        lambda each: each.get_num_new_matched_tokens(request(), 0),
        (0, False),
    ),
    "update_state_after_alloc": (lambda each: allocated(each, request(), 8), None),
    "build_connector_meta": (
        lambda each: each.build_connector_meta(Output(r=18)).step,
        WorkerStep(),
    ),
    "update_connector_output": (
        lambda each: each.update_connector_output(
            SimpleNamespace(kv_connector_worker_meta=answered(each))
        ),
        None,
    ),
    "request_finished": (lambda each: each.request_finished(request(), [30]), (False, None)),
    "request_finished_all_groups": (
        lambda each: each.request_finished_all_groups(request(), ([30],)),
        (False, None),
    ),
    "has_pending_push_work": (lambda each: each.has_pending_push_work(), False),
}


def answered(connector: Any) -> Any:
    """The answer of a worker that has saved something."""
    connector._done = Done(saves={1: 1})
    return connector.build_connector_worker_meta()


@pytest.mark.parametrize("name", HOOKS)
def test_an_error_in_a_hook_is_answered_by_one_that_has_nothing_to_do(
    vllm: Vllm, name: str
) -> None:
    """vLLM ends its engine at any exception. Once off, no hook uses the side that has failed."""
    connector = vllm.start()
    connector._scheduler = Broken()
    hook, answer = HOOKS[name]

    assert hook(connector) == answer

    assert "ZeroDivisionError" in connector.switch.off_reason
    assert hook(connector) == answer


def test_an_error_in_a_worker_turns_the_scheduler_s_side_off(vllm: Vllm) -> None:
    connector, worker = vllm.start(), vllm.start(Role.WORKER)
    worker.register_kv_caches({"a layer": torch.zeros(1)})
    assert isinstance(worker.switch, Switch)
    meta = worker.build_connector_worker_meta()
    assert worker.build_connector_worker_meta() is None

    connector.update_connector_output(SimpleNamespace(kv_connector_worker_meta=meta))

    assert "a worker: " in connector.switch.off_reason
    assert connector.switch.off_reason == Port.made[0].off_reason()


def test_other_weights_turn_it_off(vllm: Vllm) -> None:
    """VLLM resets caches behind a change of its weights, from which pages of agents are not."""
    connector = vllm.start()
    connector.on_new_request(request(sealed(RESTORED)))

    assert connector.reset_cache() is None  # False would be an error at vLLM.

    assert "a change of weights" in (Port.made[0].off_reason() or "")
    # What was fetched is given up.
    assert len(Port.made[0].released) == len(Port.made[0].restores) == 1
    call_all_hooks(connector)


class SlowBlocks:
    """Blocks of a GPU: the test says when copies end."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, list[tuple[int, int]]]] = []
        self.has_ended: Callable[[], bool] = lambda: False

    def open(self, place: Any) -> None: ...

    def save(self, copies: Any) -> Any:
        self.begun.append(("save", [*copies]))
        return lambda: self.has_ended()

    def load(self, copies: Any) -> Any:
        self.begun.append(("load", [*copies]))
        return lambda: self.has_ended()


@pytest.fixture
def slow(vllm: Vllm, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, SlowBlocks]:
    """A worker beside its scheduler's first step, with a save and a load."""
    worker, slow = vllm.start(Role.WORKER), SlowBlocks()
    worker._blocks = slow
    monkeypatch.setattr(vllm.module, "Blocks", SlowBlocks)
    bind(worker, WorkerStep(PLACE, saves=[(7, [(0, 100)])], loads=[("r", [(1, 30), (2, 31)])]))
    return worker, slow


PLACE = StagingPlace(1, 1, 4, 64)


def bind(worker: Any, step: WorkerStep) -> None:
    """Bind the copies of a step, as vLLM does."""
    worker._connector_metadata = type(worker.build_connector_meta(Output()))(step)


def test_copies_are_answered_in_the_step_in_which_they_have_ended(
    slow: tuple[Any, SlowBlocks],
) -> None:
    worker, blocks = slow
    worker.start_load_kv(None)
    worker.wait_for_save()
    assert blocks.begun == [("load", [(1, 30), (2, 31)]), ("save", [(0, 100)])]
    assert worker.get_finished(set()) == (None, None)
    assert worker.build_connector_worker_meta() is None

    bind(worker, WorkerStep())
    blocks.has_ended = lambda: True
    assert worker.get_finished(set()) == (None, {"r"})
    assert worker.get_block_ids_with_load_errors() == set()
    done = worker.build_connector_worker_meta().done
    assert (done.saves, done.loads) == ({7: 1}, {"r": 1})
    assert worker.get_finished(set()) == (None, None)
    assert worker.build_connector_worker_meta() is None


def test_a_large_load_is_made_in_parts_beside_several_steps(
    slow: tuple[Any, SlowBlocks], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step ends no sooner than what is copied beside it, and all requests wait for that."""
    worker, blocks = slow
    page_bytes = 256
    monkeypatch.setattr("kvrs.vllm.staging._STEP_BYTES", 3 * page_bytes - 1)
    blocks.has_ended = lambda: True
    first, second = [(slot, 30 + slot) for slot in range(3)], [(5, 50), (6, 51)]
    bind(worker, WorkerStep(PLACE, loads=[("r", first), ("s", second)]))

    found = []
    for _ in range(4):
        worker.start_load_kv(None)
        found.append((worker.get_finished(set())[1], blocks.begun))
        worker.build_connector_worker_meta()
        blocks.begun = []
        bind(worker, WorkerStep())

    assert found == [
        (None, [("load", first[:2])]),
        ({"r"}, [("load", first[2:]), ("load", second[:1])]),
        ({"s"}, [("load", second[1:])]),
        (None, []),
    ]


def test_a_load_that_fails_in_a_part_is_failed_whole_and_not_gone_on_with(
    slow: tuple[Any, SlowBlocks], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, blocks = slow
    monkeypatch.setattr("kvrs.vllm.staging._STEP_BYTES", 256)
    copies = [(slot, 30 + slot) for slot in range(4)]
    bind(worker, WorkerStep(PLACE, loads=[("r", copies)]))
    worker.start_load_kv(None)
    assert worker.get_finished(set()) == (None, None)

    bind(worker, WorkerStep())
    monkeypatch.setattr(blocks, "open", None)
    worker.start_load_kv(None)

    assert "NoneType" in worker.switch.off_reason
    assert worker.get_finished(set()) == (None, {"r"})
    assert worker.get_block_ids_with_load_errors() == {30, 31, 32, 33}
    worker.build_connector_worker_meta()
    worker.start_load_kv(None)
    assert worker.get_finished(set()) == (None, None)


def test_what_is_saved_beside_a_step_is_bounded_by_its_bytes(
    vllm: Vllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for two pages of 256 bytes."""
    monkeypatch.setattr("kvrs.vllm.staging._STEP_BYTES", 2 * 256)
    connector = vllm.start()
    connector.on_new_request(request(sealed(RESTORED)))
    connector._scheduler.requested.append(CopyRequest("r", 0, [5, 6, 7], lambda _: None))

    step = connector.build_connector_meta(Output(r=18)).step

    assert step.saves == [(1, [(5, 100), (6, 101)])]


def test_a_page_that_is_larger_than_what_a_step_copies_is_copied_alone() -> None:
    assert [pages_per_step(size) for size in (1 << 20, 1 << 25, 1 << 26)] == [32, 1, 1]


def test_a_step_without_a_forward_pass_saves_too(slow: tuple[Any, SlowBlocks]) -> None:
    """vLLM's newer runner calls no `wait_for_save` in it."""
    worker, blocks = slow
    worker.get_finished(set())
    worker.get_finished(set())
    assert blocks.begun == [("save", [(0, 100)])]


def test_copies_that_a_gpu_failed_to_make_are_no_answer(slow: tuple[Any, SlowBlocks]) -> None:
    worker, blocks = slow

    def fail() -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    blocks.has_ended = fail
    worker.start_load_kv(None)
    worker.wait_for_save()
    assert worker.get_finished(set()) == (None, {"r"})
    assert worker.get_block_ids_with_load_errors() == {30, 31}
    assert "illegal memory access" in worker.switch.off_reason
    done = worker.build_connector_worker_meta().done
    assert (done.saves, done.loads, done.off_reason) == ({}, {"r": 1}, worker.switch.off_reason)
