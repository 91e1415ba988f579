"""The interface of a simulated instance to its fetches and to the checks of its batches."""

from abc import abstractmethod

from kvrs_engine.scheduling.sequences import Sequence
from kvrs_lab.sim.calls import RankedEngine
from kvrs_lab.sim.drafts import SimDrafts
from kvrs_lab.sim.pipelines import SimPipeline
from kvrs_lab.sim.ranks import SimRanks
from kvrs_lab.sim.site import SimPagePool


class ComputingInstance(SimPagePool, RankedEngine):
    ranks: SimRanks | SimPipeline | None  # None: one process computes everything.
    drafts: SimDrafts | None

    @abstractmethod
    def verify_found(self, sequence: Sequence) -> None:
        """Check that pages found by the sequence's tags hold what the tags stand for."""

    @abstractmethod
    def note_filled(self, sequence: Sequence) -> None:
        """Note the further pages that the sequence may have filled, for its checkpoints."""
