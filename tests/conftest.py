"""Strict numerics for every test: no silent promotion of ranks or dtypes, shapes checked at run time."""

import os
import pathlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")  # sharding tests need a mesh

import jax
import jaxtyping
import pytest

with jaxtyping.install_import_hook("attention_jax", "beartype.beartype"):
    import attention_jax  # noqa: F401

from attention_jax.kernels import KERNELS
from attention_jax.kernels.tiled import Tiled

KERNELS["small tiles"] = Tiled((4, 5))  # so that the small arrays of tests have many tiles

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

CACHE = pathlib.Path(__file__).parent.parent / ".jax_cache" / jax.__version__
jax.config.update("jax_compilation_cache_dir", str(CACHE))  # one compile cache for all workers and runs
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


@pytest.fixture
def plain_errors():
    """Our own messages: without this the check of shapes and types at run time speaks first."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def pytest_collection_modifyitems(config, items):
    """The full product runs only where it is asked for, `-m full`."""
    if "full" in config.getoption("markexpr"):
        return
    full = [item for item in items if item.get_closest_marker("full")]
    if full:
        config.hook.pytest_deselected(items=full)
        items[:] = [item for item in items if not item.get_closest_marker("full")]
