"""Models that a server lists at `/v1/models`."""

import msgspec

from kvrs.protocol.instance import Adapter, ModelNames


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
