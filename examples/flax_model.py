"""Two ways into Flax: our attention inside Flax's own layer, and a small language model taught to count.

Run it: python examples/flax_model.py
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from attention_jax.layers import attention_fn
from attention_jax.models import CausalLM, parameter_count, sample
from attention_jax.training import Recipe, evaluate, train

# Flax's layer keeps its parameters and interface; the attention in it is ours.
layer = nnx.MultiHeadAttention(4, in_features=32, decode=False, attention_fn=attention_fn, rngs=nnx.Rngs(0))
x = jax.random.normal(jax.random.key(0), (2, 16, 32))
print("flax.nnx.MultiHeadAttention", layer(x, mask=nnx.make_causal_mask(jnp.ones((2, 16)))).shape)

# A text that counts, as bytes, and two models that differ in one word.
text = np.frombuffer(" ".join(str(n) for n in range(1000, 4000)).encode(), np.uint8)
for mixer in ("attention", "gru"):
    model = CausalLM(width=32, depth=1, heads=2, mixer=mixer, rngs=nnx.Rngs(0))
    for progress in train(model, text[:12000], Recipe(steps=100, batch=16, length=32, learning_rate=1e-2)):
        if progress.step == progress.steps:
            print(f"{mixer}: loss {progress.loss:.2f} nats per token after {progress.step} steps")
    bits = evaluate(model, text[12000:], length=32)
    went_on = sample(model, text[:10], 20, jax.random.key(0), temperature=0.0, length=32).astype(np.uint8).tobytes()
    print(f"{mixer}: {parameter_count(model)} parameters, {bits:.2f} bits per byte, {text[:10].tobytes()} -> {went_on}")
