"""The layout that the settings of an instance ask for. Loads no torch."""

from pathlib import Path

from kvrs.config.cluster import Backend, InstanceSettings
from kvrs.config.engine import ElasticSettings
from kvrs.config.file import Config
from kvrs.errors import ConfigError, LayoutError
from kvrs_engine.elastic.layouts import Layout, hybrid, staged, uneven
from kvrs_engine.elastic.units import Units
from kvrs_engine.engine.model_config import ModelConfig


def rank_name(rank: int) -> str:
    """The name of the process of a rank."""
    return f"rank-{rank}"


def layout_of(
    settings: InstanceSettings, units: Units, elastic: ElasticSettings | None = None
) -> Layout | None:
    """The division of a model among the ranks of an instance; None: it is one process.

    Raises:
        ConfigError: the model cannot be divided so.
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
    """Check what instances of several ranks need, once the model is known.

    Raises:
        ConfigError: one line per instance that asks for a division which its model does not allow.
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
