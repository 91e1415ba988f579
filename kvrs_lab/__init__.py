"""The laboratory: clusters that are started, simulated and measured."""
