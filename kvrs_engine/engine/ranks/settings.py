"""The layout of an instance by its settings. This module must not import torch."""

from pathlib import Path

from kvrs.config.cluster import Backend, ElasticSettings, InstanceSettings
from kvrs.config.file import Config
from kvrs.errors import ConfigError, LayoutError
from kvrs_engine.elastic.layouts import Layout, hybrid, staged, uneven
from kvrs_engine.elastic.units import Units
from kvrs_engine.engine.model_config import ModelConfig


def rank_name(rank: int) -> str:
    """Return the name of a rank's process."""
    return f"rank-{rank}"


def layout_of(
    settings: InstanceSettings, units: Units, elastic: ElasticSettings | None = None
) -> Layout | None:
    """Return the layout of a model on the ranks of an instance; None: a single process.

    Raises:
        ConfigError: the model does not allow the layout.
    """
    if settings.ranks == 1:
        return None
    groups = [range(stage * settings.tp, (stage + 1) * settings.tp) for stage in range(settings.pp)]
    elastic = elastic or ElasticSettings()
    split = elastic.experts.layout == "split"
    if split and units.expert_parts == 1:
        raise ConfigError(
            "elastic.experts.layout: got 'split'; allowed: 'whole', an expert of this model is "
            "one unit"
        )
    try:
        stages = staged(units.layers, groups)
        return (hybrid if elastic.spread_heads else uneven)(units, stages, split=split)
    except LayoutError as error:
        raise ConfigError(f"cluster.nodes: instance {settings.id!r}: {error}") from None


def check_layouts(config: Config) -> None:
    """Check the layouts of all instances of several ranks against their model.

    Raises:
        ConfigError: a line for each instance whose model does not allow its layout.
    """
    several = [each for _, each in config.cluster.instances() if each.ranks > 1]
    if not several or config.cluster.model is None or config.cluster.backend != Backend.EMBEDDED:
        return
    units = ModelConfig.from_directory(Path(config.cluster.model)).units
    faults = []
    for instance in several:
        try:
            layout_of(instance, units, config.elastic)
        except ConfigError as error:
            faults += error.faults
    if faults:
        raise ConfigError(faults)
