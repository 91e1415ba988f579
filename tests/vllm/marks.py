"""Marks of tests that start servers of real vLLM."""

import os

import pytest

from kvrs_testkit.vllm_servers import PYTHON_ENV

REAL_VLLM = [
    pytest.mark.vllm,
    pytest.mark.process,
    pytest.mark.network,
    pytest.mark.xdist_group("clusters"),
    pytest.mark.skipif(PYTHON_ENV not in os.environ, reason=f"{PYTHON_ENV} names no interpreter"),
    pytest.mark.nightly,
]
