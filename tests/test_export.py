"""A call exported for platforms that are not there, with a batch that is not known yet."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import attention_jax as aj

PLATFORMS = ("cpu", "cuda", "tpu")


def gradients(q, k, v, implementation):
    attend = functools.partial(aj.attention, mask=aj.Causal(), implementation=implementation)
    out, pullback = jax.vjp(attend, q, k, v)
    return out, pullback(q)


@pytest.mark.parametrize("implementation", ["auto", "dense", "tiled", "small tiles"])
def test_a_call_is_exported_for_all_platforms_with_a_symbolic_batch(implementation):
    (batch,) = export.symbolic_shape("batch")
    q = jax.ShapeDtypeStruct((batch, 4, 24, 8), jnp.float32)
    k = jax.ShapeDtypeStruct((batch, 2, 24, 8), jnp.float32)
    fn = jax.jit(functools.partial(gradients, implementation=implementation))
    exported = export.deserialize(export.export(fn, platforms=PLATFORMS)(q, k, k).serialize())
    assert exported.platforms == PLATFORMS
    for size in (1, 3):
        x = jax.random.normal(jax.random.key(size), (3, size, 4, 24, 8))
        args = x[0], x[1, :, :2], x[2, :, :2]
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-5), exported.call(*args), fn(*args))


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_call_is_exported_for_one_platform(platform):
    x = jax.ShapeDtypeStruct((1, 2, 2048, 16), jnp.bfloat16)
    exported = export.export(jax.jit(functools.partial(gradients, implementation="tiled")), platforms=[platform])(
        x, x, x
    )
    assert "2048x2048" not in exported.mlir_module()
