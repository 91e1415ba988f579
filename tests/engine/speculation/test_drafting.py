"""Drafts by a small model beside the streams of a large one, in one process."""

from pathlib import Path

import pytest

from kvrs.config.cluster import EngineSettings
from kvrs.errors import ConfigError
from kvrs.protocol.instance import DraftChoice, MirrorUpdate
from kvrs_engine.engine.sampler import SamplingParams, sample
from kvrs_engine.engine.speculation.drafting import Drafting
from kvrs_engine.engine.speculation.pairs import LEAST, agreement, write_pair
from kvrs_engine.engine.worker import Worker
from kvrs_engine.scheduling.alignment import Bursts
from kvrs_engine.scheduling.sequences import Chunk
from tests.engine.speculation.conftest import ACCEPTANCE

pytestmark = [pytest.mark.engine, pytest.mark.xdist_group("drafts")]

SETTINGS = EngineSettings(pages=64, max_batch_tokens=40)
DEPTH = 4
PROMPTS = [[3 + at * step % 500 for at in range(50)] for step in (3, 5, 7)]


def test_a_pair_agrees_as_often_as_was_asked_for(pair: Path) -> None:
    target, draft = (Worker(pair / name, EngineSettings(pages=128)) for name in ("target", "draft"))
    assert agreement(target, draft, seed=0) == pytest.approx(ACCEPTANCE, abs=0.01)
    assert agreement(target, target, seed=0) == 1.0


@pytest.mark.parametrize("acceptance", [0.0, LEAST - 0.01, 1.0, float("nan")])
def test_an_acceptance_that_no_pair_has_is_refused(tmp_path: Path, acceptance: float) -> None:
    with pytest.raises(ConfigError, match=r"--acceptance: got .*; allowed: from 0.3 to 0.95"):
        write_pair(tmp_path, acceptance, seed=0)


@pytest.mark.parametrize(("name", "all_right"), [("target", True), ("draft", False)])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_drafts_of_the_model_itself_are_all_right(
    pair: Path, name: str, temperature: float, all_right: bool
) -> None:
    """Histories of several batches, and streams that begin and end between others."""
    target = Worker(pair / "target", SETTINGS)
    drafting = Drafting(Worker(pair / name, SETTINGS), SETTINGS, DEPTH)
    params = SamplingParams(temperature=temperature, seed=4)
    choice = DraftChoice(temperature, 1.0, 0, 0.0, 4)
    accepted = proposed = 0
    for number, prompt in enumerate(PROMPTS):
        ids, bursts, computed = list(prompt), Bursts(), 0
        drafting.batches.update([MirrorUpdate(number, ids[:], choice)])
        while len(ids) < 100:
            while drafting.batches.has_work:
                for burst in drafting.step():
                    bursts.came(burst.position, burst.token_ids, burst.begins_anew)
            drafts = bursts.proposal(ids, DEPTH)
            assert len(drafts) == DEPTH
            chunk = Chunk(
                [*ids[computed:], *drafts], computed, range(number * 8, 64), logits=1 + DEPTH
            )
            chosen = [
                sample(row, params, len(ids) + at) for at, row in enumerate(target.execute([chunk]))
            ]
            right = 0
            while right < DEPTH and chosen[right] == drafts[right]:
                right += 1
            computed = len(ids) + right
            ids += chosen[: right + 1]
            drafting.batches.update([MirrorUpdate(number, chosen[: right + 1])])
            accepted, proposed = accepted + right, proposed + DEPTH
        drafting.batches.update([MirrorUpdate(number)])
        assert not drafting.batches.has_work
    assert drafting.batches.free_pages == SETTINGS.pages
    assert (accepted == proposed) is all_right
    assert accepted > 0


def test_streams_without_a_page_get_no_drafts(pair: Path) -> None:
    settings = SETTINGS.model_copy(update={"pages": 4})
    drafting = Drafting(Worker(pair / "draft", settings), settings, DEPTH)
    choice = DraftChoice(0.0, 1.0, 0, 0.0, 0)
    drafting.batches.update(
        [MirrorUpdate(1, PROMPTS[0], choice), MirrorUpdate(2, PROMPTS[1], choice)]
    )
    drafted = {burst.number for _ in range(20) for burst in drafting.step()}
    assert drafted == {1}
    assert not drafting.batches.has_work, "its caller would ask for ever"
    drafting.batches.update([MirrorUpdate(1), MirrorUpdate(9, [1]), MirrorUpdate(9)])
    assert drafting.batches.has_work
    assert {burst.number for _ in range(20) for burst in drafting.step()} == {2}
