"""Remarks on profiles that were measured with another model."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvrs.cli import app
from kvrs.cli.findings import foreign_profile
from kvrs.profiles.catalog import profile
from tests.profiles.test_guess import LLAMA_8B, LLAMA_70B

OF_8B = "llama-3.1-8b-h100-vllm-tp1"
DTYPE = {"torch_dtype": "bfloat16"}


def model(folder: Path, fields: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(fields | DTYPE))
    return folder


def test_a_profile_of_the_model_is_not_remarked_on(tmp_path: Path) -> None:
    assert foreign_profile(OF_8B, model(tmp_path, LLAMA_8B)) is None
    assert foreign_profile(None, tmp_path) is None
    assert foreign_profile(OF_8B, None) is None
    assert foreign_profile(OF_8B, tmp_path / "none") is None


def test_all_that_differs_is_shown_with_what_the_model_has(tmp_path: Path) -> None:
    """Layers, heads and parameters, as far as the profile tells."""
    remark = foreign_profile("opt-66b-a100-vllm-tp8", model(tmp_path, LLAMA_8B))

    assert remark is not None
    assert remark.startswith("warning: profiles.prefill: opt-66b-a100-vllm-tp8 is of ")
    assert "64 layers, and not 32; 72 KV heads, and not 8" in remark


def test_equal_layers_of_another_width_differ_in_parameters(tmp_path: Path) -> None:
    """The KV has the same shape; only what the profile knows of the weights tells them apart."""
    narrow = model(tmp_path, LLAMA_8B | {"intermediate_size": 4096})

    remark = foreign_profile(OF_8B, narrow)

    assert profile(OF_8B).geometry.layers == LLAMA_8B["num_hidden_layers"]
    assert remark is not None
    assert "8.03 billion parameters, and not" in remark
    assert "layers" not in remark


@pytest.mark.parametrize(("fields", "warned"), [(LLAMA_70B, True), (LLAMA_8B, False)])
def test_a_check_of_the_file_warns(tmp_path: Path, fields: dict[str, Any], warned: bool) -> None:
    """The file is valid all the same: an operator may know better."""
    file = tmp_path / "vllm.yaml"
    nodes = "[{id: n0, instances: [{id: d0, role: decode, port: 1}]}]"
    model(tmp_path, fields)
    (tmp_path / "tokenizer.json").touch()
    file.write_text(
        f"cluster: {{backend: vllm, model: {tmp_path}, nodes: {nodes}}}\n"
        f"profiles: {{prefill: {OF_8B}}}\n"
    )

    ended = CliRunner().invoke(app, ["config", "check", str(file)])

    assert ended.exit_code == 0
    assert (f"profiles.prefill: {OF_8B} is of meta-llama" in ended.output) is warned
