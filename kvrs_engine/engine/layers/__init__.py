"""Blocks of models whose results for a token are bit-identical in every batch.

The rule of every file here: a number depends only on the inputs of its own row. So matrix products
are products of units, in shapes that depend on the model alone, in tiles of one height or in a form
that was proven to give the same bytes; sums have one fixed order; and functions that are not
exactly rounded (exp, cos) run on whole SIMD vectors.
"""
