"""Documents of different lengths in one row: segments keep them apart, positions start anew in each.

Padding a batch to its longest document wastes the padding; packing puts several into one row. `Segments` hides what
belongs to another document: the result is that of each document alone, and no gradient leaks from one to the next.

Run it: python examples/packed_batch.py
"""

import jax
import jax.numpy as jnp
import numpy as np

import attention_jax as aj

lengths = [5, 9, 2]  # and 4 places of padding: 20 in all
ids = np.repeat([1, 2, 3, 0], [*lengths, 4])
positions = np.concatenate([np.arange(n) for n in [*lengths, 4]])
mask = aj.Causal() & aj.Segments(ids, pad=0)
print(mask.draw(20, 20, q_positions=positions, kv_positions=positions))

params = aj.init_mha(jax.random.key(0), width=32, heads=4)
x = jax.random.normal(jax.random.key(1), (20, 32))


def packed(x):
    return aj.mha(params, x, mask=mask, rotary=aj.Rotary(), q_positions=positions, kv_positions=positions)


together = packed(x)
starts = np.cumsum([0, *lengths])
for start, length in zip(starts, lengths, strict=False):
    alone = aj.mha(params, x[start : start + length], mask=aj.Causal(), rotary=aj.Rotary())
    print(f"document of {length}: differs by {abs(together[start : start + length] - alone).max():.1e}")
print("padding gives zeros:", not together[16:].any())

# No gradient leaks from the second document into the first.
leak = jax.grad(lambda x: jnp.sum(packed(x)[5:14]))(x)[:5]
print("gradient of document 2 in document 1 is 0:", not leak.any())
