"""Elastic parallelism: a model is cut into units whose results do not depend on their process."""
