"""Training: the schedule, the update, reproducibility, checkpoints, and what is reported of it."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attention_jax import data, training
from attention_jax.models import CausalLM
from attention_jax.training import Recipe, evaluate, fit, steps_within, train

TEXT = np.tile(np.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7], np.uint8), 60)
RECIPE = Recipe(steps=8, batch=3, length=9, learning_rate=1e-2, warmup=3, seed=5)


def small(mixer="elman", seed=0, **options):
    return CausalLM(vocab=16, width=8, depth=1, heads=2, mixer=mixer, rngs=nnx.Rngs(seed), **options)


def run(model, recipe=RECIPE, **options):
    return list(train(model, TEXT, recipe, **options))


def bits_of(model):
    """Every array of a model, random streams included, as bytes."""
    leaves = jax.tree.leaves(nnx.state(model))
    is_key = lambda leaf: jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)  # noqa: E731
    return [np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf).tobytes() for leaf in leaves]


class Number(nnx.Module):
    """A model of one parameter, whose gradient is the batch."""

    def __init__(self, start=1.0):
        self.number = nnx.Param(jnp.float32(start))


def product(model, batch):
    return model.number[...] * batch[0]


def numbers(*values):
    return lambda start: iter([np.float32([value]) for value in values[start:]])


def adamw(start, gradients, recipe):
    """AdamW on one number, clipped, as its paper has it: decay apart from the moments, scaled by the rate."""
    x, first, second = start, 0.0, 0.0
    for step, gradient in enumerate(gradients):
        gradient *= min(1.0, recipe.clip / abs(gradient)) if gradient else 1.0
        first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
        ratio = (first / (1 - 0.9 ** (step + 1))) / (math.sqrt(second / (1 - 0.999 ** (step + 1))) + 1e-8)
        x -= recipe.rate(step) * (ratio + recipe.weight_decay * x)
    return x


@pytest.mark.parametrize("gradients", [(0.5, -0.25, 0.125), (0.5, 1000.0, -0.5), (0.0, 0.0, 0.0)], ids=str)
@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_a_step_is_adamw_with_warm_up_clipping_and_decay(gradients, decay):
    recipe = Recipe(steps=3, learning_rate=0.1, warmup=1, clip=1.0, weight_decay=decay)
    model = Number()
    list(fit(model, numbers(*gradients), product, recipe))
    np.testing.assert_allclose(model.number[...], adamw(1.0, gradients, recipe), rtol=1e-5)


def test_the_rate_rises_in_a_line_then_falls_as_a_cosine_to_a_tenth():
    recipe = Recipe(steps=100, learning_rate=1.0, warmup=20)
    rates = [recipe.rate(step) for step in range(100)]
    np.testing.assert_allclose(rates[:20], np.arange(1, 21) / 21)
    np.testing.assert_allclose(rates[20], 1.0)
    np.testing.assert_allclose(rates[60], 0.55)
    assert 0.1 < rates[99] < 0.101
    assert rates[20:] == sorted(rates[20:], reverse=True)
    assert Recipe(steps=1, warmup=0).rate(0) == Recipe(steps=1).learning_rate


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"batch": 0}, {"length": 1}, {"warmup": -1}], ids=str)
def test_a_recipe_that_cannot_be_followed_is_refused(wrong):
    with pytest.raises(ValueError, match="at least"):
        Recipe(**{"steps": 1, **wrong})


def test_training_lowers_the_bits_per_byte_of_what_repeats():
    model = small("attention")
    before = evaluate(model, TEXT, length=16)
    run(model, Recipe(steps=150, batch=8, length=16, learning_rate=1e-2))
    assert evaluate(model, TEXT, length=16) < 0.5 < 3 < before


def test_the_same_seed_trains_to_the_same_bits_and_another_to_others():
    one, two, other = small(dropout=0.2), small(dropout=0.2), small(dropout=0.2)
    run(one)
    run(two)
    run(other, dataclasses.replace(RECIPE, seed=6))
    assert bits_of(one) == bits_of(two)
    assert bits_of(one) != bits_of(other)


def test_how_often_progress_is_reported_does_not_change_the_bits():
    one, two = small(dropout=0.2), small(dropout=0.2)
    run(one, report_every=1)
    run(two, report_every=100)
    assert bits_of(one) == bits_of(two)


def test_padding_is_never_a_target():
    padded = np.where(TEXT == 5, 0, TEXT)  # 0 is a token that nothing else uses
    model = small()
    for _ in train(model, padded, dataclasses.replace(RECIPE, steps=60, weight_decay=0.0), pad=0):
        pass
    counts = np.bincount(np.argmax(model(padded[None, :100].astype(np.int32))[0], axis=-1), minlength=16)
    assert counts[0] == 0


def test_a_batch_of_only_padding_has_loss_zero_and_gradient_zero():
    model = small()
    tokens = jnp.zeros((2, 6), jnp.int32)
    loss, gradient = nnx.value_and_grad(lambda model: training.lm_loss(model(tokens), tokens, pad=0))(model)
    assert loss == 0
    assert all((np.asarray(leaf) == 0).all() for leaf in jax.tree.leaves(gradient))
    before = bits_of(nnx.clone(model))
    (*_, last) = train(model, np.zeros(50, np.uint8), dataclasses.replace(RECIPE, weight_decay=0.0), pad=0)
    assert last.loss == 0
    assert bits_of(model) == before


def test_progress_is_reported_at_the_first_step_every_so_often_and_at_the_last():
    reported = run(small(), report_every=3)
    assert [(now.step, now.steps) for now in reported] == [(1, 8), (3, 8), (6, 8), (8, 8)]
    assert reported[0].tokens_per_second == 0
    assert all(now.tokens_per_second > 0 for now in reported[1:])
    assert all(math.isfinite(now.loss) for now in reported)


class Clock:
    """A clock that goes only when it is told to."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(training.time, "perf_counter", lambda: self.now)

    def ticking(self, batches, seconds):
        def slow(start):
            for batch in batches(start):
                self.now += seconds
                yield batch

        return slow


def test_speed_counts_the_tokens_after_the_step_that_compiles_and_not_the_callers_time(monkeypatch):
    clock = Clock(monkeypatch)
    batches = clock.ticking(lambda start: iter([np.ones((2, 5), np.float32)] * 4), seconds=0.5)
    speeds = []
    for now in fit(Number(), batches, lambda model, batch: model.number[...] * batch[0, 0], Recipe(4), report_every=1):
        speeds.append(now.tokens_per_second)
        clock.now += 1000  # the caller evaluates
    np.testing.assert_allclose(speeds, [0, 20, 20, 20])


def test_training_stops_when_its_seconds_are_over(monkeypatch):
    clock = Clock(monkeypatch)
    model = Number()
    batches = clock.ticking(numbers(*[1.0] * 9), seconds=1.0)
    steps = [now.step for now in fit(model, batches, product, Recipe(9), seconds=3.5, report_every=1)]
    assert steps == [1, 2, 3]
    np.testing.assert_allclose(model.number[...], adamw(1.0, [1.0] * 3, Recipe(9)), rtol=1e-5)


def test_the_model_is_up_to_date_at_every_report():
    model = Number()
    for now in fit(model, numbers(*[1.0] * 4), product, Recipe(4), report_every=2):
        np.testing.assert_allclose(model.number[...], adamw(1.0, [1.0] * now.step, Recipe(4)), rtol=1e-5)


def test_whoever_leaves_the_loop_keeps_what_was_reached():
    model = Number()
    for now in fit(model, numbers(*[1.0] * 9), product, Recipe(9), report_every=1):
        if now.step == 3:
            break
    np.testing.assert_allclose(model.number[...], adamw(1.0, [1.0] * 3, Recipe(9)), rtol=1e-5)


def test_a_model_in_evaluation_is_trained_with_dropout_and_left_in_evaluation():
    one, two = small(dropout=0.2), small(dropout=0.2)
    one.eval()
    run(one)
    run(two)
    assert one.blocks[0].dropout.deterministic
    assert bits_of(one) == bits_of(two)


class Constant(nnx.Module):
    """Says the same of every position: logits that the test knows."""

    def __init__(self, logits):
        self.table = nnx.Param(jnp.asarray(logits, jnp.float32))

    def __call__(self, tokens):
        return self.table[...][tokens]


@pytest.mark.parametrize("length", [2, 5, 7, 100])
@pytest.mark.parametrize("batch", [1, 3, 32])
def test_every_byte_but_the_first_is_scored_exactly_once(length, batch):
    table = np.random.default_rng(0).normal(size=(16, 16))
    tokens = TEXT[:47]
    by_hand = 0.0
    for before, after in itertools.pairwise(tokens):
        by_hand -= table[before, after] - np.log(np.exp(table[before]).sum())
    bits = evaluate(Constant(table), tokens, length, batch=batch)
    np.testing.assert_allclose(bits, by_hand / 46 / np.log(2), rtol=1e-5)


def test_a_model_that_knows_nothing_needs_eight_bits_per_byte():
    np.testing.assert_allclose(evaluate(Constant(np.zeros((256, 256))), TEXT, length=16), 8.0, rtol=1e-5)


def test_evaluation_drops_nothing():
    model = small(dropout=0.5)
    bits = evaluate(model, TEXT[:16], 16)
    assert not model.blocks[0].dropout.deterministic
    model.eval()
    window = jnp.asarray(TEXT[None, :16], jnp.int32)
    np.testing.assert_allclose(bits, training.lm_loss(model(window), window) / np.log(2), rtol=1e-5)


@pytest.mark.parametrize(("tokens", "length"), [(1, 8), (10, 1)])
def test_what_cannot_be_scored_is_refused(tokens, length):
    with pytest.raises(ValueError, match="two tokens"):
        evaluate(small(), TEXT[:tokens], length)


def test_a_text_shorter_than_a_window_is_refused_before_the_first_step():
    with pytest.raises(ValueError, match="fit into the text"):
        train(small(), TEXT[:8], RECIPE)


def test_the_number_of_steps_that_fit_is_measured_on_a_copy():
    model = small()
    before = bits_of(model)
    assert steps_within(0.0, model, TEXT, RECIPE) == 1
    assert steps_within(1000.0, model, TEXT, RECIPE) > 1000
    assert bits_of(model) == before


@pytest.mark.slow  # about ten seconds of two cores each
@pytest.mark.parametrize("mixer", ["attention", "gru"])
def test_a_hundred_steps_on_the_manual_bring_the_default_model_below_the_bigram_table(mixer):
    reading, unseen = data.split(data.load_text().tokens)
    model = CausalLM(mixer=mixer, rngs=nnx.Rngs(0))
    for _ in train(model, reading, Recipe(steps=100), report_every=100):
        pass
    assert evaluate(model, unseen, length=128) < data.ngram_bits(reading, unseen, 2)


@pytest.mark.parametrize("wrong", [{"report_every": 0}, {"save_every": 0}, {"seconds": float("nan")}, {"seconds": 0}])
def test_numbers_of_a_run_that_must_be_positive_are(wrong, plain_errors):
    model = CausalLM(width=8, depth=1, heads=1, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="must be positive"):
        next(train(model, np.zeros(99, np.uint8), Recipe(1, batch=2, length=8), **wrong))


@pytest.mark.parametrize("wrong", [{"learning_rate": float("nan")}, {"clip": -1.0}, {"weight_decay": float("inf")}])
def test_a_recipe_of_impossible_numbers_is_refused(wrong, plain_errors):
    with pytest.raises(ValueError, match="must be finite, not negative"):
        Recipe(1, **wrong)


def test_a_recipe_of_numpy_numbers_is_one_of_python_numbers():
    assert Recipe(np.int64(3), learning_rate=np.float32(0.5)) == Recipe(3, learning_rate=0.5)
    assert type(Recipe(np.int64(3)).steps) is int
