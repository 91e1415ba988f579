"""kvrs keeps every LLM stream alive when the machine that was producing it dies."""
