"""A Hessian-vector product through a long sequence: second order in memory linear in its length."""

import jax
import jax.numpy as jnp

import attention_jax as aj

LENGTH, WIDTH = 4096, 32
LOGITS = LENGTH * LENGTH * 4 / 2**20

q, k, v, direction = (jax.random.normal(key, (LENGTH, WIDTH)) for key in jax.random.split(jax.random.key(0), 4))


def loss(q):
    return jnp.square(aj.attention(q, k, v, aj.Causal())).mean()


@jax.jit
def hessian_times(q, direction):
    """Forward over reverse: the derivative of the gradient along a direction."""
    return jax.jvp(jax.grad(loss), (q,), (direction,))[1]


along = hessian_times(q, direction)
memory = hessian_times.lower(q, direction).compile().memory_analysis()
assert memory is not None
needed = memory.temp_size_in_bytes / 2**20
print(aj.plan(q, k, v, aj.Causal()))
print(f"Hessian times a vector: {along.shape}, of length {jnp.linalg.norm(along):.2e}")
print(f"one array of logits would take {LOGITS:.0f} MiB; all temporaries together take {needed:.0f}")

# A Hessian is symmetric: a · (H b) = b · (H a).
other = jax.random.normal(jax.random.key(1), q.shape)
assert jnp.allclose((other * along).sum(), (direction * hessian_times(q, other)).sum(), rtol=1e-3, atol=1e-9)
assert needed < LOGITS
