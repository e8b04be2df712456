"""The language model and its twin for recall: one word changes the mixer, and nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attention_jax import data, models
from attention_jax.layers import Block
from attention_jax.models import MIXERS, CausalLM, RecallModel, matched_sizes, parameter_count, sample

mixers = pytest.mark.parametrize("mixer", MIXERS)
TOKENS = jnp.array([[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5, 8, 9, 7]])


def small(mixer="attention", **options):
    sizes = {"vocab": 11, "width": 16, "depth": 2, "heads": 2, "mixer": mixer, **options}
    return CausalLM(**sizes, rngs=nnx.Rngs(0))


def shapes(model):
    return {".".join(map(str, path)): leaf.shape for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))}


def test_the_mixers_are_the_five_that_are_promised():
    assert MIXERS == ("attention", "elman", "gru", "lstm", "linear")


@pytest.mark.parametrize("model", [CausalLM, RecallModel])
@pytest.mark.parametrize(("width", "depth", "heads"), [(128, 2, 4), (64, 2, 4), (32, 1, 2), (256, 2, 8)])
def test_models_of_all_mixers_have_as_many_parameters_within_two_percent(model, width, depth, heads):
    def count(mixer):
        sizes = {"width": width, "depth": depth, "heads": heads}
        return parameter_count(nnx.eval_shape(lambda: model(mixer=mixer, **sizes, rngs=nnx.Rngs(0))))

    counts = {mixer: count(mixer) for mixer in MIXERS}
    assert max(counts.values()) <= 1.02 * min(counts.values()), counts


@mixers
def test_only_the_mixer_differs_between_two_models(mixer):
    attention, other = shapes(small()), shapes(small(mixer))
    differing = {name for name in attention.keys() | other.keys() if attention.get(name) != other.get(name)}
    assert all(".mixer." in name for name in differing)
    assert bool(differing) == (mixer != "attention")
    blocks = {name: shape for name, shape in other.items() if name.startswith("blocks")}
    assert len(blocks) < len(other)
    assert all(isinstance(block, Block) for block in small(mixer).blocks)


@mixers
def test_logits_do_not_depend_on_the_future_and_do_on_the_past(mixer):
    model = small(mixer)
    logits = model(TOKENS)
    assert logits.shape == (2, 7, 11)
    later, earlier = model(TOKENS.at[:, 4].set(10)), model(TOKENS.at[:, 0].set(10))
    np.testing.assert_allclose(later[:, :4], logits[:, :4], rtol=1e-5, atol=1e-5)
    assert np.abs(np.asarray(later - logits)[:, 4:]).max(axis=(0, 2)).min() > 1e-6
    assert np.abs(np.asarray(earlier - logits)).max(axis=(0, 2)).min() > 1e-6


@mixers
def test_one_sequence_without_a_batch_gives_the_row_of_the_batch(mixer):
    model = small(mixer)
    np.testing.assert_allclose(model(TOKENS[0]), model(TOKENS)[0], rtol=1e-5, atol=1e-5)


def test_the_order_of_earlier_tokens_matters_to_attention():
    model = small(depth=1)
    swapped = TOKENS.at[:, :2].set(TOKENS[:, 1::-1])
    assert np.abs(np.asarray(model(TOKENS) - model(swapped)))[:, 3:].max() > 1e-4


def test_a_model_is_known_by_its_sizes():
    model = small("gru", state=9)
    twin = CausalLM(**model.sizes, rngs=nnx.Rngs(1))
    assert model.sizes["state"] == 9
    assert shapes(twin) == shapes(model)
    assert small().sizes == {"vocab": 11, "width": 16, "depth": 2, "heads": 2, "mixer": "attention", "state": None}


def test_the_same_seed_gives_the_same_parameters():
    one, two = (jax.tree.leaves(nnx.state(small("gru"))) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))


def test_dropout_of_a_model_is_for_training_only():
    model = small(dropout=0.3)
    assert not np.allclose(model(TOKENS), model(TOKENS))
    model.eval()
    np.testing.assert_array_equal(model(TOKENS), model(TOKENS))


@pytest.mark.parametrize(
    "make",
    [small, lambda mixer: RecallModel(mixer, rngs=nnx.Rngs(0)), lambda mixer: matched_sizes([mixer], 8, 2)],
    ids=["language", "recall", "sizes"],
)
def test_an_unknown_mixer_is_refused_and_the_known_ones_are_named(make):
    with pytest.raises(ValueError, match=r"(?s)unknown mixer.*attention, elman, gru, lstm, linear"):
        make("mamba")


def test_the_recall_model_with_attention_has_no_positions():
    model = RecallModel(width=16, depth=1, heads=2, rngs=nnx.Rngs(0))  # a second block would see who sees whom
    drawn = data.recall_batch(np.random.default_rng(0), 3, pairs=4)
    order = np.array([2, 0, 3, 1, 4, 5, 6, 7])  # the pairs in another order, the queries where they were
    one = model(drawn.keys, drawn.values)
    two = model(drawn.keys[:, order], drawn.values[:, order])
    assert one.shape == (3, 8, data.RECALL_VALUES + 1)
    np.testing.assert_allclose(one[:, 4:], two[:, 4:], rtol=1e-4, atol=1e-5)


def by_hand(model, prompt, count, length):
    """The likeliest token, the model run again on the last `length` tokens for each."""
    tokens = list(prompt)
    for _ in range(count):
        window = tokens[-length:]
        logits = model(jnp.array(window + [0] * (length - len(window))))
        tokens.append(int(jnp.argmax(logits[len(window) - 1])))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("mixer", ["attention", "gru"])
@pytest.mark.parametrize("prompt", [[3], [1, 2, 3, 4, 5, 6, 7]], ids=["short", "longer than the window"])
def test_sampling_at_temperature_zero_takes_the_likeliest_token_each_time(mixer, prompt):
    model = small(mixer)
    drawn = sample(model, np.array(prompt), 9, jax.random.key(0), temperature=0.0, length=5)
    assert drawn.dtype == np.int32
    assert drawn.tolist() == by_hand(model, prompt, 9, length=5)


def test_the_same_key_samples_the_same_text():
    model = small("elman")
    one, same, other = (sample(model, np.array([1]), 20, jax.random.key(seed), length=8) for seed in (0, 0, 1))
    np.testing.assert_array_equal(one, same)
    assert not np.array_equal(one, other)


class Dice(nnx.Module):
    """Expects each token with a given probability, whatever came before."""

    def __init__(self, probabilities):
        self.logits = nnx.Param(jnp.log(jnp.array(probabilities)))

    def __call__(self, tokens):
        return jnp.broadcast_to(self.logits[...], (*tokens.shape, self.logits.size))


@pytest.mark.parametrize(("temperature", "expected"), [(1.0, [0.5, 0.3, 0.2]), (0.5, [25 / 38, 9 / 38, 4 / 38])])
def test_samples_follow_the_probabilities_and_the_temperature(temperature, expected):
    drawn = sample(Dice([0.5, 0.3, 0.2]), np.array([1]), 2000, jax.random.key(0), temperature=temperature, length=2)
    np.testing.assert_allclose(np.bincount(drawn) / 2000, expected, atol=0.03)  # 3 standard deviations


def test_sampling_leaves_the_model_and_its_dropout_alone():
    model = small("gru", dropout=0.5)
    one, two = (sample(model, np.array([1]), 5, jax.random.key(0), length=4) for _ in range(2))
    np.testing.assert_array_equal(one, two)
    assert not model.blocks[0].dropout.deterministic


@pytest.mark.parametrize(
    "wrong", [{"prompt": np.zeros(0, int)}, {"count": -1}, {"length": 0}, {"temperature": -1.0}], ids=str
)
def test_what_cannot_be_sampled_is_refused(wrong):
    options = {"prompt": np.array([1]), "count": 2, "key": jax.random.key(0), **wrong}
    with pytest.raises(ValueError, match="sampling needs"):
        sample(small("elman"), **options)


def test_nothing_but_parameters_is_counted():
    assert parameter_count(nnx.BatchNorm(4, rngs=nnx.Rngs(0))) == 8
    assert models.parameter_count(small(dropout=0.5)) == models.parameter_count(small())


SAMPLES = {
    "two axes": (np.array([[1, 2]]), {}, TypeError, "one row of integers"),
    "floats": (np.array([1.7]), {}, TypeError, "one row of integers"),
    "unknown token": (np.array([300]), {}, ValueError, "tokens that the model has not"),
    "negative token": (np.array([-1]), {}, ValueError, "tokens that the model has not"),
    "nan": (np.array([1]), {"temperature": float("nan")}, ValueError, "no negative numbers"),
    "inf": (np.array([1]), {"temperature": float("inf")}, ValueError, "no negative numbers"),
}


@pytest.mark.parametrize(("prompt", "options", "error", "text"), SAMPLES.values(), ids=SAMPLES)
def test_what_cannot_be_continued_is_refused(prompt, options, error, text, plain_errors):
    model = CausalLM(vocab=20, width=8, depth=1, heads=2, rngs=nnx.Rngs(0))
    with pytest.raises(error, match=text):
        sample(model, prompt, 3, jax.random.key(0), length=8, **options)


def test_a_refused_count_does_not_spoil_the_next_call(plain_errors):
    model = CausalLM(vocab=20, width=8, depth=1, heads=2, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError):
        sample(model, np.array([1]), 3.0, jax.random.key(0), length=8)
    assert sample(model, np.array([1]), 3, jax.random.key(0), length=8).shape == (3,)
