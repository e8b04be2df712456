"""The core belongs to no framework: `attention` inside an Equinox module and a Haiku transform."""

import equinox as eqx
import haiku as hk
import jax
import numpy as np

from attention_jax import Causal, attention

W = 8
X = jax.random.normal(jax.random.key(0), (2, 5, W))


def test_attention_works_inside_an_equinox_module():
    class Mixer(eqx.Module):
        q: eqx.nn.Linear
        kv: eqx.nn.Linear

        def __call__(self, x):
            return attention(jax.vmap(self.q)(x), jax.vmap(self.kv)(x), jax.vmap(self.kv)(x), Causal())

    keys = jax.random.split(jax.random.key(0))
    mixer = Mixer(eqx.nn.Linear(W, W, key=keys[0]), eqx.nn.Linear(W, W, key=keys[1]))
    gradient = eqx.filter_jit(eqx.filter_grad(lambda mixer, x: jax.vmap(mixer)(x).sum()))(mixer, X)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
    assert np.abs(gradient.kv.weight).max() > 0


def test_attention_works_inside_a_haiku_transform():
    def forward(x):
        q, k, v = (hk.Linear(W, name=name)(x)[:, None] for name in "qkv")
        return attention(q, k, v, Causal())[:, 0]

    model = hk.without_apply_rng(hk.transform(forward))
    params = model.init(jax.random.key(0), X)
    gradient = jax.jit(jax.grad(lambda params, x: model.apply(params, x).sum()))(params, X)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
    assert np.abs(gradient["v"]["w"]).max() > 0
