"""Building blocks of models whose results are bit-identical for a token however it is batched.

The rule of every file here: a number may depend on its own row's inputs only. So matrix products
have one fixed shape, sums have one fixed association, and whatever is not exactly rounded (exp,
cos) runs on whole SIMD vectors.
"""
