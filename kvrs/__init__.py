"""kvrs keeps every LLM stream alive when the machine that produces it fails."""

__version__ = "0.1.0"
