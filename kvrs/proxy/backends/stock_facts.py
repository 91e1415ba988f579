"""Facts about a server of an unmodified engine: what the configuration and its answers say.

Facts about a stock engine's instance that only the configuration has.

Models that a server lists at `/v1/models`.

Step times of an engine that counts its steps, or the intervals between tokens, in two counters.

A read takes what came since the read before. The median of the last few such means is reported, so
that a read in which the engine stood still, or compiled a kernel, does not count.
"""

from collections import deque
from statistics import median

import msgspec

from kvrs.ids import InstanceId, NodeId
from kvrs.protocol.instance import Adapter, ModelNames, Role
from kvrs.proxy.backends.model_files import ModelFiles


class ConfiguredIdentity(msgspec.Struct, frozen=True):
    """Facts that an instance does not report, from the configuration and the model's files."""

    id: InstanceId
    node: NodeId
    role: Role
    files: ModelFiles
    hands_off: bool = True  # True if the cluster has prefill instances, so KV is handed off.
    served_name: str | None = None  # `cluster.served_name`; None: the first listed model.


class ListedModel(msgspec.Struct):
    id: str
    root: str | None = None
    parent: str | None = None  # The base model, if this model is an adapter; else None.
    max_model_len: int | None = None


class ListedModels(msgspec.Struct):
    data: list[ListedModel]

    def named(self, name: str | None) -> ListedModel | None:
        """Return the model of this name, or the first listed one without a name; None: no such
        model.
        """
        models = (each for each in self.data if each.parent is None)
        return next((each for each in models if name in (None, each.id)), None)

    def beside(self, model: ListedModel) -> ModelNames:
        """Return the other names of the model's weights, and its adapters."""
        others = [each for each in self.data if each.id != model.id]
        return ModelNames(
            tuple(each.id for each in others if each.parent is None and each.root == model.root),
            tuple(Adapter(each.id, each.root or "") for each in others if each.parent is not None),
        )


_READS = 3
_LEAST = 4  # Fewer new steps wait for the next read.


class CountedSteps:
    def __init__(self) -> None:
        self._epoch = -1
        self._before = 0.0, 0.0
        self._means: deque[float] = deque(maxlen=_READS)

    def read(self, epoch: int, steps: float, seconds: float) -> float:
        """Return the time of a recent step, by the counts since the start of the process in this
        epoch; 0: not known, as what came before the first read is not recent.
        """
        if epoch != self._epoch:
            self._epoch, self._before = epoch, (steps, seconds)
            self._means.clear()
        before, before_s = self._before
        if not 0 <= steps - before < _LEAST:
            if steps > before and seconds > before_s:
                self._means.append((seconds - before_s) / (steps - before))
            self._before = steps, seconds
        return min(86_400.0, median(self._means)) if self._means else 0.0
