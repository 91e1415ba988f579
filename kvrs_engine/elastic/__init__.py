"""How a model is cut into units whose results do not depend on which process computes them."""
