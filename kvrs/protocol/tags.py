"""Content addresses of KV pages.

A tag is a hash of *all* token ids up to the end of its page, chained page by page from a root that
names the model, its adapter and the tenant. Two equal tags therefore mean bit-equal KV, wherever
the page lies and whichever engine computed it: the same identity serves the prefix cache, KV
retained at prefill, checkpoints and restore.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import NewType

Tag = NewType("Tag", bytes)

TAG_BYTES = 16
_WORD_BYTES = 8


def root_tag(fingerprint: str, salt: str = "") -> Tag:
    """Return the tag of the empty prefix, from which page tags are chained: one per model
    (`fingerprint`), tenant and adapter (`salt`).
    """
    return Tag(
        blake2b(
            salt.encode(), digest_size=TAG_BYTES, key=blake2b(fingerprint.encode()).digest()
        ).digest()
    )


def salt_of(cache_salt: str, adapter: str) -> str:
    """Return the salt of a request's pages, which contains the adapter, because an adapter changes
    the KV of equal tokens. An alias of a model changes nothing.
    """
    if not adapter:
        return cache_salt
    key = blake2b(adapter.encode()).digest()
    return blake2b(cache_salt.encode(), digest_size=TAG_BYTES, key=key).hexdigest()


def page_tags(root: Tag, token_ids: Sequence[int], page_size_tokens: int) -> list[Tag]:
    """Return the tags of the full pages of `token_ids`, in order; a partial last page has
    no tag.
    """
    tags: list[Tag] = []
    words, size_bytes, parent = _words(token_ids), page_size_tokens * _WORD_BYTES, root
    for end in range(size_bytes, len(words) + 1, size_bytes):
        parent = _hashed(parent, words[end - size_bytes : end])
        tags.append(parent)
    return tags


def _words(token_ids: Sequence[int]) -> bytes:
    # Token ids have a fixed width in the hash's input, so different pages never have equal bytes.
    return array("Q", token_ids).tobytes()


def _hashed(parent: Tag, words: bytes) -> Tag:
    return Tag(blake2b(words, digest_size=TAG_BYTES, key=parent).digest())
