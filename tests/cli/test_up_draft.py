"""`kvrs lab up --draft`: the draft model of the command line, beside files and presets."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvrs.config.cluster import Backend
from kvrs.config.file import Config
from kvrs.config.presets import SystemPreset
from kvrs.errors import ConfigError
from kvrs_lab.cli.running import _up_config


def configured(
    document: Any, tmp_path: Path, draft: Path | None, backend: Backend | None = None
) -> Config:
    file = tmp_path / "kvrs.yaml"
    file.write_text(json.dumps(document))
    ports = {"port": None, "admin_port": None, "workers": None}
    degrees = {"tp": None, "pp": None}
    return _up_config(
        None, file, SystemPreset.LUMEN, 1, None, draft, None, None, ports, backend, None, degrees
    )


@pytest.fixture
def models(tmp_path: Path) -> Path:
    for name in ("model", "draft"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    return tmp_path


def test_a_draft_is_that_of_a_file_with_a_model(models: Path) -> None:
    """The preset wants one, and the file names none."""
    document = {"cluster": {"model": str(models / "model")}, "speculation": {"depth": 2}}

    found = configured(document, models, models / "draft").speculation

    assert (found.source, found.draft, found.depth) == ("draft", str(models / "draft"), 2)
    with pytest.raises(ConfigError, match=r"speculation.draft: missing with source 'draft'"):
        configured(document, models, None)


def test_a_directory_without_a_model_is_refused(models: Path) -> None:
    with pytest.raises(ConfigError, match=r"--draft: .*nowhere has no config.json"):
        configured({}, models, models / "nowhere")


def test_a_document_that_is_none_is_still_a_fault(models: Path) -> None:
    with pytest.raises(ConfigError):
        configured([1], models, models / "draft")


def test_other_engines_run_the_preset_without_drafts(models: Path) -> None:
    found = configured(
        {"cluster": {"model": str(models / "model")}}, models, None, Backend.DISTSERVE
    )

    assert found.speculation.source == "off"
    assert found.backup.placement == "load"
