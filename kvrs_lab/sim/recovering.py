"""A restarting simulated instance, which makes drafts for the most congested instance with a draft
model until its own model is loaded (LUMEN, section 4.4).

Pairing, batches, mirrors and bursts are those of real instances. A draft equals the model's choice
with a given probability, by a hash of stream and position, so runs are reproducible.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from zlib import crc32

from kvrs.config.file import Config
from kvrs.config.sections import DraftSourceName
from kvrs.errors import ConfigError
from kvrs.ids import InstanceId, StreamId
from kvrs.profiles import catalog
from kvrs.protocol.instance import MirrorUpdate, Role
from kvrs_engine.elastic.pairing import by_congestion
from kvrs_engine.scheduling.draft_batches import DraftBatch, DraftBatches, MirroredStream
from kvrs_engine.scheduling.pace import Pace
from kvrs_lab.sim.calls import token_at
from kvrs_lab.sim.engine import SimEngine
from kvrs_lab.sim.process import Clock
from kvrs_lab.sim.site import LATENCY_S

_LOOK_S = 0.25  # Interval of searches for a partner, and of checks of the partner.
_GONE = StreamId("gone")
_ACCEPTANCE = 0.6  # Acceptance of a configured draft model.
# Rate at which weights are read where the configuration has none: a local NVMe disk (LUMEN, 6.1).
DISK_BYTES_PER_S = 2e9


@dataclass(frozen=True, slots=True)
class SimDraftModel:
    pace: Pace  # Step times.
    load_s: float  # Time until it makes drafts: from disk, then to the GPU.
    acceptance: float  # Probability that a draft equals the model's choice.

    @property
    def read_s(self) -> float:
        """Time of the disk, for which the instance's own model waits."""
        return max(0.0, self.load_s - self.pace.load_s)

    @property
    def kept(self) -> "SimDraftModel":
        """The model with weights in the memory of the node's agent: only copied to the GPU."""
        return replace(self, load_s=self.load_s - self.read_s)

    def token(self, stream: StreamId, position: int) -> int:
        chance = crc32(f"draft {stream}:{position}".encode()) / (1 << 32)
        return token_at(stream, position) + (chance >= self.acceptance)


def draft_model_of(config: Config) -> SimDraftModel | None:
    """Find the draft model of a configuration; None: no draft model.

    Raises:
        ConfigError: no profile has the times of the draft model.
    """
    speculation = config.speculation
    if speculation.source is not DraftSourceName.DRAFT:
        return None
    if (name := speculation.pace) is None:
        raise ConfigError(
            "speculation.pace: null with source 'draft'; allowed in a simulation: the name of a "
            "profile"
        )
    pace = Pace(name)
    return SimDraftModel(pace, read_s(config, name) + pace.load_s, _ACCEPTANCE)


def read_s(config: Config, profile: str) -> float:
    """Return the time in which the weights of a profile's model are read from the disk. Raises
    ConfigError: the profile does not have their bytes.
    """
    bytes_per_s = config.cluster.engine.disk_bytes_per_s or DISK_BYTES_PER_S
    return catalog.load(profile).weight_bytes / bytes_per_s


class SimHelper:
    """One restart of an instance, from `begin` to `end`."""

    def __init__(
        self,
        name: InstanceId,
        engines: Mapping[InstanceId, SimEngine],
        model: SimDraftModel,
        config: Config,
        clock: Clock,
    ) -> None:
        self.id = name
        self._others = [
            each for each in engines.values() if each.id != name and each.role is not Role.PREFILL
        ]
        self._model, self._config, self._clock = model, config, clock
        self._partner: SimEngine | None = None
        self._life = 0  # Life of the partner.
        self._batches = self._no_batches()
        self._waiting: list[MirrorUpdate] = []  # Updates for the next batch.
        self._computes = self._is_over = False

    def begin(self) -> None:
        self._clock.after(self._model.load_s, self._look)

    def end(self) -> None:
        self._is_over = True
        self._part()

    def receive(self, updates: list[MirrorUpdate]) -> None:
        self._waiting += updates
        self._go_on()

    def _look(self) -> None:
        if self._is_over:
            return
        partner = self._partner
        if partner is not None and (
            partner.life != self._life or partner.draining or not partner.alive
        ):
            self._part()
        if self._partner is None:
            self._pair()
        self._clock.after(_LOOK_S, self._look)

    @property
    def is_wanted(self) -> bool:
        """Return whether another instance wants drafts."""
        return bool(self._wanting())

    def _wanting(self) -> list[InstanceId]:
        loads = {each.id: each.load() for each in self._others if each.is_running}
        return by_congestion(loads, self.id)

    def _pair(self) -> None:
        if not (wanting := self._wanting()):
            return
        (partner,) = (each for each in self._others if each.id == wanting[0])
        assert partner.drafts is not None
        self._partner, self._life = partner, partner.life
        partner.drafts.helper = self
        self._batches = self._no_batches()

    def _part(self) -> None:
        partner, self._partner = self._partner, None
        self._waiting.clear()
        if partner is not None and partner.drafts is not None and partner.drafts.helper is self:
            partner.drafts.left()

    def _no_batches(self) -> DraftBatches:
        engine = self._config.cluster.engine
        return DraftBatches(engine, self._config.speculation.depth, engine.max_model_len)

    def _go_on(self) -> None:
        if self._computes or self._partner is None:
            return
        self._batches.update(self._waiting)
        self._waiting.clear()
        if batch := self._batches.next():
            self._computes = True
            seconds = self._model.pace.batch_s([chunk for _, chunk in batch])
            self._clock.after(seconds, partial(self._computed, self._batches, batch))

    def _computed(self, batches: DraftBatches, batch: DraftBatch) -> None:
        self._computes = False
        partner = self._partner
        if batches is self._batches and partner is not None and partner.drafts is not None:
            choices = [self._draft(stream) for stream, chunk in batch if chunk.logits]
            bursts = batches.advanced(batch, choices)
            partner.later(LATENCY_S, partial(partner.drafts.came, self, bursts))
        self._go_on()

    def _draft(self, stream: MirroredStream) -> int:
        assert self._partner is not None
        assert self._partner.drafts is not None
        name = self._partner.drafts.assisted.stream(stream.number) or _GONE
        return self._model.token(name, stream.mirror.tokens)
