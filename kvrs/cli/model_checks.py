"""Model checks of `kvrs doctor`: its files on this machine, and the model of its profile."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvrs.cli.cluster_checks import ProxyAnswer
from kvrs.cli.findings import Finding, bad, doubtful
from kvrs.config.file import Config
from kvrs.errors import ConfigError
from kvrs.profiles import catalog
from kvrs.profiles.catalog import Profile
from kvrs.profiles.guess import size_of
from kvrs.proxy.backends.model_files import how_to_get
from kvrs.proxy.backends.model_geometry import geometry_of, read_config

_TOKENIZER = "tokenizer.json"
# Factor within which two numbers of parameters count as the same, because names of models round
# them.
_SAME = 1.25


def exactness_findings(answer: ProxyAnswer) -> Iterator[Finding]:
    """Yield the findings that matter most: instances that compute different things, and a proxy
    without a tokenizer, at which streams continue inexactly.
    """
    if answer.state is not None:
        yield from _differences(answer.state["instances"])
        lacking = [row for row in answer.state["proxies"] if row.get("lacks_tokenizer")]
        if lacking:
            model, directory = lacking[0].get("model"), lacking[0].get("model_directory")
            yield bad("exactness", *_inexact(model, directory))


def _differences(rows: list[Mapping[str, Any]]) -> Iterator[Finding]:
    """Yield what self-tests found on running instances: weights that differ, and near-ties."""
    tests = {
        row["id"]: row["self_test"] for row in rows if row["health"] == "up" and row["self_test"]
    }
    for check, key, is_fault in (
        ("weights", "differs_from", True),
        ("near-ties", "near_ties_with", False),
    ):
        pairs = sorted(
            (name, other)
            for name, test in tests.items()
            for other in test[key]
            if other in tests and name < other
        )
        if not pairs:
            continue
        shown = ", ".join(f"{one} and {other}" for one, other in pairs)
        if is_fault:
            yield _of_weights(shown, {name for pair in pairs for name in pair}, rows)
        else:
            value = f"two tokens that are about as likely change places at {shown}"
            allowed = "the same tokens everywhere: else responses say X-Kvrs-Exact: no"
            remedy = "the same GPU, TP, attention backend and version at all of them"
            yield doubtful(check, value, allowed, remedy)


def _of_weights(shown: str, names: set[str], rows: list[Mapping[str, Any]]) -> Finding:
    """Return the finding about instances that compute different tokens (`shown`): by other weights,
    by another version of the engine with equal weights, or by an unknown cause.
    """
    concerned = [row for row in rows if row["id"] in names]
    digests = {row["self_test"].get("weights_digest") for row in concerned}
    versions = sorted({str(row.get("engine_version")) for row in concerned})
    if len(digests) == 1 and digests != {""} and len(versions) > 1:
        value = f"different tokens at {shown}, of equal weights: versions {', '.join(versions)}"
        remedy = "none while the version is changed: streams end where they began"
        return doubtful("engine versions", value, "one version", remedy)
    other = [row["id"] for row in concerned if row["self_test"].get("weights") == "other"]
    cause = "other weights" if len(digests) > 1 else "other weights, or a fault"
    value = f"different tokens at {shown}: {cause}"
    if other:
        value += f"; new streams avoid {', '.join(other)}"
    remedy = (
        f"the same model and revision at all; or, if those of {other[0] if other else 'one'} are "
        f"the new ones: kvrs accept {other[0] if other else 'INSTANCE'}"
    )
    return bad("weights", value, "the same tokens everywhere", remedy)


def _inexact(model: str | None, directory: str | None) -> tuple[str, str, str]:
    """Return value, allowed value and remedy of the finding that the tokenizer is missing."""
    cause = f"no {_TOKENIZER} in {directory}"
    remedy = "save the model's tokenizer there (save_pretrained), and restart the proxy"
    if directory is None:
        cause = "the proxy does not know the model"
        remedy = "cluster.model, or --model, and a restart of the proxy"
        if model is not None:
            cause = f"no files of the model {model} on the proxy's machine"
            remedy = f"{how_to_get(model)} there, or cluster.model; then restart the proxy"
    value = (
        f"responses say X-Kvrs-Exact: no, and text behind a cut is the engine's own, since there "
        f"is {cause}"
    )
    return value, f"the model's {_TOKENIZER}", remedy


def model_findings(config: Config, state: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield what the proxy lacks about the model of stock engines, which report little of it."""
    row = state["proxies"][0]
    model, directory = row.get("model"), row.get("model_directory")
    if not config.cluster.backend.is_stock or model is None:
        return
    if directory is None:
        value = f"none of {model} here: the size of its KV is assumed (that of an 8B model)"
        allowed = "its config.json: without it costs of moving KV are a guess"
        remedy = f"{how_to_get(model)}, or cluster.model; then restart the proxy"
        yield doubtful("files of the model", value, allowed, remedy)
    # Only a model that the engine has reported: other checks judge a configured model.
    elif config.cluster.model is None:
        remark = foreign_profile(config.profiles.prefill, Path(directory))
        if remark is not None:
            yield doubtful("configuration", remark.removeprefix("warning: "), "", "")


def foreign_profile(name: str | None, directory: Path | None) -> str | None:
    """Return the warning that a profile was measured with another model, by comparing the profile
    with the model's config.json; None: no difference found.
    """
    if name is None or directory is None:
        return None
    try:
        fields = read_config(directory / "config.json")
        own = geometry_of(directory / "config.json", fields, 16)
        profile = catalog.profile(name)
    except ConfigError:  # No warning: another check reports this fault.
        return None
    size = size_of(fields)
    compared = {
        "layers": (profile.geometry.layers, own.layers),
        "KV heads": (profile.geometry.kv_heads, own.kv_heads),
        "numbers a head": (profile.geometry.head_dim, own.head_dim),
        "billion parameters": (_parameters(profile), size and size.parameters / 1e9),
    }
    differing = [
        f"{theirs:.3g} {what}, and not {ours:.3g}"
        for what, (theirs, ours) in compared.items()
        if theirs and ours and not 1 / _SAME <= theirs / ours <= _SAME
    ]
    if not differing:
        return None
    return (
        f"warning: profiles.prefill: {name} is of {profile.model}, which has "
        f"{'; '.join(differing)}: its times are those of another model; allowed: a profile of this "
        f"one (`kvrs profile --url` measures one), or null, by which kvrs learns its own"
    )


def _parameters(profile: Profile) -> float | None:
    """Return the number of the profile's parameters in billions; None: the profile does not tell
    it.
    """
    if profile.load is None or profile.dtype not in ("bf16", "fp16"):
        return None
    return profile.load.weight_bytes / 2e9
