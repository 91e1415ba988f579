"""Blocks of models, with results that are bit-identical for a token however it is batched.

The rule of every file here: a number may depend on its own row's inputs only. So matrix products
are those of units, of shapes that the model decides, in tiles of one height or in a form that was
proven to have the same bytes; sums have one fixed association; and whatever is not exactly rounded
(exp, cos) runs on whole SIMD vectors.
"""
