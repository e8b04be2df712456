"""Attention as a function: masks, weights, log-sum-exp, gradients, and the same result three ways.

Run it: python examples/plain_jax.py
"""

import jax
import jax.numpy as jnp

import attention_jax as aj

q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 8, 128, 64))  # (B, H, T, D) each

# A mask is an expression. The terminal shows it, and so does a notebook.
mask = aj.Causal() & aj.Window(left=7, right=None)
print(mask.draw(16, 16))

out, lse, weights = aj.attention(q, k, v, mask, return_lse=True, return_weights=True)
print("out", out.shape, "lse", lse.shape, "weights", weights.shape)

# The same as one matrix, and row by row: no row waits for another, which is why attention runs over all T at once.
logits = jnp.where(mask.array(128, 128), q @ k.swapaxes(-1, -2) / 64**0.5, -jnp.inf)
matrix = jax.nn.softmax(logits) @ v
rows = jnp.stack([aj.attention(q[:, :, t : t + 1], k, v, mask, q_positions=t)[:, :, 0] for t in range(4)], axis=2)
print("matrix differs by", abs(out - matrix).max(), "and rows by", abs(out[:, :, :4] - rows).max())

# Gradients of any order, forwards and backwards.
loss = lambda q: jnp.sum(aj.attention(q, k, v, mask) ** 2)  # noqa: E731
gradient = jax.grad(loss)(q)
_, curvature = jax.jvp(jax.grad(loss), (q,), (gradient,))
print("|gradient|", jnp.linalg.norm(gradient), "|Hessian · gradient|", jnp.linalg.norm(curvature))

# What runs, and what it costs.
print(aj.plan(q, k, v, mask))

# Projections around it: grouped heads, rotary positions, parameters in a plain dictionary.
params = aj.init_mha(jax.random.key(1), width=256, heads=8, kv_heads=2)
x = jax.random.normal(jax.random.key(2), (2, 128, 256))
print("mha", aj.mha(params, x, mask=aj.Causal(), rotary=aj.Rotary()).shape)
