"""Ids of responses. Pure."""

from hashlib import blake2b

_TAG_BYTES = 4


def response_id(drawn: bytes, model: str | None) -> str:
    """The id of a response, of 24 random bytes; of a model with a name in the configuration it ends
    in its tag.
    """
    tag = "" if model is None else tag_of(model)
    return f"resp_{drawn.hex()[: 2 * len(drawn) - len(tag)]}{tag}"


def tag_of(model: str) -> str:
    """The end of the ids of a model's responses: 8 hex digits."""
    return blake2b(model.encode(), digest_size=_TAG_BYTES).hexdigest()
