"""The blocks of a client's prompt, by which the core finds prompts that begin alike
(`kvrs/core/model/prefixes.py`). They are hashes of the bytes as they came: nothing is decoded.
"""

import re
from itertools import repeat

from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from kvrs.core.model.prefixes import NO_PREFIX, Prefix, chain
from kvrs.proxy.wire.requests import ParsedRequest

# Fields on which the KV of every token depends. The salt is that of the tenant and the adapter.
_OF_ALL = (
    *("model", "cache_salt", "chat_template", "chat_template_kwargs", "reasoning_effort"),
    *("add_generation_prompt", "continue_final_message", "add_special_tokens"),
    *("mm_processor_kwargs", "media_io_kwargs", "truncate_prompt_tokens", "truncation_side"),
)
# Chat templates write tools and documents before the messages.
_TEXTS = ("tools", "documents", "messages", "prompt")
# A picture or a sound in the text of a request has as many bytes as a book, and few tokens.
_BLOB = re.compile(rb'"(?:data:[\w.+/;=-]*,)?[A-Za-z0-9+/=_-]{512,}"')


def prefix_of(parsed: ParsedRequest, *, has_media: bool = False) -> Prefix:
    """The chain of a prompt; none where no cache is read for it. O(bytes). `has_media`: a message
    may hold more than text.
    """
    fields = dict(parsed.fields.items())
    # Engines answer these without their prefix caches.
    if parsed.echo or "prompt_logprobs" in fields:
        return NO_PREFIX
    kinds = [parsed.endpoint.object, *map(fields.get, _OF_ALL, repeat(b""))]
    if (ids := parsed.prompt_ids) is not None:
        kinds.append(b"ids")
        text = ids.tobytes()
    else:
        text = b"".join(filter(None, map(fields.get, _TEXTS)))
        if has_media:
            text = _BLOB.sub(_hash_of, text)
    return Prefix(chain(xxh3_64_intdigest(b"\0".join(kinds)), text), len(text))


def _hash_of(blob: re.Match[bytes]) -> bytes:
    return xxh3_64_hexdigest(blob.group()).encode()
