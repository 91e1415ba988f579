"""Errors of hooks and of model directories."""

from pathlib import Path

import msgspec
import pytest

from kvrs.errors import KvrsError
from kvrs.protocol.geometry import KvGeometry
from kvrs.vllm.fingerprint import fingerprint_of
from kvrs.vllm.guard import Switch, guarded

GEOMETRY = KvGeometry(layers=1, kv_heads=1, head_dim=1, dtype_bytes=2, page_size_tokens=16)


class Hooks:
    def __init__(self) -> None:
        self.cleared = 0
        self.switch = Switch(self.clear)
        self.calls = 0

    def clear(self) -> None:
        self.cleared += 1
        raise RuntimeError("in clearing up")

    @guarded(lambda: (0, False))
    def hook(self, value: int) -> tuple[int, bool]:
        self.calls += 1
        return 10 // value, True


def test_an_error_turns_the_connector_off_and_nothing_else() -> None:
    hooks = Hooks()
    assert hooks.hook(2) == (5, True)
    assert hooks.hook(0) == (0, False)
    assert hooks.switch.off_reason == "hook: ZeroDivisionError: integer division or modulo by zero"
    assert hooks.hook(2) == (0, False)
    assert (hooks.calls, hooks.cleared) == (2, 1)


def test_the_fingerprint_is_of_weights_sizes_and_types(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(1 << 20))
    found = {fingerprint_of(str(tmp_path), ["bf16", "auto"], GEOMETRY)}
    found.add(fingerprint_of(str(tmp_path), ["f32", "auto"], GEOMETRY))
    found.add(fingerprint_of(str(tmp_path), ["bf16", "fp8"], GEOMETRY))
    (tmp_path / "model.safetensors").write_bytes(bytes((1 << 20) - 4096) + bytes([1]) * 4096)
    found.add(fingerprint_of(str(tmp_path), ["bf16", "auto"], GEOMETRY))
    (tmp_path / "config.json").write_text("{}")
    found.add(fingerprint_of(str(tmp_path), ["bf16", "auto"], GEOMETRY))
    larger = msgspec.structs.replace(GEOMETRY, page_size_tokens=32)
    found.add(fingerprint_of(str(tmp_path), ["bf16", "auto"], larger))
    (tmp_path / "model.safetensors").write_bytes(bytes(2 << 20))
    found.add(fingerprint_of(str(tmp_path), ["bf16", "auto"], GEOMETRY))
    (tmp_path / "model.safetensors").write_bytes(bytes(4 << 20))
    found.add(fingerprint_of(str(tmp_path), ["bf16", "auto"], GEOMETRY))
    (tmp_path / "model.safetensors").rename(tmp_path / "others.safetensors")
    found.add(fingerprint_of(str(tmp_path), ["bf16", "auto"], GEOMETRY))
    assert len(found) == 9
    with pytest.raises(KvrsError, match=r"no \*\.safetensors"):
        fingerprint_of(str(tmp_path / "none"), ["bf16", "auto"], GEOMETRY)


def test_weights_of_either_format_have_a_fingerprint(tmp_path: Path) -> None:
    found = set()
    for content in (bytes(100), bytes([1]) * 100):
        (tmp_path / "pytorch_model.bin").write_bytes(content)
        found.add(fingerprint_of(str(tmp_path), ["bf16", "auto"], GEOMETRY))
    assert len(found) == 2
