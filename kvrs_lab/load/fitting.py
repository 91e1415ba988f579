"""The limit of a server's requests (`max_model_len`), and traces scaled to it."""

import aiohttp
import msgspec

from kvrs.errors import ConfigError, TraceError
from kvrs_lab.load.open_loop import Dialect
from kvrs_lab.report.metrics import percentile
from kvrs_lab.traces.mooncake import Trace, clip, scale, scale_lengths

_TIMEOUT_S = 10.0
_USUAL_PERCENT = 95  # Percentile of lengths; longer prompts are cut too.


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


async def served_tokens(url: str, dialect: Dialect) -> int | None:
    """Limit of prompt and output tokens, from the server's `/v1/models`; None: not reported.

    Raises:
        ConfigError: no server answers at `url`.
    """
    key = dialect.api_key
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    where = f"{url.rstrip('/').removesuffix('/v1')}/v1/models"
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S)) as session,
            session.get(where, headers=headers) as answer,
        ):
            body = await answer.read() if answer.status == 200 else b""
    except aiohttp.ClientConnectorError as error:
        raise ConfigError(
            f"--url: got {url!r}, {error.strerror or error}; allowed: a server that answers"
        ) from None
    except (aiohttp.ClientError, OSError, TimeoutError):
        return None
    try:
        models = msgspec.json.decode(body, type=_Models).data
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    named = [model for model in models if dialect.model in (None, model.id)]
    return named[0].max_model_len if named else None


def too_long(trace: Trace, most_tokens: int) -> int:
    """Number of requests of a trace that a server would refuse."""
    return sum(each.input_tokens + each.output_tokens > most_tokens for each in trace.requests)


def fitting_scale(trace: Trace, most_tokens: int) -> float | None:
    """The largest length scale of two digits at which no request is too long; None: even blocks of
    one token are too long.
    """
    longest = max(each.input_tokens + each.output_tokens for each in trace.requests)
    # Rounded lengths of blocks may fit a little above the ratio.
    scales = (
        digits / 10**places
        for places in range(2, 7)
        for digits in range(99, 9, -1)
        if digits / 10**places < 1.1 * most_tokens / longest
    )
    return next(
        (each for each in scales if not too_long(scale_lengths(trace, each), most_tokens)), None
    )


def fitted(trace: Trace, most_tokens: int) -> tuple[Trace, str]:
    """Scale the trace to a quarter of the server's tokens for outputs and the rest for prompts.
    Return the trace, and a description of the changes.
    """
    outputs = max(1, most_tokens // 4)
    prompts = max(1, most_tokens - outputs - 1)  # The prompt's last position gives the first token.
    lengths = [request.input_tokens for request in trace.requests]
    usual = percentile(lengths, _USUAL_PERCENT)
    assert usual is not None
    try:
        found = scale(trace, prompts, outputs, round(usual))
        how = f"each block of {trace.block_tokens} tokens of a prompt to {found.block_tokens}"
    except TraceError:  # Blocks of one token do not fit either.
        found, how = clip(trace, prompts, outputs), "no block of a prompt"
    full = sum(-(-length // trace.block_tokens) for length in lengths)
    kept = sum(len(request.hash_ids) for request in found.requests)
    words = (
        f"{too_long(trace, most_tokens)} of {len(lengths)} requests are longer than the "
        f"{most_tokens} tokens that the server takes, so the trace was shortened: {how}; the last "
        f"{full - kept} of {full} blocks were left out; outputs to at most {outputs} tokens"
    )
    return found, words
