"""Wrong flags and files of a DistServe server: one line names the fault, and what is
allowed.
"""

import importlib
import socket
import sys
from pathlib import Path

import pytest

from distserve_patches import checkout, upstream
from distserve_patches.api_server import main
from kvrs.config.file import Config, dump_config
from kvrs.errors import ConfigError
from tests.distserve_patches.server_process import config_for

pytestmark = pytest.mark.network


def stderr_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    return error


@pytest.fixture
def config(tiny_model: Path) -> Config:
    return config_for(tiny_model)


@pytest.fixture
def path(config: Config, tmp_path: Path) -> str:
    written = tmp_path / "config.yaml"
    written.write_text(dump_config(config))
    return str(written)


def test_what_is_missing_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Not with the forty flags of DistServe, which are not at fault."""
    assert "--kvrs-config, --kvrs-node" in stderr_of(capsys)


def test_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The message is that of every command."""
    missing = str(tmp_path / "none.yaml")

    assert (
        stderr_of(capsys, "--kvrs-config", missing, "--kvrs-node", "n0")
        == f"{missing}: No such file or directory\n"
    )


def test_a_node_that_is_not_in_the_file(capsys: pytest.CaptureFixture[str], path: str) -> None:
    """And which ones are."""
    assert "'n7' is not in cluster.nodes; allowed: n0" in stderr_of(
        capsys, "--kvrs-config", path, "--kvrs-node", "n7"
    )


def test_a_file_of_another_backend(
    capsys: pytest.CaptureFixture[str], config: Config, tmp_path: Path
) -> None:
    """Its instances would not be found where the proxy looks for them."""
    written = tmp_path / "config.yaml"
    written.write_text(dump_config(config).replace("backend: distserve", "backend: embedded"))

    assert "allowed here: 'distserve'" in stderr_of(
        capsys, "--kvrs-config", str(written), "--kvrs-node", "n0"
    )


def test_no_checkout(
    capsys: pytest.CaptureFixture[str], path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named by the variable that is to be set."""
    monkeypatch.delenv(checkout.HOME_ENV, raising=False)

    assert checkout.HOME_ENV in stderr_of(capsys, "--kvrs-config", path, "--kvrs-node", "n0")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            ImportError("No module named 'transformers'"),
            "No module named 'transformers'; `pip install 'kvrs[distserve]'`",
        ),
        (
            RuntimeError("Could not find the library\nat /x."),
            "Could not find the library at /x. (SWIFT_TRANSFORMER_LIB_PATH",
        ),
        (OSError("undefined symbol: c10"), "undefined symbol: c10 (SWIFT_TRANSFORMER_LIB_PATH"),
    ],
)
def test_what_distserve_lacks_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception, words: str
) -> None:
    """A library that was not built, or for another torch, is what goes wrong first on a machine
    with GPUs.
    """

    def fail(_: str) -> None:
        raise error

    monkeypatch.setattr(importlib, "import_module", fail)
    monkeypatch.setattr(sys, "path", list(sys.path))

    with pytest.raises(ConfigError) as raised:
        checkout.import_plain(tmp_path, off_gpu=False)

    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.fixture
def loaded(distserve: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process loads DistServe once, and this one has."""
    monkeypatch.setattr(upstream, "load", lambda *_, **__: None)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--wrong", "3"], "unrecognized arguments: --wrong 3"),
        (["--block-size", "many"], "--block-size: invalid int value: 'many'"),
        (["--model", "elsewhere"], "--model: got elsewhere; allowed: cluster.model"),
        (["--decoding-tensor-parallel-size", "3"], "a divisor of the model's 2 KV heads"),
        (["--context-pipeline-parallel-size", "3"], "a divisor of the model's 4 layers"),
    ],
)
def test_a_wrong_flag_is_named(
    loaded: None, capsys: pytest.CaptureFixture[str], path: str, flags: list[str], words: str
) -> None:
    """DistServe's own flags are its own parser's; what would fail later in upstream is refused
    now.
    """
    assert words in stderr_of(capsys, "--kvrs-config", path, "--kvrs-node", "n0", *flags)


@pytest.mark.parametrize("key", ["port", "page_port"])
def test_a_port_in_use_is_named(
    loaded: None, capsys: pytest.CaptureFixture[str], path: str, config: Config, key: str
) -> None:
    """Before the model is loaded, which may take minutes."""
    instance = config.cluster.nodes[0].instances[1]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", getattr(instance, key)))
        taken.listen()

        error = stderr_of(capsys, "--kvrs-config", path, "--kvrs-node", "n0")

    assert (
        error == f"instance d0: {key}: 127.0.0.1:{getattr(instance, key)} is in use; allowed: a "
        f"free port\n"
    )


def test_a_model_that_is_not_there(
    capsys: pytest.CaptureFixture[str], config: Config, tmp_path: Path
) -> None:
    """The file is named that was looked for."""
    written = tmp_path / "config.yaml"
    written.write_text(
        dump_config(config).replace(str(config.cluster.model), str(tmp_path / "none"))
    )

    assert f"{tmp_path}/none/config.json" in stderr_of(
        capsys, "--kvrs-config", str(written), "--kvrs-node", "n0"
    )
