"""The model that a request is for, by the name in its body or the id in its path."""

from collections.abc import Mapping

import msgspec

from kvrs.core.fleet.known import Instances
from kvrs.errors import RequestError
from kvrs.protocol.openai.response_ids import tag_of


class _Named(msgspec.Struct):
    model: str | None = None


_NAMED = msgspec.json.Decoder(_Named)


class ModelRouting:
    """`models`: the instances of each, by the name in the configuration. There is at least one."""

    def __init__(self, models: Mapping[str, Instances]) -> None:
        self._models = models
        self._first = next(iter(models))
        self._by_tag = {tag_of(name): name for name in models}

    def of_body(self, body: bytes) -> str:
        """The model of a request with this body. A body that names none in the right form is that
        of the first one, which says what is wrong with it.

        Raises:
            RequestError: no model is named, or none has the name.
        """
        try:
            name = _NAMED.decode(body).model
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return self._first
        if name is None:
            raise RequestError(
                f"model is missing, and several are served; allowed: {self._allowed()}",
                param="model",
            )
        return self.of_name(name)

    def of_name(self, name: str) -> str:
        """The model with this name, alias or adapter; of several with an alias, the first one.

        Raises:
            RequestError: there is none.
        """
        if name in self._models:
            return name
        for model, instances in self._models.items():
            if name in instances.names.served(instances.model):
                return model
        raise RequestError(
            f"the model {name!r:.200} does not exist; allowed: {self._allowed()}",
            param="model",
            status=404,
            code="model_not_found",
        )

    def of_response(self, name: str) -> str:
        """The model of a response by its id; of no id, the first one, which says so."""
        return self._by_tag.get(name[-len(tag_of("")) :], self._first)

    def _allowed(self) -> str:
        names = dict.fromkeys(self._models)
        for instances in self._models.values():
            names |= dict.fromkeys(instances.names.served(instances.model))
        return ", ".join(map(repr, names))
