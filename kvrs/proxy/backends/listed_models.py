"""The models that a server lists at `/v1/models`."""

import msgspec

from kvrs.protocol.instance import Adapter, ModelNames


class ListedModel(msgspec.Struct):
    id: str
    root: str | None = None
    parent: str | None = None  # Of an adapter: the model that it changes.
    max_model_len: int | None = None


class ListedModels(msgspec.Struct):
    data: list[ListedModel]

    def named(self, name: str | None) -> ListedModel | None:
        """The model of this name, or the first one; None: there is none."""
        models = (each for each in self.data if each.parent is None)
        return next((each for each in models if name in (None, each.id)), None)

    def beside(self, model: ListedModel) -> ModelNames:
        """Aliases of the model, and adapters."""
        others = [each for each in self.data if each.id != model.id]
        return ModelNames(
            tuple(each.id for each in others if each.parent is None and each.root == model.root),
            tuple(Adapter(each.id, each.root or "") for each in others if each.parent is not None),
        )
