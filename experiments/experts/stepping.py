"""Ranks of a mixture of experts that compute steps of decoding, without an engine around them."""

from collections.abc import Callable
from pathlib import Path

from kvrs.config.cluster import ElasticSettings, EngineSettings, ExpertSettings, InstanceSettings
from kvrs.ids import InstanceId
from kvrs.protocol.instance import Role
from kvrs_engine.engine.model_config import ModelConfig
from kvrs_engine.engine.ranks.group import RankGroup
from kvrs_engine.engine.ranks.settings import layout_of
from kvrs_engine.scheduling.sequences import Chunk

_PAGE_TOKENS, _PAGES_EACH = 16, 4


def group_of(directory: Path, ranks: int, rows: int, experts: ExpertSettings) -> RankGroup:
    """So many ranks of the model in the directory, with pages for that many sequences."""
    elastic = ElasticSettings(experts=experts)
    settings = EngineSettings(
        pages=rows * _PAGES_EACH, page_size_tokens=_PAGE_TOKENS, max_batch_tokens=rows
    )
    instance = InstanceSettings(id=InstanceId("e0"), role=Role.BOTH, tp=ranks)
    layout = layout_of(instance, ModelConfig.from_directory(directory).units, elastic)
    assert layout is not None, "it has several ranks"
    group = RankGroup(directory, settings, layout, elastic)
    group.predict = lambda chunks: 0.0
    return group


def step_of(rows: int, number: int, token: Callable[[], int]) -> list[Chunk]:
    """A token of each sequence, at the next position; the last one is followed by the first."""
    position = number % (_PAGE_TOKENS * _PAGES_EACH)
    return [
        Chunk([token()], position, range(at * _PAGES_EACH, (at + 1) * _PAGES_EACH), logits=1)
        for at in range(rows)
    ]
