"""A model's cut into units whose results do not depend on the process that computes them."""
