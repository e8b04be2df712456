"""Laws of masks: `bounds` never lies, the algebra is that of booleans, and masks travel through JAX as values."""

import functools

import jax
import jax.numpy as jnp
import menu
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_jax import masks
from attention_jax.masks import Window
from attention_jax.sides import Plane

TIGHT_WHERE_POSITIONS_COUNT_UP = {"window", "wide window", "open window"}
EXACT_LEAVES = sorted(set(menu.LEAVES) - {"rule", "rule with array"})


def as_array(mask, shape, **positions):
    heads = shape.heads if shape.heads or shape.batch else None
    return np.asarray(masks.as_mask(mask).array(shape.queries, shape.keys, batch=shape.batch, heads=heads, **positions))


def tiles(shape, rows, columns):
    """Index, in the grid and in the logits, of every tile; the last ones reach back."""
    for i, down in enumerate(starts(shape.queries, rows)):
        for j, right in enumerate(starts(shape.keys, columns)):
            yield (..., i, j), (..., slice(down, down + rows), slice(right, right + columns))


def starts(size, tile):
    return [max(0, min(start, size - tile)) for start in range(0, size, tile)]


def grid_bounds(mask, shape, rows, columns, positions):
    """(may_any, must_all) of every tile, with the axes of the logits."""
    plane = Plane.of(shape.logits, positions.get("q_positions"), positions.get("kv_positions"))
    grid = (*shape.lead, -(-shape.queries // rows), -(-shape.keys // columns))
    return tuple(np.broadcast_to(np.asarray(bound), grid) for bound in mask.bounds(*plane.grid(rows, columns)))


@st.composite
def shapes(draw):
    batch = draw(st.sampled_from([(), (1,), (2,), (2, 2)]))
    heads = draw(st.sampled_from([1, 2])) if batch else draw(st.sampled_from([None, 2]))
    return menu.Shape(batch, heads, 1, draw(st.integers(0, 6)), draw(st.integers(0, 6)))


@st.composite
def expressions(draw, shape, rng, names):
    """A mask of any depth up to three, and its predicate."""

    def grow(depth):
        kind = draw(st.sampled_from(["leaf", "and", "or", "not"] if depth else ["leaf"]))
        if kind == "leaf":
            return menu.LEAVES[draw(st.sampled_from(names))](rng, shape)
        a, a_rule = grow(depth - 1)
        if kind == "not":
            return ~a, oracle.neither(a_rule)
        b, b_rule = grow(depth - 1)
        return (a & b, oracle.both(a_rule, b_rule)) if kind == "and" else (a | b, oracle.either(a_rule, b_rule))

    return grow(2)


@st.composite
def placed_expressions(draw):
    shape, rng = draw(shapes()), np.random.default_rng(draw(st.integers(0, 999)))
    mask, predicate = draw(expressions(shape, rng, sorted(menu.LEAVES)))
    where = draw(st.sampled_from(["plain", "offset", "per example"]))
    return shape, mask, predicate, menu.positions(where, rng, shape)


# ---------------------------------------------------------------- what a mask allows


@pytest.mark.parametrize("shape", [menu.PLAIN, menu.BATCHED], ids=["plain", "batched"])
@pytest.mark.parametrize("where", ["plain", "offset", "per example"])
@pytest.mark.parametrize("name", menu.MASKS)
def test_a_mask_allows_what_its_rule_says(name, where, shape):
    positions = menu.positions(where, np.random.default_rng(5), shape)
    mask, predicate = menu.built(name, 3, shape)
    np.testing.assert_array_equal(
        as_array(mask, shape, **positions), oracle.visible(predicate, shape.logits, **positions)
    )


@settings(max_examples=25, deadline=None, derandomize=True)
@given(placed_expressions())
def test_and_or_and_not_are_the_boolean_operators(placed):
    shape, mask, predicate, positions = placed
    expected = oracle.visible(predicate, shape.logits, **positions)
    np.testing.assert_array_equal(as_array(mask, shape, **positions), expected)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(placed_expressions(), st.integers(0, 99))
def test_de_morgans_laws_hold(placed, seed):
    shape, a, _, positions = placed
    b, _ = menu.built("pairs", seed, shape)
    get = functools.partial(as_array, shape=shape, **positions)
    np.testing.assert_array_equal(get(~(a & b)), get(~a | ~b))
    np.testing.assert_array_equal(get(~(a | b)), get(~a & ~b))
    np.testing.assert_array_equal(get(~~a), get(a))


# ---------------------------------------------------------------- bounds


@settings(max_examples=100, deadline=None, derandomize=True)
@given(placed_expressions(), st.integers(1, 4), st.integers(1, 4))
def test_bounds_never_lie(placed, rows, columns):
    shape, mask, predicate, positions = placed
    allowed = oracle.visible(predicate, shape.logits, **positions)
    may_any, must_all = grid_bounds(mask, shape, rows, columns, positions)
    for tile, pairs in tiles(shape, rows, columns):
        there = allowed[pairs]
        assert (may_any[tile] | ~there.any((-2, -1))).all(), (mask, tile)
        assert (~must_all[tile] | there.all((-2, -1))).all(), (mask, tile)


@pytest.mark.parametrize("name", EXACT_LEAVES)
def test_bounds_of_a_leaf_are_as_tight_as_looking_at_every_pair(name):
    for seed, where in enumerate(["plain", "offset", "per example"] * 3):
        if where == "per example" and name in TIGHT_WHERE_POSITIONS_COUNT_UP:
            continue  # a gap between positions may hold the whole window
        shape = menu.Shape((2,), 2, 1, 5 + seed % 2, 7 - seed % 3)
        positions = menu.positions(where, np.random.default_rng(seed), shape)
        mask, predicate = menu.built(name, seed, shape)
        allowed = oracle.visible(predicate, shape.logits, **positions)
        for rows, columns in [(1, 1), (2, 3), (3, 2), (4, 4), (8, 8)]:
            may_any, must_all = grid_bounds(mask, shape, rows, columns, positions)
            for tile, pairs in tiles(shape, rows, columns):
                there = allowed[pairs]
                np.testing.assert_array_equal(may_any[tile], there.any((-2, -1)), err_msg=f"{mask} {tile} any")
                np.testing.assert_array_equal(must_all[tile], there.all((-2, -1)), err_msg=f"{mask} {tile} all")


@pytest.mark.parametrize("left", [None, -3, -1, 0, 2])
@pytest.mark.parametrize("right", [None, -2, 0, 1])
def test_bounds_of_every_window_are_tight_even_of_an_empty_one(left, right):
    allowed = oracle.visible(oracle.window(left, right), menu.PLAIN.logits)
    for size in (1, 2, 3, 6):
        may_any, must_all = grid_bounds(Window(left, right), menu.PLAIN, size, size, {})
        for tile, pairs in tiles(menu.PLAIN, size, size):
            assert may_any[tile] == allowed[pairs].any(), (size, tile)
            assert must_all[tile] == allowed[pairs].all(), (size, tile)


@pytest.mark.parametrize("name", sorted(menu.MASKS))
def test_a_tile_at_a_traced_place_is_cut_from_the_whole(name):
    mask, predicate = menu.built(name, 4, menu.BATCHED)
    positions = menu.positions("per example", np.random.default_rng(4), menu.BATCHED)
    plane = Plane.of(menu.BATCHED.logits, **positions)

    @jax.jit
    def tile(mask, row, column):
        q, k = plane.tile(row, 2, column, 3)
        mask = masks.as_mask(mask)
        may_any, must_all = mask.bounds(q, k)
        return tuple(
            jnp.broadcast_to(x, (2, 2, *n))
            for x, n in ((mask.allows(q, k), (2, 3)), (may_any, (1, 1)), (must_all, (1, 1)))
        )

    expected = oracle.visible(predicate, menu.BATCHED.logits, **positions)
    for row, column in [(0, 0), (1, 4), (3, 2)]:
        pairs = expected[..., row : row + 2, column : column + 3]
        allowed, may_any, must_all = map(np.asarray, tile(mask, row, column))
        np.testing.assert_array_equal(allowed, pairs)
        assert (may_any[..., 0, 0] | ~pairs.any((-2, -1))).all()
        assert (~must_all[..., 0, 0] | pairs.all((-2, -1))).all()
