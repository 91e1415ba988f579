"""Runs a recorder in its engine's environment: what both recorders share beside the files."""

import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from kvrs_testkit.engine_streams.scripts import SCRIPTS, Engine, Script
from kvrs_testkit.engine_streams.vocabulary import END, tokenizer
from kvrs_testkit.engine_streams.writing import Heard, save


def run(
    engine: Engine,
    registered: Callable[[], dict[str, list[str]]],
    record: Callable[[Script, Any], Heard],
) -> None:
    """Record the scripts that are named, or all of the engine's; with `--parsers` print the names
    of its parsers.
    """
    if sys.argv[1:] == ["--parsers"]:
        print(json.dumps(registered()))
        return
    with tempfile.TemporaryDirectory() as directory:
        loaded = _loaded_tokenizer(Path(directory))
        for script in _asked_for(engine, sys.argv[1:]):
            save(script, record(script, loaded))


def _loaded_tokenizer(directory: Path) -> Any:
    """The handmade tokenizer, as the engine has those of models."""
    path = directory / "tokenizer.json"
    tokenizer().save(str(path))
    return PreTrainedTokenizerFast(tokenizer_file=str(path), eos_token=END)


def _asked_for(engine: Engine, names: Sequence[str]) -> Iterator[Script]:
    """The scripts of an engine with these names, or all of them."""
    found = [script for script in SCRIPTS if script.engine == engine]
    unknown = set(names) - {script.name for script in found}
    if unknown:
        sys.exit(f"no such recording: {', '.join(sorted(unknown))}")
    return (script for script in found if not names or script.name in names)
