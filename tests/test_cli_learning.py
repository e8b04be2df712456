"""How the main job plans the training of its models."""

import jax
from flax import nnx

from attention_jax import models
from attention_jax.cli import learning
from attention_jax.cli.budget import Budget


def test_models_have_as_many_parameters_within_two_percent():
    sizes = {}
    for mixer in models.MIXERS:
        model = nnx.eval_shape(lambda mixer=mixer: models.CausalLM(mixer=mixer, rngs=nnx.Rngs(0)))
        sizes[mixer] = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert max(sizes.values()) <= 1.02 * min(sizes.values())


def test_looks_come_at_the_end_and_at_halves_of_the_way():
    learner = learning.Learner("gru", None, 0.01, 0.5, 1.0)
    recipe, looks = learning.plan([learner, learner], Budget(60), seed=5)
    assert looks == 6
    assert recipe.seed == 5
    assert 2 * (recipe.steps * 0.01 + looks * 0.5) < 60
    assert recipe.steps > 1500
    assert learning.plan([learner], Budget(0.1), seed=0)[0].steps == 1
