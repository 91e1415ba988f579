"""Section `profiles` of the configuration."""

from kvrs.config.settings import Settings


class ProfileSettings(Settings):
    prefill: str | None = None
    """A table that comes with kvrs, by name, or a file, by path (docs/research/profiles.md), for
    all instances; not for DistServe's decoding stages, which read known tokens one a step. null:
    each instance measures its own; before vLLM a guess by the model's size, which learns.
    """
