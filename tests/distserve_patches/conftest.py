"""Upstream itself, where a checkout is at hand, on logical GPUs of a Ray of our own."""

import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from distserve_patches import checkout, upstream
from kvrs_engine.engine.random_model import write_tiny_model
from kvrs_lab.cluster.loopback_ray import ENVIRONMENT

LOGICAL_GPUS = 8


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_model(directory, seed=0)
    return directory


@pytest.fixture(scope="package")
def environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**ENVIRONMENT, "HF_HUB_OFFLINE": "1"}.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="package")
def distserve(environment: None) -> Path:
    """The checkout, loaded off the GPU: from here on `distserve.*` can be imported, and what
    subclasses it.
    """
    if checkout.HOME_ENV not in os.environ:
        pytest.skip(f"{checkout.HOME_ENV} is not set; it names a checkout of DistServe")
    with warnings.catch_warnings():
        # What a dependency of upstream's warns of is not ours.
        warnings.simplefilter("ignore")
        upstream.load(off_gpu=True)
    return checkout.find(None)


@pytest.fixture(scope="package")
def logical_gpus(distserve: Path) -> Iterator[int]:
    """Ray runs, with that many logical GPUs."""
    import ray

    # Ray puts sockets with long names into it.
    directory = tempfile.mkdtemp(prefix="kvrs-", dir="/tmp")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray.init(
            num_cpus=1,
            num_gpus=LOGICAL_GPUS,
            include_dashboard=False,
            object_store_memory=80 << 20,
            log_to_driver=False,
            _node_ip_address="127.0.0.1",
            _temp_dir=directory,
        )
    yield LOGICAL_GPUS
    ray.shutdown()
    shutil.rmtree(directory, ignore_errors=True)
