"""The laboratory: it starts, simulates and measures clusters."""
