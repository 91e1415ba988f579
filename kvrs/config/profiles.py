"""Section `profiles` of the configuration."""

from kvrs.config.settings import Settings


class ProfileSettings(Settings):
    prefill: str | None = None
    """Table of prefill times for all instances: the name of one that comes with kvrs, or the path
    of a file (docs/research/profiles.md). It does not apply to DistServe's decode instances, which
    read known tokens one per step. null: each instance measures its own; with vLLM and SGLang a
    guess by the model's size, which learns.
    """
