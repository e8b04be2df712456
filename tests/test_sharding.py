"""One answer on one device and on four: automatic and explicit mesh axes, and `shard_map` that checks them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import attention_jax as aj
from attention_jax.cli.memory import temporaries
from attention_jax.kernels import KERNELS

P = PartitionSpec
kernels = pytest.mark.parametrize("kernel", KERNELS)
pytestmark = pytest.mark.skipif(len(jax.devices()) < 4, reason="needs 4 devices: XLA_FLAGS, see conftest")

HEADS = {"grouped": 2, "one": 1}
LENGTHS = np.array([3, 5, 0, 6])


def mesh_of(kind):
    axes = {"explicit": AxisType.Explicit, "automatic": AxisType.Auto, "shard_map": AxisType.Auto}
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(axes[kind],) * 2)


def specs_of(kv_heads):
    """Batch over one axis of the mesh, heads over the other; one key/value head is on every device."""
    keys = P("data", "model" if kv_heads % 2 == 0 else None)
    return {"q": P("data", "model"), "k": keys, "v": keys, "bias": P(None, "model")}


def operands(kv_heads):
    shapes = {"q": (4, 4, 6, 3), "k": (4, kv_heads, 6, 3), "v": (4, kv_heads, 6, 2), "bias": (1, 4, 1, 6)}
    return {n: jnp.asarray(oracle.exact(i, *s), jnp.float32) for i, (n, s) in enumerate(shapes.items())}


def call(x, lengths, kernel):
    mask = aj.Causal() & aj.Lengths(kv=lengths)
    return aj.attention(**x, mask=mask, implementation=kernel, return_lse=True)


def pull(fn, x):
    y, pullback = jax.vjp(fn, x)
    return pullback(jax.tree.map(jnp.ones_like, y))[0]


TAKEN = {
    "forward": lambda fn, x, t: fn(x),
    "gradient": lambda fn, x, t: pull(fn, x),
    "jvp": lambda fn, x, t: jax.jvp(fn, (x,), (t,))[1],
    "forward over reverse": lambda fn, x, t: jax.jvp(functools.partial(pull, fn), (x,), (t,))[1],
}


def placed(mesh, specs, x):
    return {n: jax.device_put(a, NamedSharding(mesh, specs[n])) for n, a in x.items()}


def assert_same(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, 2e-5, 2e-5), a, b)


def run(kind, taken, kv_heads, kernel):
    """The derivative on four devices, on one, and the mesh and specs."""
    mesh, specs = mesh_of(kind), specs_of(kv_heads)
    x, t = operands(kv_heads), jax.tree.map(jnp.cos, operands(kv_heads))
    take = TAKEN[taken]

    def whole(x, t, lengths):
        return take(functools.partial(call, lengths=lengths, kernel=kernel), x, t)

    expected = jax.jit(whole)(x, t, LENGTHS)
    lengths = jax.device_put(LENGTHS, NamedSharding(mesh, P("data")))
    fn = whole
    if kind == "shard_map":
        results = {"forward": (P("data", "model"),) * 2, "jvp": (P("data", "model"),) * 2}
        fn = jax.shard_map(
            whole, mesh=mesh, in_specs=(specs, specs, P("data")), out_specs=results.get(taken, specs), check_vma=True
        )
    with jax.set_mesh(mesh):
        found = jax.jit(fn)(placed(mesh, specs, x), placed(mesh, specs, t), lengths)
    return found, expected, mesh, specs


@kernels
@pytest.mark.parametrize("kv_heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("taken", TAKEN)
@pytest.mark.parametrize("kind", ["automatic", "explicit", "shard_map"])
def test_four_devices_give_what_one_gives(kind, taken, kv_heads, kernel):
    found, expected, mesh, _ = run(kind, taken, kv_heads, kernel)
    assert_same(found, expected)
    if taken in ("forward", "jvp"):
        assert found[0].sharding.is_equivalent_to(NamedSharding(mesh, P("data", "model")), 4)


@kernels
@pytest.mark.parametrize("kind", ["automatic", "explicit"])
def test_gradients_are_sharded_as_what_they_belong_to(kind, kernel):
    found, _, mesh, specs = run(kind, "gradient", 2, kernel)
    for name in ("q", "k", "v"):
        assert found[name].sharding.is_equivalent_to(NamedSharding(mesh, specs[name]), 4), name


@kernels
@pytest.mark.parametrize("taken", ["forward", "gradient", "jvp"])
def test_no_device_gathers_what_is_sharded_over_batch_and_heads(taken, kernel):
    mesh, specs = mesh_of("automatic"), specs_of(2)
    x, lengths = placed(mesh, specs, operands(2)), jax.device_put(LENGTHS, NamedSharding(mesh, P("data")))
    del x["bias"]

    def whole(x, lengths):
        return TAKEN[taken](functools.partial(call, lengths=lengths, kernel=kernel), x, x)

    program = jax.jit(whole).lower(x, lengths).compile().as_text()
    assert "all-gather" not in program
    assert "all-to-all" not in program


@kernels
@pytest.mark.parametrize("kind", ["automatic", "explicit"])
def test_sharding_drops_the_same_weights(kind, kernel):
    mesh, specs = mesh_of(kind), specs_of(2)
    x, key = operands(2), jax.random.key(5)

    def dropped(x, key):
        return aj.attention(**x, dropout=(0.4, key), implementation=kernel)

    with jax.set_mesh(mesh):
        found = jax.jit(dropped)(placed(mesh, specs, x), key)
    assert_same(found, jax.jit(dropped)(x, key))


@kernels
def test_an_eager_call_takes_sharded_arrays_too(kernel):
    mesh, specs = mesh_of("automatic"), specs_of(2)
    found = call(placed(mesh, specs, operands(2)), LENGTHS, kernel)
    assert_same(found, call(operands(2), LENGTHS, kernel))
    assert found[0].sharding.is_equivalent_to(NamedSharding(mesh, specs["q"]), 4)


@kernels
def test_vmap_inside_shard_map_is_the_same(kernel):
    mesh, x = mesh_of("shard_map"), operands(2)

    def one(q, k, v):
        return aj.attention(q, k, v, aj.Causal(), implementation=kernel)

    def gradients(q, k, v):
        return jax.vmap(jax.grad(lambda *a: one(*a).sum(), (0, 1, 2)))(q, k, v)

    split = jax.shard_map(gradients, mesh=mesh, in_specs=P(("data", "model")), out_specs=P(("data", "model")))
    arrays = [x[n] for n in "qkv"]
    assert_same(jax.jit(split)(*arrays), jax.jit(gradients)(*arrays))


@kernels
def test_a_context_split_over_queries_is_the_whole(kernel):
    """Queries on different devices, keys on all: each part tells where its queries stand."""
    mesh = jax.make_mesh((4,), ("rows",), axis_types=(AxisType.Auto,))
    q, k, v = (jnp.asarray(oracle.exact(n, 2, 8, 4), jnp.float32) for n in range(3))

    def part(q, k, v):
        start = jax.lax.axis_index("rows") * 2
        return aj.attention(q, k, v, aj.Causal(), q_positions=start, implementation=kernel)

    split = jax.shard_map(part, mesh=mesh, in_specs=(P(None, "rows"), P(), P()), out_specs=P(None, "rows"))
    assert_same(jax.jit(split)(q, k, v), aj.attention(q, k, v, aj.Causal(), implementation=kernel))


@pytest.mark.parametrize("taken", ["forward", "gradient", "jvp"])
def test_each_of_more_devices_needs_less(taken):
    q = jax.ShapeDtypeStruct((2, 4, 2048, 16), jnp.float32)

    def needed(spec):
        mesh = mesh_of("automatic")
        x = jax.ShapeDtypeStruct(q.shape, q.dtype, sharding=NamedSharding(mesh, spec))
        attend = functools.partial(aj.attention, mask=aj.Causal(), implementation="tiled")
        lowered = jax.jit(lambda x: TAKEN[taken](lambda x: attend(x, x, x), x, x)).lower(x)
        return temporaries(lowered)

    whole, halves, quarters = needed(P()), needed(P("data")), needed(P("data", "model"))
    assert halves <= 0.6 * whole
    assert quarters <= 0.6 * halves
