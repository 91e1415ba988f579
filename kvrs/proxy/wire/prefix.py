"""Block hashes of a client's prompt, by which the core finds prompts with a common beginning
(`kvrs/core/model/prefixes.py`). The bytes are hashed as received, without decoding.
"""

import re
from itertools import repeat

from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from kvrs.core.model.prefixes import NO_PREFIX, Prefix, chain
from kvrs.proxy.wire.requests import ParsedRequest

# Fields on which the KV of every token depends. `cache_salt` is made of the tenant and the adapter.
_OF_ALL = (
    *("model", "cache_salt", "chat_template", "chat_template_kwargs", "reasoning_effort"),
    *("add_generation_prompt", "continue_final_message", "add_special_tokens"),
    *("mm_processor_kwargs", "media_io_kwargs", "truncate_prompt_tokens", "truncation_side"),
)
# Fields with text, in the order in which chat templates write them.
_TEXTS = ("tools", "documents", "messages", "prompt")
# Matches a picture or sound in the body, which has as many bytes as a book, but few tokens.
_BLOB = re.compile(rb'"(?:data:[\w.+/;=-]*,)?[A-Za-z0-9+/=_-]{512,}"')


def prefix_of(parsed: ParsedRequest, *, has_media: bool = False) -> Prefix:
    """Return the hash chain of a prompt; empty if engines use no prefix cache for the request.
    O(bytes). `has_media`: a message may hold more than text.
    """
    fields = dict(parsed.fields.items())
    # Engines bypass their prefix caches for these requests.
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
