"""The film at the top of the README is that of the kept stream."""

import json
import re
from html import unescape
from typing import Any

import pytest

from experiments.demo_vllm import run
from experiments.demo_vllm.picture import RESULTS, film_of

ENDED_S = 1.0


@pytest.fixture
def kept() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / "demo_vllm.json").read_text())
    return found


def test_the_film_is_drawn_from_the_kept_stream(kept: dict[str, Any]) -> None:
    """And shows all of its words, in their order."""
    film = (RESULTS / "demo_vllm.svg").read_text()

    assert film == film_of(kept)
    words = "".join(text for _, text in kept["events"])
    pieces = re.findall(r'textLength="\d+" fill="#\w+">([^<]*)<', film)
    assert "".join(map(unescape, pieces)) == "".join(words.split())
    assert kept["is_exact"]


def test_packages_that_the_demo_lacks_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The environment of `make demo` has no transformers."""
    monkeypatch.setattr(run, "find_spec", lambda name: None if name == "transformers" else name)

    assert run.main() == 2

    assert capsys.readouterr().err == "not installed: transformers; to install: make install\n"


def test_words_appear_when_they_came_and_change_color_at_the_longest_pause() -> None:
    """A word of the second server is green; times are shares of the whole film."""
    events = [(0.1, " one"), (0.2, " two"), (0.7, " three"), (ENDED_S, " four")]
    kept = dict.fromkeys(("prompt", "victim", "went_to"), "x") | dict.fromkeys(
        ("tokens", "loaded_tokens", "computed_tokens"), 1
    )

    film = film_of(kept | {"events": events, "killed_at_s": 0.25})

    words = re.findall(
        r'fill="(#\w+)">(\w+)<animate [^>]*keyTimes="0;(\S+)"',
        film,
    )
    colors, texts, shares = zip(*words[-4:], strict=True)
    assert texts == ("one", "two", "three", "four")
    assert len({*colors[:2]}) == len({*colors[2:]}) == 1 != len({*colors})
    first = float(shares[0]) / events[0][0]
    assert [float(each) for each in shares] == pytest.approx(
        [at_s * first for at_s, _ in events], rel=0.01
    )
