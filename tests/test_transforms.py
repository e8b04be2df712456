"""`attention` inside every transformation of JAX: derivatives of every order, vmap, control flow."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax import lax
from menu import quick_jit

import attention_jax as aj
from attention_jax.kernels import KERNELS

kernels = pytest.mark.parametrize("kernel", KERNELS)
weighing_kernels = pytest.mark.parametrize("kernel", ["dense"])

SHAPES = {"q": (4, 3, 2), "k": (2, 5, 2), "v": (2, 5, 3), "bias": (1, 3, 5)}
VISIBLE = np.array([[1, 1, 0, 1, 0], [0, 1, 1, 0, 0], [1, 1, 1, 1, 1]], bool)


def point(seed, lead=(), shapes=SHAPES):
    return {n: jnp.asarray(oracle.exact(seed + i, *lead, *axes)) for i, (n, axes) in enumerate(shapes.items())}


def by_kernel(kernel, **options):
    """x -> (out, lse), by a kernel."""
    call = functools.partial(aj.attention, implementation=kernel, return_lse=True, **options)
    return lambda x: call(**x, mask=VISIBLE)


def by_hand(x):
    """The same, in six lines that JAX differentiates by itself."""
    k, v = (jnp.repeat(x[n], 2, 0) for n in "kv")
    logits = jnp.einsum("htd,hsd->hts", x["q"], k) / np.sqrt(2.0) + x["bias"]
    logits = jnp.where(VISIBLE, logits, -1e30)
    lse = jax.nn.logsumexp(logits, axis=-1)
    return jnp.einsum("hts,hsd->htd", jnp.exp(logits - lse[..., None]), v), lse


def scalar(fn):
    """A number that depends on every output, not linearly."""

    def loss(x):
        out, lse = fn(x)
        return jnp.sin(out).sum() + (lse * jnp.cos(lse)).sum()

    return loss


def pushed(fn, x):
    return jax.jvp(fn, (x,), (point(31),))[1]


def pulled(fn, x):
    y, pullback = jax.vjp(fn, x)
    return pullback(jax.tree.map(jnp.cos, y))[0]


def linear(fn, x):
    y, along = jax.linearize(fn, x)
    (back,) = jax.linear_transpose(along, x)(jax.tree.map(jnp.ones_like, y))
    return y, along(point(31)), back


DERIVATIVES = {
    "gradient": lambda fn, x: jax.value_and_grad(scalar(fn))(x),
    "vjp": pulled,
    "jvp": pushed,
    "jacfwd": lambda fn, x: jax.jacfwd(fn)(x),
    "jacrev": lambda fn, x: jax.jacrev(fn)(x),
    "linearize": linear,
    "hessian": lambda fn, x: jax.hessian(scalar(fn))(x)["q"],
    "forward over forward": lambda fn, x: pushed(lambda y: pushed(fn, y), x),
    "forward over reverse": lambda fn, x: pushed(jax.grad(scalar(fn)), x),
    "reverse over forward": lambda fn, x: pulled(lambda y: pushed(fn, y), x),
    "reverse over reverse": lambda fn, x: pulled(jax.grad(scalar(fn)), x),
    "third order, forward": lambda fn, x: pushed(lambda y: pushed(jax.grad(scalar(fn)), y), x),
    "third order, reverse": lambda fn, x: pulled(lambda y: pulled(jax.grad(scalar(fn)), y), x),
}


def scanned(fn):
    def run(x):
        steps = jax.tree.map(lambda a: jnp.stack([a, a * 0.5]), x)
        carry = jax.tree.map(jnp.zeros_like, jax.eval_shape(fn, x))
        return lax.scan(lambda total, a: (jax.tree.map(jnp.add, total, fn(a)), None), carry, steps)[0]

    return run


WRAPPINGS = {
    "checkpoint": jax.checkpoint,
    "scan": scanned,
    "checkpointed scan": lambda fn: scanned(jax.checkpoint(fn)),
    "inner jit": jax.jit,
    "cond": lambda fn: lambda x: lax.cond(x["q"].sum() > -1e9, fn, fn, x),
    "inner vmap": lambda fn: (
        lambda x: jax.tree.map(lambda a: a[0], jax.vmap(fn)(jax.tree.map(lambda a: jnp.stack([a, 2 * a]), x)))
    ),
}


def assert_same(a, b, tolerance=1e-9):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, tolerance, tolerance), a, b)


# ---------------------------------------------------------------- derivatives


@kernels
@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_every_derivative_is_that_of_the_definition(kernel, derivative):
    with jax.enable_x64(True):
        take = DERIVATIVES[derivative]
        found = quick_jit(functools.partial(take, by_kernel(kernel)))(point(1))
        assert_same(found, quick_jit(functools.partial(take, by_hand))(point(1)))


@kernels
@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_vmap_of_every_derivative_is_each_examples_own(kernel, derivative):
    with jax.enable_x64(True):
        one = functools.partial(DERIVATIVES[derivative], by_kernel(kernel))
        truth = quick_jit(functools.partial(DERIVATIVES[derivative], by_hand))
        x = point(7, (2,))
        found = quick_jit(jax.vmap(one))(x)
        for n in range(2):
            assert_same(jax.tree.map(lambda a, n=n: a[n], found), truth(jax.tree.map(lambda a, n=n: a[n], x)))


@kernels
@pytest.mark.parametrize(
    ("derivative", "wrapping"),
    [
        *(("gradient", wrapping) for wrapping in WRAPPINGS),
        ("jvp", "scan"),
        ("reverse over reverse", "checkpointed scan"),
    ],
)
def test_derivatives_go_through_control_flow_and_rematerialisation(kernel, derivative, wrapping):
    with jax.enable_x64(True):
        take, wrap = DERIVATIVES[derivative], WRAPPINGS[wrapping]
        found = quick_jit(functools.partial(take, wrap(by_kernel(kernel))))(point(3))
        assert_same(found, quick_jit(functools.partial(take, wrap(by_hand)))(point(3)))


@kernels
def test_an_eager_call_has_the_derivatives_of_the_jitted_one(kernel):
    x = jax.tree.map(lambda a: a.astype(jnp.float32), point(5))
    for take in (jax.grad(scalar(by_kernel(kernel))), lambda x: jax.jvp(by_kernel(kernel), (x,), (x,))[1]):
        assert_same(take(x), jax.jit(take)(x), 1e-5)


@kernels
@pytest.mark.parametrize("argument", ["q", "k", "v", "bias"])
def test_a_derivative_in_one_argument_is_a_part_of_the_whole(kernel, argument):
    x, tangents = (jax.tree.map(lambda a: a.astype(jnp.float32), point(n)) for n in (11, 17))

    def alone(y):
        return by_kernel(kernel)(x | {argument: y})

    @jax.jit
    def both(x):
        whole = jax.grad(scalar(by_kernel(kernel)))(x)[argument]
        others = {n: t if n == argument else jnp.zeros_like(t) for n, t in tangents.items()}
        moved = jax.jvp(by_kernel(kernel), (x,), (others,))[1]
        part = jax.grad(scalar(alone))(x[argument])
        return (whole, moved), (part, jax.jvp(alone, (x[argument],), (tangents[argument],))[1])

    assert_same(*both(x), 1e-5)


# ---------------------------------------------------------------- what is differentiated


@kernels
def test_the_log_sum_exp_has_derivatives_of_its_own(kernel):
    with jax.enable_x64(True):
        x = point(13)
        found = jax.jit(jax.grad(lambda x: jnp.cos(by_kernel(kernel)(x)[1]).sum()))(x)
        assert_same(found, jax.jit(jax.grad(lambda x: jnp.cos(by_hand(x)[1]).sum()))(x))
        assert (found["v"] == 0).all()


@weighing_kernels
def test_weights_that_were_asked_for_have_derivatives(kernel):
    with jax.enable_x64(True):
        x, g = point(15), jnp.asarray(oracle.exact(1, 4, 3, 5))

        def weights(x):
            return aj.attention(**x, mask=VISIBLE, return_weights=True, implementation=kernel)[1]

        def by_definition(x):
            logits = jnp.einsum("htd,hsd->hts", x["q"], jnp.repeat(x["k"], 2, 0)) / np.sqrt(2.0) + x["bias"]
            return jax.nn.softmax(jnp.where(VISIBLE, logits, -1e30))

        assert_same(weights(x), by_definition(x))
        for take in (lambda fn: jax.vjp(fn, x)[1](g)[0], lambda fn: jax.jvp(fn, (x,), (point(2),))[1]):
            assert_same(jax.jit(lambda take=take: take(weights))(), jax.jit(lambda take=take: take(by_definition))())


# ---------------------------------------------------------------- vmap


@kernels
@pytest.mark.parametrize("mapped", ["q", "k", "bias", "mask", "positions", "all"])
def test_vmap_over_some_arguments_is_a_loop(kernel, mapped):
    names = ["q", "k", "v", "bias", "scale", "mask", "positions"]
    x = jax.tree.map(lambda a: a.astype(jnp.float32), point(19, (3,)))
    x |= {"scale": jnp.array([0.3, 0.5, 0.7]), "mask": aj.Lengths(kv=jnp.array([0, 2, 5])) | aj.Causal()}
    x |= {"positions": jnp.array([0, 2, -1])}
    chosen = {n: mapped in (n, "all") for n in names}

    def call(q, k, v, bias, scale, mask, positions):
        def loss(q, k, v, bias, scale):
            more = {"scale": scale, "q_positions": positions}
            return jnp.sin(aj.attention(q, k, v, mask, bias=bias, **more, implementation=kernel)).sum()

        return jax.value_and_grad(loss, (0, 1, 2, 3, 4))(q, k, v, bias, scale)

    def example(n):
        return [jax.tree.map(lambda a, m=m: a[n if chosen[m] else 0], x[m]) for m in names]

    stacked = [x[m] if chosen[m] else first for m, first in zip(names, example(0), strict=True)]
    found = quick_jit(jax.vmap(call, tuple(0 if chosen[n] else None for n in names)))(*stacked)
    alone = jax.jit(call)
    for n in range(3):
        assert_same(jax.tree.map(lambda a, n=n: a[n], found), alone(*example(n)), 2e-5)


@kernels
def test_vmap_twice_and_over_other_axes_is_a_loop_too(kernel):
    q, k, v = (jnp.asarray(oracle.exact(n, 2, 3, 4, 5), jnp.float32) for n in range(3))
    call = functools.partial(aj.attention, mask=aj.Causal(), implementation=kernel)
    twice = jax.jit(jax.vmap(jax.vmap(call)))(q, k, v)  # (T, D) alone
    assert_same(twice, jax.jit(call)(q, k, v), 1e-5)
    turned = jax.jit(jax.vmap(call, (2, 2, 2), 2))(*(jnp.moveaxis(x, 0, 2) for x in (q, k, v)))
    assert_same(jnp.moveaxis(turned, 2, 0), twice, 1e-5)
