"""What bad input gets: the error, the rule that it names, the shapes, the remedy; eagerly and under `jit` alike."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj

pytestmark = pytest.mark.usefixtures("plain_errors")


def ones(*shape, dtype=jnp.float32):
    return jnp.ones(shape, dtype)


Q, KV = ones(2, 4, 3, 8), ones(2, 2, 5, 8)
SQUARE = ones(2, 4, 3, 8)

# name: arguments, error, and what the text says
SHAPES = {
    "fewer than two axes": ((ones(3), ones(3), ones(3)), "same number of axes, two or more"),
    "unequal ranks": ((Q, ones(2, 5, 8), ones(2, 5, 8)), "same number of axes"),
    "unequal widths": ((Q, ones(2, 2, 5, 7), KV), "q and k must have the same width D"),
    "unequal numbers of keys": ((Q, KV, ones(2, 2, 6, 8)), "same number of keys S"),
    "unequal key and value heads": ((Q, KV, ones(2, 4, 5, 8)), "same number of heads K"),
    "heads that do not divide": ((ones(2, 12, 3, 8), ones(2, 8, 5, 8), ones(2, 8, 5, 8)), "H must be a multiple"),
    "more key than query heads": ((ones(2, 2, 3, 8), ones(2, 4, 5, 8), ones(2, 4, 5, 8)), "H must be a multiple"),
    "no heads": ((ones(2, 0, 3, 8), ones(2, 0, 5, 8), ones(2, 0, 5, 8)), "at least one head"),
    "unequal batches": ((Q, ones(3, 2, 5, 8), ones(3, 2, 5, 8)), "batch axes of k and v"),
    "a batch shared by k alone": ((Q, ones(1, 2, 5, 8), KV), "batch axes of k and v"),
    "queries of batch one": ((ones(1, 4, 3, 8), KV, KV), "batch axes of k and v"),
}


def text_of(error, call, *args, **options):
    """The text of the error that the call raises, eagerly and under jit."""
    texts = []
    for run in (call, lambda *a: jax.jit(lambda *traced: call(*traced, **options))(*a)):
        with pytest.raises(error) as caught:
            run(*args, **options) if run is call else run(*args)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]
    return texts[0]


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_that_do_not_fit_are_refused_by_rule_and_shapes(name):
    (q, k, v), rule = SHAPES[name]
    lines = text_of(ValueError, aj.attention, q, k, v).splitlines()
    assert lines[0].startswith("attention: ")
    assert rule in lines[0]
    shown = [f"  q (..., H, T, D) = {q.shape}", f"  k (..., K, S, D) = {k.shape}", f"  v (..., K, S, V) = {v.shape}"]
    assert lines[1:4] == shown


def test_the_other_layout_is_recognised():
    q, kv = ones(2, 16, 6, 8), ones(2, 20, 3, 8)  # (B, T, H, D)
    assert "This looks like (..., T, H, D)" in text_of(ValueError, aj.attention, q, kv, kv)
    assert "swapaxes" in text_of(ValueError, aj.attention, q, kv, kv)


def test_a_batch_read_as_heads_gets_the_hint():
    assert "x[..., None, :, :]" in text_of(ValueError, aj.attention, ones(4, 3, 8), ones(3, 5, 8), ones(3, 5, 8))


# ---------------------------------------------------------------- kinds


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("kind", ["int32", "bool", "complex64", "uint8", "list", "None", "number"])
def test_operands_that_are_not_float_arrays_are_refused_by_name(kind, position):
    bad = {"list": [[1.0, 2.0]], "None": None, "number": 1.0}.get(kind)
    if kind not in ("list", "None", "number"):
        bad = jnp.ones((2, 3, 4), kind)
    x = [ones(2, 3, 4) for _ in range(3)]
    x[position] = bad
    with pytest.raises(TypeError, match=rf"attention: {'qkv'[position]} must") as caught:
        aj.attention(*x)
    if hasattr(bad, "dtype"):
        assert kind in str(caught.value)
        assert "astype" in str(caught.value)
    elif kind == "list":
        assert "jnp.asarray" in str(caught.value)


def test_bytes_in_the_other_order_are_refused():
    x = np.ones((2, 3, 4), np.dtype(np.float32).newbyteorder())
    with pytest.raises(TypeError, match="q must hold floats"):
        aj.attention(x, x, x)


@pytest.mark.parametrize("option", ["bias", "scale"])
@pytest.mark.parametrize(
    "bad", [jnp.ones((3, 3), int), [[0.0]], "text", jnp.ones((3, 3), bool)], ids=lambda x: str(type(x))
)
def test_a_bias_or_a_scale_that_is_no_float_is_refused_by_name(option, bad):
    with pytest.raises(TypeError, match=rf"attention: {option} must"):
        aj.attention(SQUARE, SQUARE, SQUARE, **{option: bad})


@pytest.mark.parametrize("name", ["score", "sinks", "is_causal", "key", "precision"])
@pytest.mark.parametrize("ask", [aj.attention, aj.plan])
def test_an_unknown_keyword_is_a_type_error(ask, name):
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
        ask(SQUARE, SQUARE, SQUARE, **{name: None})


def test_options_are_keyword_only():
    with pytest.raises(TypeError, match="positional"):
        aj.attention(SQUARE, SQUARE, SQUARE, None, 0.5)


# ---------------------------------------------------------------- masks


@pytest.mark.parametrize("dtype", ["int32", "float32", "uint8"])
def test_a_mask_of_numbers_is_refused_with_both_remedies(dtype):
    text = text_of(TypeError, aj.attention, Q, KV, KV, jnp.ones((3, 5), dtype))
    assert "must be boolean" in text
    assert f"{dtype}(3, 5)" in text
    assert "mask != 0" in text
    assert "bias=" in text


@pytest.mark.parametrize("mask", [[[True]], True, "causal", 3, (1, 2)], ids=str)
def test_a_mask_that_is_no_array_is_refused_with_the_remedy(mask):
    with pytest.raises(TypeError, match=r"(?s)boolean array or a mask object.*np.asarray"):
        aj.attention(Q, KV, KV, mask)


@pytest.mark.parametrize(
    "axes", [(5,), (2, 5), (4, 5), (2, 3, 5), (4, 3, 5), (2, 4, 3, 4), (3, 4, 3, 5), (1, 2, 4, 3, 5)]
)
@pytest.mark.parametrize("option", ["mask", "bias"])
def test_a_mask_or_bias_of_another_shape_is_refused_with_its_readings(option, axes):
    given = jnp.ones(axes, bool if option == "mask" else jnp.float32)
    text = text_of(ValueError, functools.partial(aj.attention, **{option: given}), Q, KV, KV)
    assert "two axes, (T|1, S|1), or all axes of the logits" in text
    assert str(axes) in text
    assert "(2, 4, 3, 5)" in text
    assert "array[:, None, None, :]" in text


@pytest.mark.parametrize("axes", [(1,), (4, 1, 1), (2, 4, 3, 5), (2, 2, 1, 1)])
def test_a_scale_of_another_shape_is_refused(axes):
    text = text_of(ValueError, functools.partial(aj.attention, scale=jnp.ones(axes)), Q, KV, KV)
    assert "scale must be a number, or have all axes" in text
    assert str(axes) in text


@pytest.mark.parametrize(
    "mask", [aj.Causal(), aj.Window(2, 0), aj.Where(lambda i, j: i == j), ~aj.Causal() | aj.Prefix(2)], ids=repr
)
def test_a_mask_that_compares_positions_needs_them_where_lengths_differ(mask):
    text = text_of(ValueError, functools.partial(aj.attention, mask=mask), Q, KV, KV)
    for part in (
        "queries T = 3",
        "keys S    = 5",
        "q_positions=S - T",
        "q_positions=0",
        "last query sees the last key",
    ):
        assert part in text
    aj.attention(Q, KV, KV, mask, q_positions=2)  # either remedy works
    aj.attention(Q, KV, KV, mask, q_positions=0)


@pytest.mark.parametrize("kind", [int, np.int32, np.array])
def test_lengths_beyond_the_array_are_refused_and_traced_ones_mean_the_array(kind):
    for lengths, says in ((aj.Lengths(kv=kind(6)), "keys S"), (aj.Lengths(q=kind(4)), "queries T")):
        text = text_of(ValueError, functools.partial(aj.attention, mask=lengths), Q, KV, KV)
        assert "beyond the array" in text
        assert says in text
    whole = aj.attention(Q, KV, KV)
    np.testing.assert_array_equal(aj.attention(Q, KV, KV, aj.Lengths(kv=jnp.array([6, 99]))), whole)


def test_fields_with_other_batch_axes_are_refused():
    for mask in (
        aj.Lengths(kv=np.array([1, 2, 3])),
        aj.Prefix(np.array([[1, 2]])),
        aj.Segments(np.zeros((3, 3), int), np.zeros(5, int)),
    ):
        text = text_of(ValueError, functools.partial(aj.attention, mask=mask), Q, KV, KV)
        assert "batch axes" in text
        assert "(2,)" in text


def test_ids_of_queries_alone_need_as_many_keys():
    text = text_of(ValueError, functools.partial(aj.attention, mask=aj.Segments(np.zeros(3, int))), Q, KV, KV)
    assert "Segments(q, kv)" in text


# ---------------------------------------------------------------- positions


@pytest.mark.parametrize(
    ("where", "error", "says"),
    [
        ({"kv_positions": 3}, ValueError, "Give q_positions too"),
        ({"q_positions": 1.5}, TypeError, "an int or an integer array"),
        ({"q_positions": jnp.ones(3)}, TypeError, "float32(3,)"),
        ({"q_positions": [0, 1, 2]}, TypeError, "an int or an integer array"),
        ({"q_positions": True}, TypeError, "an int or an integer array"),
        ({"q_positions": jnp.arange(4)}, ValueError, "one entry per row"),
        ({"q_positions": jnp.zeros((4, 3), int)}, ValueError, "batch axes in front of the rows"),
        ({"q_positions": jnp.zeros((2, 4, 3), int)}, ValueError, "batch axes in front of the rows"),
        ({"q_positions": 0, "kv_positions": jnp.arange(3)}, ValueError, "one entry per row"),
        ({"q_positions": 2**30 + 1}, ValueError, "2^30"),
        ({"q_positions": np.array(-(2**30) - 1)}, ValueError, "2^30"),
    ],
    ids=str,
)
def test_positions_that_do_not_fit_are_refused(where, error, says):
    assert says in text_of(error, functools.partial(aj.attention, mask=aj.Causal(), **where), Q, KV, KV)


# ---------------------------------------------------------------- dropout, implementation


@pytest.mark.parametrize(
    ("dropout", "error", "says"),
    [
        (0.5, TypeError, "pair (rate, key)"),
        ((0.5,), TypeError, "pair (rate, key)"),
        ((-0.1, jax.random.key(0)), ValueError, "[0, 1]"),
        ((1.5, jax.random.key(0)), ValueError, "[0, 1]"),
        ((float("nan"), jax.random.key(0)), ValueError, "[0, 1]"),
        ((0.5, None), TypeError, "needs one random key"),
        ((0.5, 3), TypeError, "jax.random.key(seed)"),
        ((0.5, np.zeros(2)), TypeError, "needs one random key"),
    ],
    ids=str,
)
def test_dropout_that_cannot_be_is_refused(dropout, error, says):
    assert says in text_of(error, functools.partial(aj.attention, dropout=dropout), Q, KV, KV)


def test_several_random_keys_are_refused():
    with pytest.raises(TypeError, match="one random key"):
        aj.attention(Q, KV, KV, dropout=(0.5, jax.random.split(jax.random.key(0), 2)))


@pytest.mark.parametrize("implementation", ["flash", ("dense", "flash"), ()])
def test_an_unknown_implementation_is_refused_with_the_known_ones(implementation):
    text = text_of(ValueError, functools.partial(aj.attention, implementation=implementation), Q, KV, KV)
    assert re.search("known.*'auto'.*'dense'", text)


def test_an_error_comes_before_anything_is_traced_deep():
    """The frames of the library below the door are few."""
    with pytest.raises(ValueError, match="attention:") as caught:
        aj.attention(Q, KV, ones(2, 4, 5, 8))
    inner = [entry for entry in caught.traceback if "attention_jax/kernels" in str(entry.path)]
    assert not inner


@pytest.mark.parametrize("bad", [True, jnp.array(True)], ids=str)
def test_a_boolean_scale_is_refused(bad):
    with pytest.raises(TypeError, match="scale must"):
        aj.attention(Q, KV, KV, scale=bad)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), np.float32("nan")], ids=str)
def test_a_scale_that_is_not_finite_is_refused(bad):
    with pytest.raises(ValueError, match="scale must be finite"):
        aj.attention(Q, KV, KV, scale=bad)
