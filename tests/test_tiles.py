"""Tiles: which are computed, how many, and that nothing of size T × S is held while they are."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax.cli.memory import temporaries
from attention_jax.mask_algebra import Mask

RNG = np.random.default_rng(0)
DOCUMENTS = np.sort(RNG.integers(0, 4, 41)).astype(np.int32)
EXACT = {
    "full": aj.Full(),
    "causal": aj.Causal(),
    "window": aj.Window(3, 2),
    "prefix": aj.Prefix(13),
    "lengths": aj.Lengths(kv=17, q=30),
    "sorted segments": aj.Segments(DOCUMENTS),
    "pairs": aj.Dense(RNG.random((41, 41)) < 0.01),
}
JOINED = {
    "causal documents": aj.Causal() & aj.Segments(DOCUMENTS),
    "prefix lm": aj.Causal() | aj.Prefix(9),
    "window of a prefix": aj.Window(6, 0) & aj.Lengths(kv=22),
    "not the past": ~aj.Causal() & aj.Window(9, 9),
}


def shaped(*axes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(axes, dtype)


def tiles_of(mask, length, kernel="tiled", width=64):
    x = shaped(1, length, width)
    return aj.plan(x, x, x, mask, implementation=kernel).tiles


def fewest(mask, length, rows, columns):
    """Tiles that hold a visible pair; the last ones reach back, but what they hold twice counts above."""
    pairs = np.asarray(mask.array(length, length))
    down, across = (range(0, length, n) for n in (rows, columns))
    reach = {
        n: [(min(i, length - n), min(i, length - n) + n) for i in steps]
        for n, steps in ((rows, down), (columns, across))
    }
    return sum(pairs[a:b, c:d].any() for a, b in reach[rows] for c, d in reach[columns])


@pytest.mark.parametrize("name", EXACT)
def test_the_tiles_computed_are_those_that_hold_a_visible_pair(name):
    computed, of = tiles_of(EXACT[name], 41, "small tiles")
    assert of == 11 * 9
    assert computed == fewest(EXACT[name], 41, 4, 5)


@pytest.mark.parametrize("name", JOINED)
def test_joined_masks_compute_hardly_more(name):
    computed = tiles_of(JOINED[name], 41, "small tiles")[0]
    assert computed <= 1.1 * fewest(JOINED[name], 41, 4, 5)


def documents(length, count):
    cuts = np.sort(np.random.default_rng(1).choice(np.arange(1, length), count - 1, replace=False))
    return np.searchsorted(cuts, np.arange(length), side="right").astype(np.int32)


@pytest.mark.parametrize(
    ("mask", "length", "limit"),
    [
        (aj.Causal(), 2048, 1.30),
        (aj.Causal(), 4096, 1.15),
        (aj.Window(255, 0), 8192, 2.1),
        (aj.Segments(documents(4096, 8)), 4096, 1.6),
    ],
    ids=["causal 2048", "causal 4096", "window 256", "8 documents"],
)
def test_few_pairs_are_computed_that_nobody_needs(mask, length, limit):
    plan = aj.plan(*[shaped(1, length, 64)] * 3, mask, implementation="tiled")
    needed = int(np.asarray(mask.array(length, length)).sum())
    assert plan.cost.flops / (4 * 64 + 1) <= limit * needed


SEEN = []


class Counting(Mask):
    """Allows all, and notes each tile that it is asked about while a program runs."""

    def allows(self, q, k):
        jax.debug.callback(lambda row, column: SEEN.append((int(row), int(column))), q.start, k.start)
        return np.True_

    def bounds(self, q, k):
        return np.True_, np.False_


TRACED = {
    "lengths": lambda n: aj.Lengths(kv=n),
    "documents": lambda n: aj.Segments(jnp.minimum(jnp.asarray(DOCUMENTS), n)),
    "prefix lm": lambda n: aj.Causal() | aj.Prefix(n),
}


@pytest.mark.parametrize("name", TRACED)
def test_tiles_are_skipped_by_values_that_are_traced_too(name):
    x = jnp.ones((1, 41, 4))

    @jax.jit
    def call(x, n):
        return aj.attention(x, x, x, TRACED[name](n) & Counting(), implementation="small tiles")

    SEEN.clear()
    call(x, jnp.int32(2)).block_until_ready()
    jax.effects_barrier()
    assert len(SEEN) == len(set(SEEN)) == fewest(TRACED[name](np.int32(2)), 41, 4, 5)


CALLS = {
    "forward": lambda f, x: jax.jit(f).lower(x, x, x),
    "gradient": lambda f, x: jax.jit(lambda q, k, v, g: jax.vjp(f, q, k, v)[1](g)).lower(x, x, x, x),
    "jvp": lambda f, x: jax.jit(lambda q, k, v, g: jax.jvp(f, (q, k, v), (g, g, g))).lower(x, x, x, x),
    "reverse over reverse": lambda f, x: jax.jit(lambda *x: jax.vjp(pulled(f, x[3]), *x[:3])[1](x[4:])).lower(*[x] * 7),
}
MASKS = {"causal": aj.Causal(), "lengths": aj.Lengths(kv=1000), "full": None}


def pulled(f, g):
    return lambda q, k, v: jax.vjp(f, q, k, v)[1](g)


def by_tiles(mask):
    return functools.partial(aj.attention, mask=mask, implementation="tiled")


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("mask", MASKS)
def test_the_largest_value_of_a_program_grows_as_the_length(call, mask):
    def largest(length):
        text = CALLS[call](by_tiles(MASKS[mask]), shaped(1, 2, length, 16)).as_text()
        shapes = re.findall(r"tensor<((?:\d+x)+)[a-z]", text)
        return max(int(np.prod([int(n) for n in shape.split("x")[:-1]])) for shape in shapes)

    sizes = [largest(length) for length in (4096, 8192, 16384)]
    assert sizes[1] <= 2 * sizes[0]
    assert sizes[2] <= 2 * sizes[1]
    assert sizes[2] <= 2**20


@pytest.mark.parametrize(
    ("call", "length", "limit"),
    [("forward", 32768, 64), ("gradient", 32768, 160), ("jvp", 16384, 64), ("reverse over reverse", 16384, 256)],
)
def test_memory_is_linear_in_the_length(call, length, limit):
    needed = [temporaries(CALLS[call](by_tiles(aj.Causal()), shaped(1, 4, n, 64))) for n in (length // 2, length)]
    assert needed[1] <= limit * 2**20
    assert needed[1] <= 2 * needed[0]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("kernel", ["dense", "tiled"])
@pytest.mark.parametrize("mask", [None, aj.Causal()], ids=str)
def test_the_predicted_peak_is_within_a_factor_of_two(kernel, mask, dtype):
    x = shaped(1, 8, 1024, 64, dtype=dtype)
    cost = aj.plan(x, x, x, mask, implementation=kernel).cost
    call = functools.partial(aj.attention, mask=mask, implementation=kernel)
    for name, predicted in (("forward", cost.peak_bytes), ("gradient", cost.gradient_peak_bytes)):
        assert 0.5 <= predicted / temporaries(CALLS[name](call, x)) <= 2
