"""Instances of several ranks: processes that each compute some units of a model."""
