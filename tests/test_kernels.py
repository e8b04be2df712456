"""Every kernel against the float64 oracle: every pair of mask, shape, dtype, bias, junk and derivative meets.

`pytest -m full` runs the full product of kernels, masks, shapes and derivatives.
"""

import functools

import jax
import jax.numpy as jnp
import menu
import numpy as np
import oracle
import pytest

import attention_jax as aj
from attention_jax.kernels import KERNELS

kernels = pytest.mark.parametrize("kernel", KERNELS)

TOLERANCE = {"float64": 1e-11, "float32": 2e-5, "bfloat16": 0.04, "float16": 0.006}
SECOND_ORDER_TOLERANCE = {"float64": 1e-6, "float32": 5e-4, "bfloat16": 0.15, "float16": 0.03}
DERIVATIVES = ["gradient", "jvp", "forward over reverse", "reverse over reverse"]
BIASES = ["none", "pairs", "heads", "all with -inf"]
FACTORS = {
    "mask": menu.MASKS,
    "shape": menu.SHAPES,
    "derivative": DERIVATIVES,
    "dtype": TOLERANCE,
    "bias": BIASES,
    "where": ["plain", "offset", "per example"],
    "junk": ["clean", "junk"],
    "scale": ["default", "array"],
    "fields": ["traced", "constant"],
}
PAIRWISE = menu.combinations(**FACTORS)
FULL = menu.combinations(full=True, mask=menu.MASKS, shape=menu.SHAPES, derivative=DERIVATIVES, junk=["clean", "junk"])


# Of the small arrays of these tests "tiled" makes one tile, which is the rarer path of the code of "small tiles".
ROWS = [(kernel, choice) for kernel in KERNELS for choice in PAIRWISE[:: 3 if kernel == "tiled" else 1]]


def label(choice):
    return "-".join(str(value).replace(" ", "_") for value in choice.values())


def make_bias(name, rng, shape):
    if name == "none":
        return {}
    axes = {
        "pairs": (shape.queries, shape.keys),
        "heads": (*(1 for _ in shape.batch), shape.heads, 1, shape.keys) if shape.heads else (1, shape.keys),
        "all with -inf": shape.logits,
    }[name]
    bias = oracle.exact(int(rng.integers(999)), *axes)
    return {"bias": np.where(rng.random(axes) < 0.2, -np.inf, bias) if name == "all with -inf" else bias}


def make_operands(shape, bias, scale, rng):
    """Operands, and tangents for each of them, in float64; all exact in every dtype."""
    shapes = {"q": shape.q, "k": shape.k, "v": shape.v}
    operands = {name: oracle.exact(int(rng.integers(999)), *axes) for name, axes in shapes.items()}
    operands |= make_bias(bias, rng, shape)
    if scale == "array":
        operands["scale"] = np.asarray(0.375)
    tangents = {name: oracle.exact(int(rng.integers(999)), *x.shape) for name, x in operands.items()}
    return operands, tangents


def spoil(operands, cotangent, shape, rng):
    """NaN in a row of q, k and of the cotangent, and inf in one of v; each somewhere else."""
    if shape.keys and shape.queries:
        operands["q"][..., rng.integers(shape.queries), :] = np.nan
        operands["k"][..., rng.integers(shape.keys), :] = np.nan
        operands["v"][..., rng.integers(shape.keys), :] = np.inf
        cotangent[..., rng.integers(shape.queries), :] = np.nan


def gradient_of(call, x, cotangents):
    (out, lse), pullback = jax.vjp(call, x)
    return pullback((cotangents[0].astype(out.dtype), cotangents[1].astype(lse.dtype)))[0]


def derivative_of(kind, call, x, tangents, cotangents):
    """The derivative of a call that gives (out, lse), by name."""
    if kind == "gradient":
        return gradient_of(call, x, cotangents)
    if kind == "jvp":
        out, lse = jax.jvp(call, (x,), (tangents,))[1]
        return {"out": out, "lse": lse}
    gradient = functools.partial(gradient_of, call, cotangents=cotangents)
    if kind == "forward over reverse":
        return jax.jvp(gradient, (x,), (tangents,))[1]
    return jax.vjp(gradient, x)[1](tangents)[0]  # second derivatives are symmetric


def true_derivative_of(kind, problem, tangents, cotangents):
    if kind == "gradient":
        return oracle.vjp(problem, *cotangents)
    if kind == "jvp":
        return dict(zip(("out", "lse"), oracle.jvp(problem, tangents), strict=True))
    return oracle.hvp(problem, *cotangents, tangents)


def assert_close(got, expected, tolerance, name, nothing=None):
    """Equal within the tolerance times the largest entry; not finite exactly where the oracle is not; 0 where told."""
    got = np.asarray(got, np.float64)
    assert got.shape == expected.shape, name
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(np.isfinite(got), finite, err_msg=f"where {name} is finite")
    size = max(1.0, np.abs(expected[finite]).max(initial=0))
    np.testing.assert_allclose(got[finite], expected[finite], 0, tolerance * size, err_msg=name)
    if nothing is not None:
        assert (got[nothing] == 0).all(), f"{name} is not exactly 0 where nothing comes"


def touched_by_junk(problem, dout, kind):
    """Second derivatives to which a row contributes that meets NaN or inf: in itself, its cotangent, or a key it sees.

    Forward over reverse. A second reverse pass starts from the first gradients, so there the rows that share a key with
    such a row are touched too.
    """
    bad = {}
    for row in problem.rows():
        met = problem.q[row.at], dout[row.at], problem.k[row.source][row.keys], problem.v[row.source][row.keys]
        bad[row.at] = not all(np.isfinite(x).all() for x in met)
    dirty = spread(problem, bad)
    if kind == "reverse over reverse":
        dirty = spread(problem, {row.at: dirty["k"][(*row.source, row.keys)].any() for row in problem.rows()})
    if problem.bias is not None:
        dirty["bias"] = oracle.fold(dirty["bias"], np.shape(problem.bias)) > 0
    return dirty


def spread(problem, bad):
    """Where the bad rows contribute to."""
    shapes = {"q": problem.q.shape, "k": problem.k.shape, "v": problem.v.shape, "bias": problem.shape}
    dirty = {name: np.zeros(shape, bool) for name, shape in shapes.items()}
    for row in problem.rows():
        if bad[row.at]:
            dirty["q"][row.at] = dirty["bias"][row.pairs] = True
            dirty["k"][(*row.source, row.keys)] = dirty["v"][(*row.source, row.keys)] = True
    return dirty | {"scale": np.asarray(any(bad.values()))}


def check(kernel, choice, seed):
    rng, shape, dtype = np.random.default_rng(seed), menu.SHAPES[choice["shape"]], choice.get("dtype", "float64")
    operands, tangents = make_operands(shape, choice.get("bias", "none"), choice.get("scale"), rng)
    cotangents = oracle.exact(seed, *shape.out), oracle.exact(seed + 1, *shape.out[:-1])
    if choice["junk"] == "junk":
        spoil(operands, cotangents[0], shape, rng)
    mask, predicate = menu.MASKS[choice["mask"]](rng, shape)
    where = menu.positions(choice.get("where", "plain"), rng, shape)
    visible = oracle.visible(predicate, shape.logits, **where)

    def run(x, tangents, cotangents, fields):
        def call(x):
            given = mask if choice.get("fields") == "constant" else fields
            return aj.attention(**x, mask=given, **where, implementation=kernel, return_lse=True)

        return *call(x), derivative_of(choice["derivative"], call, x, tangents, cotangents)

    with jax.enable_x64(dtype == "float64"):
        narrow = functools.partial(jax.tree.map, lambda x: jnp.asarray(x.astype(jnp.dtype(dtype))))
        out, lse, derivative = menu.quick_jit(run)(narrow(operands), narrow(tangents), narrow(cotangents), mask)
        assert out.dtype == derivative.get("q", out).dtype == dtype
        assert lse.dtype == ("float64" if dtype == "float64" else "float32")
    problem = oracle.Problem(visible=visible, **operands)
    truth = oracle.attention(problem)
    nothing = oracle.untouched(problem)
    assert_close(out, truth.out, TOLERANCE[dtype], "out", nothing["out"])
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(truth.lse), err_msg="which rows are empty")
    assert_close(lse, truth.lse, max(TOLERANCE["float32"] * (dtype != "float64"), TOLERANCE["float64"]), "lse")
    first = choice["derivative"] in ("gradient", "jvp")
    tolerance = (TOLERANCE if first else SECOND_ORDER_TOLERANCE)[dtype]
    expected = true_derivative_of(choice["derivative"], problem, tangents, cotangents)
    dirty = {} if first else touched_by_junk(problem, cotangents[0], choice["derivative"])
    for name, found in derivative.items():
        found, wanted = (
            np.where(dirty.get(name, False), 0, np.asarray(x, np.float64)) for x in (found, expected[name])
        )
        assert_close(found, wanted, tolerance, name, nothing.get(name))


@pytest.mark.parametrize(("kernel", "choice"), ROWS, ids=lambda x: x if isinstance(x, str) else label(x))
def test_a_kernel_equals_the_oracle(kernel, choice):
    check(kernel, choice, PAIRWISE.index(choice))


@pytest.mark.full
@kernels
@pytest.mark.parametrize("choice", FULL, ids=label)
def test_a_kernel_equals_the_oracle_in_the_full_product(kernel, choice):
    check(kernel, choice, FULL.index(choice))


@kernels
def test_a_second_reverse_pass_keeps_hidden_junk_hidden(kernel):
    q, k, v, *tangents = (jnp.asarray(oracle.exact(n, 3, 2), jnp.float32) for n in range(6))
    cotangents = jnp.ones((3, 2)).at[2].set(jnp.nan), jnp.zeros(3)

    def gradient(x):
        call = functools.partial(aj.attention, mask=aj.Window(0, 0), implementation=kernel, return_lse=True)
        return gradient_of(lambda x: call(*x), x, cotangents)

    moved = menu.quick_jit(lambda x, along: jax.vjp(gradient, x)[1](along)[0])((q, k, v), tuple(tangents))
    for x in moved:
        assert np.isfinite(x[:2]).all()


@kernels
def test_an_empty_row_of_junk_leaves_the_gradient_of_scale_alone(kernel):
    q, k, v = (jnp.asarray(oracle.exact(n, 2, 4), jnp.float32) for n in range(3))

    def loss(scale, q):
        return aj.attention(q, k, v, aj.Lengths(q=1), scale=scale, implementation=kernel).sum()

    clean, junk = (jax.grad(loss)(jnp.float32(0.3), q.at[1].set(x)) for x in (0.0, jnp.nan))
    np.testing.assert_array_equal(junk, clean)
