"""The embedded engine: it computes on torch, and its results are exact to the bit."""
