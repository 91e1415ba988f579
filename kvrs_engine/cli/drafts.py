"""The check of `kvrs doctor` on the weights of a draft model."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from kvrs.cli.common import faults_in
from kvrs.cli.findings import DRAFT, Finding, doubtful, good, of_draft
from kvrs.config.file import Config


def draft_findings(config: Config) -> Iterator[Finding]:
    """Yield whether the draft model loads, and whether that is sooner than the model does."""
    from kvrs_engine.engine.models.loading import check_stored

    draft, model = config.speculation.draft, config.cluster.model
    if draft is None or model is None:
        return
    if faults := faults_in(partial(check_stored, Path(draft))):
        yield from map(of_draft, faults)
    else:
        yield _size_of_draft(Path(draft), Path(model), config)


def _size_of_draft(draft: Path, model: Path, config: Config) -> Finding:
    """By the pace of each instance: one of which the model is there as soon makes no drafts."""
    from kvrs_engine.engine.models.reading import reading_of

    cluster, rate = config.cluster, config.cluster.engine.disk_bytes_per_s
    instances = [instance for _, instance in cluster.instances()]
    own = reading_of(draft, rate, config.speculation.pace)
    models = {pace: reading_of(model, rate, pace) for pace in map(cluster.pace_of, instances)}
    skipping = [
        each.id for each in instances if not own.is_shorter_than(models[cluster.pace_of(each)])
    ]
    value = f"{draft}, {own.total_bytes:,} bytes of weights"
    size = f"{reading_of(model, rate).total_bytes:,}"
    if not skipping:
        return good(DRAFT, f"{value}, beside {size} of the model")
    where = "" if len(skipping) == len(instances) else f" by {', '.join(skipping)}"
    allowed = f"less to read than the model, which has {size}"
    return doubtful(DRAFT, value, allowed, f"a smaller one: this one is skipped{where}")
