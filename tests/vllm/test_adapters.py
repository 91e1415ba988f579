"""Keys of an adapter's rows say which files it has; there are none where that is not certain."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvrs.engines import fingerprint
from kvrs.vllm.adapters import BASE, LoraAdapter

KEYS = [b"a" * 32 + bytes(4), b"b" * 32 + bytes(4)]


@pytest.fixture
def begins_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server starts behind all that the test writes."""
    monkeypatch.setattr(fingerprint, "STARTED_NS", time.time_ns() + 10**12)


def written(directory: Path, weights: bytes = b"weights") -> Path:
    directory.mkdir(parents=True)
    (directory / "adapter_config.json").write_text("{}")
    (directory / "adapter_model.safetensors").write_bytes(weights)
    return directory


def known(path: Path) -> LoraAdapter:
    adapter = LoraAdapter(str(path))
    adapter.learn()
    return adapter


def test_keys_of_the_model_itself_are_those_of_vllm() -> None:
    BASE.learn()
    assert BASE.scoped(KEYS) == KEYS


@pytest.mark.usefixtures("begins_later")
def test_keys_are_those_of_the_files_wherever_they_are(tmp_path: Path) -> None:
    one, same = known(written(tmp_path / "a")), known(written(tmp_path / "b"))
    other = known(written(tmp_path / "c", b"Weights"))

    assert one.scoped(KEYS) == same.scoped(KEYS)
    assert not {*one.scoped(KEYS)} & {*other.scoped(KEYS), *KEYS}
    assert [len(key) for key in one.scoped(KEYS)] == [36, 36]
    assert [key[-4:] for key in one.scoped(KEYS)] == [key[-4:] for key in KEYS]


@pytest.mark.usefixtures("begins_later")
def test_there_are_no_keys_before_the_files_are_read(tmp_path: Path) -> None:
    adapter = LoraAdapter(str(written(tmp_path / "a")))
    assert not adapter.scoped(KEYS)
    adapter.learn()
    assert adapter.scoped(KEYS)


def test_an_adapter_that_is_younger_than_the_server_has_no_keys(tmp_path: Path) -> None:
    """The server may have read what was there before."""
    assert not known(written(tmp_path / "a")).scoped(KEYS)


def weights_are_written_again(path: Path) -> None:
    (path / "adapter_model.safetensors").write_bytes(b"weights")


def weights_are_replaced(path: Path) -> None:
    (path / "new").write_bytes(b"weights")
    (path / "new").rename(path / "adapter_model.safetensors")


def a_file_is_added(path: Path) -> None:
    (path / "adapter_model.bin").write_bytes(b"")


def all_is_gone(path: Path) -> None:
    path.rename(path.with_name("moved"))


@pytest.mark.usefixtures("begins_later")
@pytest.mark.parametrize(
    "change", [weights_are_written_again, weights_are_replaced, a_file_is_added, all_is_gone]
)
def test_an_adapter_that_changes_has_no_keys_any_more(
    change: Callable[[Path], None], tmp_path: Path
) -> None:
    path = written(tmp_path / "a")
    adapter = known(path)
    assert adapter.scoped(KEYS)

    change(path)

    assert not adapter.scoped(KEYS)
    adapter.learn()
    assert not adapter.scoped(KEYS)


@pytest.mark.usefixtures("begins_later")
def test_a_link_on_the_way_that_is_turned_is_a_change(tmp_path: Path) -> None:
    written(tmp_path / "1" / "a"), written(tmp_path / "2" / "a", b"Weights")
    (tmp_path / "now").symlink_to("1")
    adapter = known(tmp_path / "now" / "a")
    assert adapter.scoped(KEYS)

    (tmp_path / "now").unlink()
    (tmp_path / "now").symlink_to("2")

    assert not adapter.scoped(KEYS)


def test_a_link_that_was_turned_since_the_server_started_hides_an_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its workers may have followed it before."""
    written(tmp_path / "1" / "a")
    time.sleep(0.02)  # The clock of files has ticks.
    monkeypatch.setattr(fingerprint, "STARTED_NS", time.time_ns())
    assert known(tmp_path / "1" / "a").scoped(KEYS)
    time.sleep(0.02)
    (tmp_path / "now").symlink_to("1")

    assert not known(tmp_path / "now" / "a").scoped(KEYS)


@pytest.mark.usefixtures("begins_later")
@pytest.mark.parametrize("name", ["none", "file"])
def test_what_is_no_directory_has_no_keys(name: str, tmp_path: Path) -> None:
    """An adapter that is named by its repository is none."""
    (tmp_path / "file").write_text("")
    assert not known(tmp_path / name).scoped(KEYS)
