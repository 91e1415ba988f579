"""The load of an instance's experts, and the times at which their copies are re-balanced."""

from kvrs.config.cluster import ExpertSettings
from kvrs.process.memory import free_bytes
from kvrs.protocol.instance import ExpertReport
from kvrs_engine.elastic.experts import Rebalanced, TileHistory, Tiles, rebalance, skew
from kvrs_engine.elastic.layouts import Layout
from kvrs_engine.elastic.units import Units
from kvrs_engine.engine.ranks.exchange import FormationMemory
from kvrs_engine.engine.ranks.formation import RankFormation
from kvrs_engine.engine.ranks.reformed import Reformed

# Least time between two changes of copies, and after another change of the ranks.
APART_S = 2.0
_HALF_LIFE_S = 30.0  # Half-life of the counts; shorter changes of the load move no copies.
_NO_ROOM = "elastic.experts.room_share leaves no room for a copy that would help"
_MAX_PUT_OFF_S = 60.0


class RoutedLoads:
    """Counts the tiles of experts over all formations, and proposes copies. Only the thread that
    re-forms may use it; any thread may call `facts`.
    """

    def __init__(self, units: Units, settings: ExpertSettings, layout: Layout) -> None:
        """`layout` is the full layout, with all ranks."""
        self._units, self._settings = units, settings
        self._ranks = layout.ranks
        self._history = TileHistory(_HALF_LIFE_S)
        self._memory: FormationMemory | None = None
        self._seen: list[list[int]] = []  # Counts of the present formation that were added.
        self._computed = dict.fromkeys(layout.ranks, 0)  # Tiles by rank, of earlier formations.
        self._skew, self._reason = 1.0, ""
        self._rebalances = self._copied_bytes = 0
        self._wait_s = APART_S
        self._wanted: Layout | None = None  # The last proposal of `look`.
        self.next_s = 0.0  # Time of the next look.

    @property
    def tiles(self) -> Tiles:
        """The tiles of layers with significant counts, with exponential decay."""
        return self._history.telling

    def look(self, layout: Layout, formation: RankFormation | None, now_s: float) -> Layout | None:
        """Return a layout with better copies of experts; None: no better copies, or not yet time.
        `formation` is the current one; None: there is none.
        """
        if now_s < self.next_s:
            return None
        self.next_s = now_s + self._wait_s
        self._take(now_s)
        if formation is not None and formation.memory is not self._memory:
            self._enter(formation.memory, now_s)
        tiles = self.tiles
        found = Rebalanced(layout, lacks_room=False)
        if self._settings.room_share:
            found = rebalance(layout, self._units, tiles, self._room(layout))
        self._skew = skew(layout, self._units, tiles)
        self._reason = _NO_ROOM if found.lacks_room else ""
        if found.layout is layout:
            return None
        self._wanted = found.layout
        return found.layout

    def changed(self, change: Reformed, after: Layout, now_s: float) -> None:
        """Note a change of the layout; copies then stay for a while."""
        self._wait_s = APART_S
        self.next_s = now_s + self._wait_s
        if after is self._wanted:
            self._rebalances += 1
            self._copied_bytes += change.moved.get("host", 0) + change.moved.get("peer", 0)

    def put_off(self, now_s: float, reason: str) -> None:
        """Delay the next look after a change for which there was no room."""
        self._wait_s = min(_MAX_PUT_OFF_S, 2 * self._wait_s)
        self.next_s, self._reason = now_s + self._wait_s, reason

    def facts(self, layout: Layout) -> ExpertReport:
        computed, units = self._computed_now(), self._units
        return ExpertReport(
            count=len(units.mlp_bytes) // units.expert_parts,
            copies=sum(map(len, layout.copies)),
            skew=self._skew,
            tiles=[computed[rank] for rank in self._ranks],
            rebalances=self._rebalances,
            copied_bytes=self._copied_bytes,
            reason=self._reason,
        )

    def _take(self, now_s: float) -> None:
        if (memory := self._memory) is None:
            return
        units, first = self._units, memory.areas.layers.start
        found = memory.tiles.tolist()
        more: list[list[int]] = [[] for _ in range(units.layers)]
        for at, (counts, seen) in enumerate(zip(found, self._seen, strict=True)):
            if first + at not in units.dense_layers:
                more[first + at] = [
                    count - before for count, before in zip(counts, seen, strict=True)
                ]
        self._history.note(more, now_s)
        self._seen = found

    def _enter(self, memory: FormationMemory, now_s: float) -> None:
        self._computed, self._memory = self._computed_now(), memory
        self._seen = [[0] * len(own) for own in memory.tiles.tolist()]
        self._take(now_s)

    def _computed_now(self) -> dict[int, int]:
        computed = dict(self._computed)
        if (memory := self._memory) is not None:
            for rank, tiles in zip(memory.areas.lines, memory.computed.tolist(), strict=True):
                computed[rank] = computed.get(rank, 0) + tiles
        return computed

    def _room(self, layout: Layout) -> dict[int, int]:
        """Return the limit of each rank's copies in bytes."""
        each = free_bytes() // len(layout.ranks)
        room = {}
        for rank in layout.ranks:
            copied = sum(
                self._units.mlp_of(layer)[place]
                for layer in layout.stage_of(rank).layers
                for place, other in layout.copies_of(layer)
                if other == rank
            )
            own = layout.weight_bytes(rank, self._units) - copied
            room[rank] = min(int(self._settings.room_share * own), copied + each)
        return room


def loads_of(units: Units, settings: ExpertSettings, layout: Layout) -> RoutedLoads | None:
    """Return the counter of a model with experts; None: the model has no experts."""
    return RoutedLoads(units, settings, layout) if units.expert_parts else None
