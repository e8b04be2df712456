"""Masks as values: pytrees that travel through JAX, expressions that read back, pictures, and what is refused."""

import dataclasses
import operator
import re

import jax
import jax.numpy as jnp
import menu
import numpy as np
import oracle
import pytest

from attention_jax import masks
from attention_jax.masks import Causal, Dense, Full, Lengths, Mask, Not, Or, Prefix, Segments, Where, Window

# ---------------------------------------------------------------- masks as values


@pytest.mark.parametrize("name", sorted(set(menu.MASKS) - {"none", "boolean array"}))
def test_a_mask_is_a_pytree_whose_arrays_may_be_traced(name):
    mask, predicate = menu.built(name, 6, menu.BATCHED)
    leaves, tree = jax.tree.flatten(mask)
    again = jax.tree.unflatten(tree, leaves)
    assert again == mask
    assert type(again) is type(mask)
    assert hash(again) == hash(mask)
    get = jax.jit(lambda m: m.array(5, 7, batch=(2,), heads=2, q_positions=2))
    np.testing.assert_array_equal(get(mask), oracle.visible(predicate, menu.BATCHED.logits, q_positions=2))


def test_a_mask_survives_placeholders_in_its_place():
    mask = Causal() & Lengths(kv=np.array([1, 2])) | Dense(np.ones((2, 2), bool))
    placeholders = jax.tree.map(lambda _: object(), mask)
    assert isinstance(placeholders, Or)
    assert len(jax.tree.leaves(placeholders)) == 2


def test_a_mask_batched_by_vmap_is_each_masks_own():
    kv, ids = jnp.array([1, 3, 0]), jnp.array([[0, 0, 1, 1], [0, 1, 1, 1], [2, 2, 2, 2]])
    stacked = Lengths(kv=kv) & Segments(ids) | Prefix(jnp.array([0, 1, 2]))
    got = jax.vmap(lambda mask: mask.array(4))(stacked)
    for example in range(3):
        single = Lengths(kv=kv[example]) & Segments(ids[example]) | Prefix(jnp.array([0, 1, 2])[example])
        np.testing.assert_array_equal(got[example], single.array(4))


def test_a_mask_may_be_built_and_scanned_over_inside_jit():
    @jax.jit
    def count(lengths):
        def add(total, kv):
            return total + (Lengths(kv=kv) & Causal()).array(4).sum(), None

        return jax.lax.scan(add, jnp.zeros((), jnp.int32), lengths)[0]

    assert count(jnp.array([0, 1, 4])) == 0 + 4 + 10


def test_two_masks_are_equal_where_their_expressions_are():
    assert Causal() & Prefix(2) == Causal() & Prefix(2)
    assert Causal() & Prefix(2) != Causal() & Prefix(3)
    assert Causal() & Prefix(2) != Causal() | Prefix(2)
    assert Dense(np.eye(2, dtype=bool)) == Dense(np.eye(2, dtype=bool))
    assert Dense(np.eye(2, dtype=bool)) != Dense(np.ones((2, 2), bool))
    assert Full() != "Full()"


@pytest.mark.parametrize(
    "mask",
    [
        Full(),
        Causal() & Window(2, 0),
        Causal() | Prefix(2) & ~Window(None, 1),
        ~(Causal() | Prefix(2)) & Full(),
        (Causal() | Prefix(2)) & (Full() | ~Causal()),
        ~~Causal(),
        Lengths(kv=np.array([1, 2]), q=3) & Segments(np.array([0, 1]), pad=-1),
        Dense(np.array([[True, False], [False, True]])),
        Where(menu.reach),
        Where(menu.reach_modulo, 3),
    ],
    ids=repr,
)
def test_the_repr_of_a_mask_is_an_expression_that_gives_it_back(mask):
    names = {name: getattr(masks, name) for name in dir(masks)} | {"array": np.array}
    again = eval(repr(mask), names, {"reach": menu.reach, "reach_modulo": menu.reach_modulo})
    assert repr(again) == repr(mask)
    assert again == mask
    regrouped = Causal() & (Prefix(1) & Prefix(2))  # `&` needs no parentheses to mean the same
    np.testing.assert_array_equal(eval(repr(regrouped), names).array(4), regrouped.array(4))


def test_a_mask_has_no_truth_value():
    with pytest.raises(TypeError, match="&"):
        bool(Causal())
    with pytest.raises(TypeError, match="&"):
        Causal() and Prefix(2)
    with pytest.raises(TypeError, match="&"):
        not Causal()


def test_no_mask_stores_a_shape():
    for mask in (Causal(), Window(1, None), Causal() & ~Prefix(3), Full() | Causal()):
        assert not jax.tree.leaves(mask)
        for size in (0, 1, 5, 9):
            assert mask.array(size, size + 2, q_positions=1).shape == (size, size + 2)
    lengths = Lengths(kv=np.array([1, 2]))
    assert lengths.array(3, 4, batch=(2,)).shape == (2, 1, 3, 4)
    assert lengths.array(5, 6, batch=(2,), heads=3).shape == (2, 3, 5, 6)


def test_masks_are_immutable_and_final():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Prefix(2).n = 3
    for leaf in (Full, Causal, Window, Prefix, Lengths, Segments, Dense, Where, Not, Or):
        assert issubclass(leaf, Mask)
        assert getattr(leaf, "__final__", False), leaf


@pytest.mark.parametrize("join", [operator.and_, operator.or_])
def test_an_array_may_stand_on_either_side(join):
    pairs = np.tri(3, 4, 1, dtype=bool)
    expected = join(pairs, np.asarray(Causal().array(3, 4, q_positions=0)))
    for array in (pairs, jnp.asarray(pairs)):
        for mask in (join(array, Causal()), join(Causal(), array)):
            assert isinstance(mask, Mask)
            np.testing.assert_array_equal(mask.array(3, 4, q_positions=0), expected)


def test_a_traced_length_beyond_the_array_means_the_array():
    assert jax.jit(lambda kv: Lengths(kv=kv).array(2, 3))(jnp.int32(7)).all()


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: Dense(np.ones((2, 2), np.int32)), TypeError, "!= 0"),
        (lambda: Dense(jnp.ones((2, 2))), TypeError, "bias"),
        (lambda: Causal() & np.ones((2, 2)), TypeError, "bias"),
        (lambda: Causal() & [[True]], TypeError, "asarray"),
        (lambda: Causal() & True, TypeError, "boolean array"),
        (lambda: Lengths(kv=[1, 2]), TypeError, "asarray"),
        (lambda: Lengths(kv=-1), ValueError, "between 0 and"),
        (lambda: Lengths(kv=np.array([1.5])), TypeError, "integer"),
        (lambda: Lengths(kv=True), TypeError, "int"),
        (lambda: Segments(3), TypeError, "per row"),
        (lambda: Segments(None), TypeError, "integer"),
        (lambda: Prefix(None), TypeError, "int"),
        (lambda: Prefix(1.0), TypeError, "int"),
        (lambda: Window(1.5, 0), TypeError, "int"),
        (lambda: Where(3), TypeError, "function"),
    ],
)
@pytest.mark.usefixtures("plain_errors")
def test_a_mask_of_the_wrong_kind_is_refused_where_it_is_made(make, error, says):
    with pytest.raises(error, match=re.escape(says)):
        make()


@pytest.mark.parametrize(
    ("mask", "says"),
    [
        (Causal(), "q_positions=S - T"),
        (Window(1, 1) & Full(), "q_positions=0"),
        (~Where(menu.reach), "q_positions"),
        (Lengths(kv=5), "beyond"),
        (Lengths(q=np.array(4)), "beyond"),
        (Segments(np.arange(3)), "Segments(q, kv)"),
        (Segments(np.arange(3), np.arange(3)), "one entry per row"),
        (Segments(np.zeros((2, 3), int), np.arange(4)), "batch"),
        (Dense(np.ones((4, 3), bool)), "(T|1, S|1)"),
        (Dense(np.ones((1, 3, 4), bool)), "(T|1, S|1)"),
        (Lengths(kv=np.array([1, 2])), "batch"),
        (Where(lambda q_at, k_at: q_at + k_at), "q_positions"),
    ],
    ids=str,
)
def test_a_mask_that_does_not_fit_the_plane_is_refused(mask, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        mask.array(3, 4)


def test_a_rule_must_give_booleans_of_the_tile():
    for fn in (lambda q_at, k_at: q_at + k_at, lambda q_at, k_at: jnp.ones((5, 5), bool)):
        with pytest.raises(ValueError, match="booleans"):
            Where(fn).array(3)


# ---------------------------------------------------------------- pictures


def test_a_mask_draws_itself_with_queries_downwards():
    rows = str((Causal() & Window(1, None)).draw(3)).splitlines()[-3:]
    assert ["".join(re.findall("[█·]", row)) for row in rows] == ["█··", "██·", "·██"]
    wide = str(Prefix(2).draw(2, 5)).splitlines()[-2:]
    assert ["".join(re.findall("[█·]", row)) for row in wide] == ["██···", "██···"]


def test_a_mask_draws_itself_in_a_notebook():
    html = (Causal() & Prefix(3))._repr_html_()
    assert "Causal() &amp; Prefix(n=3)" in html or "Causal() & Prefix(n=3)" in html
    assert html.lstrip().startswith("<")
    odd = Segments(np.arange(5))._repr_html_()  # an array of another length than the picture's default
    assert "Segments" in odd


def test_the_picture_of_a_large_mask_stays_small():
    text = str(Causal().draw(4096))
    assert max(map(len, text.splitlines())) <= 200
    assert len(Causal().draw(4096)._repr_html_()) < 200_000


@pytest.mark.parametrize("reach", [2**31 - 1, 2**30, -(2**30), np.iinfo(np.int32).max], ids=str)
def test_a_window_too_wide_for_its_arithmetic_is_refused(reach, plain_errors):
    for fields in ((None, reach), (reach, None)):
        with pytest.raises(ValueError, match="None: no limit"):
            Window(*fields)


def test_a_window_whose_reach_cannot_be_read_does_not_wrap():
    widest = jnp.asarray(np.iinfo(np.int32).max)
    assert jax.jit(lambda reach: Window(None, reach).array(4, 4))(widest).all()
    assert jax.jit(lambda reach: Window(reach, None).array(4, 4, q_positions=-3))(widest).all()


def test_a_pad_per_example_hides_in_its_own_example():
    ids = np.array([[1, 1, 0, 0], [1, 1, 9, 9]])
    for pad in (np.array([0, 9]), jnp.array([0, 9])):
        array = np.asarray(Segments(ids, pad=pad).array(4, batch=(2,)))
        np.testing.assert_array_equal(array[:, 0].any(-1), [[True, True, False, False]] * 2)


def test_a_pad_that_is_no_number_per_example_is_refused(plain_errors):
    with pytest.raises(ValueError, match="batch axes"):
        Segments(np.array([1, 1, 0, 0]), pad=np.array([1, 1, 0, 0])).array(4)
