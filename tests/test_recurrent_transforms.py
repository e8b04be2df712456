"""Where JAX runs it: jit, vmap, checkpoint, meshes of every kind; and what it costs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxprs import equations

from attention_jax.recurrent import CELLS, LINEAR, unroll, unroll_associative

ways = pytest.mark.parametrize("way", [*CELLS, "associative"])
B, T, I, N = 4, 6, 3, 5


def make(way, time=T, width=N):
    cell = LINEAR if way == "associative" else CELLS[way]
    params = cell.init(jax.random.key(0), I, width)
    x = jax.random.normal(jax.random.key(1), (B, time, I))
    run = unroll_associative if way == "associative" else functools.partial(unroll, cell)
    return run, params, x


def loss(run, params, x, lengths=None):
    return sum(jnp.sum(leaf * leaf) for leaf in jax.tree.leaves(run(params, x, lengths=lengths)))


def everything(run, lengths=None):
    """Value, gradient and jvp, so that all three go through a transformation together."""

    def fn(params, x):
        value, slopes = jax.value_and_grad(lambda params, x: loss(run, params, x, lengths), (0, 1))(params, x)
        _, tangent = jax.jvp(lambda x: run(params, x, lengths=lengths)[1], (x,), (jnp.cos(x),))
        return value, slopes, tangent

    return fn


def close(ours, truth, tolerance=1e-5):
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance), ours, truth)


@ways
def test_jit_vmap_and_checkpoint_change_nothing(way):
    run, params, x = make(way)
    truth = everything(run)(params, x)
    close(jax.jit(everything(run))(params, x), truth)
    close(everything(lambda *args, **kwargs: jax.checkpoint(functools.partial(run, **kwargs))(*args))(params, x), truth)
    rows = jax.vmap(everything(run), in_axes=(None, 0))(params, x)
    close(rows[2], truth[2])
    close(jax.tree.map(lambda leaf: leaf.sum(axis=0), rows[1][0]), truth[1][0], 1e-4)


@ways
def test_a_batch_of_models_is_a_vmap_over_parameters(way):
    run, params, x = make(way)
    models = jax.tree.map(lambda leaf: jnp.stack([leaf, 0.5 * leaf]), params)
    both = jax.vmap(lambda params, x: run(params, x)[1], in_axes=(0, None))(models, x)
    for i in (0, 1):
        close(both[i], run(jax.tree.map(lambda leaf, i=i: leaf[i], models), x)[1])


@ways
def test_a_single_device_where_time_and_batch_are_merged_gives_the_same(way, monkeypatch):
    run, params, x = make(way)
    truth = everything(run)(params, x)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    jax.clear_caches()
    merged = everything(run)(params, x)
    jax.clear_caches()
    close(merged, truth)


@ways
def test_lengths_may_be_traced_and_mapped(way):
    run, params, x = make(way)
    lengths = jnp.array([6, 1, 0, 3])
    mapped = jax.jit(jax.vmap(lambda x, length: run(params, x, lengths=length)))(x, lengths)
    close(mapped, run(params, x, lengths=lengths))


def mesh(kind):
    if jax.device_count() < 4:
        pytest.skip("needs 4 devices")
    return jax.make_mesh((4,), ("data",), axis_types=(kind,))


@pytest.mark.parametrize("lengths", [None, np.array([6, 1, 0, 3])], ids=["whole", "lengths"])
@ways
def test_inside_shard_map_every_row_is_computed_where_it_lies(way, lengths):
    run, params, x = make(way)
    everywhere = mesh(AxisType.Auto)

    def local(params, x, lengths):
        value, (slope, x_slope), tangent = everything(run, lengths)(params, x)
        # shard_map's own check of varying axes has summed the gradient of what every device shares
        return jax.lax.psum(value, "data"), (slope, x_slope), tangent

    specs = (P(), (P(), P("data")), P("data"))
    sharded = jax.shard_map(local, mesh=everywhere, in_specs=(P(), P("data"), P("data")), out_specs=specs)
    close(jax.jit(sharded)(params, x, lengths), everything(run, lengths)(params, x), 1e-4)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@ways
def test_a_sharded_batch_stays_sharded(way, kind):
    run, params, x = make(way)
    truth = everything(run)(params, x)
    data = mesh(kind)
    with jax.set_mesh(data):
        params = jax.device_put(params, NamedSharding(data, P()))
        x = jax.device_put(x, NamedSharding(data, P("data")))
        compiled = jax.jit(everything(run)).lower(params, x).compile()
        ours = compiled(params, x)
    close(ours, truth, 1e-4)
    assert ours[2].sharding.spec[0] == "data"
    text = compiled.as_text()
    assert "all-gather" not in text
    assert "all-to-all" not in text


def test_the_gradient_of_the_weights_is_one_product_after_the_loop():
    for name in ("elman", "gru", "lstm"):
        run, params, x = make(name)
        jaxpr = jax.make_jaxpr(jax.grad(lambda params, run=run, x=x: loss(run, params, x)))(params)
        shapes = [shape for eqn in scans(jaxpr) for shape in carried(eqn)]
        assert (B, N) in shapes
        assert params["state"].shape not in shapes


def scans(jaxpr):
    return [eqn for eqn in equations(jaxpr.jaxpr) if eqn.primitive.name == "scan"]


def carried(scan):
    """Shapes of what a scan carries: what it stacks has one axis more outside the loop than inside."""
    body = getattr(scan.params["jaxpr"], "jaxpr", scan.params["jaxpr"])
    return [
        out.aval.shape for out, one in zip(scan.outvars, body.outvars, strict=True) if out.aval.shape == one.aval.shape
    ]


@pytest.mark.parametrize(("name", "widths"), {"elman": 2, "gru": 5, "lstm": 6, "linear": 3}.items())
def test_what_reverse_mode_keeps_is_carry_and_gates_of_each_step(name, widths):
    run, params, _ = make(name, width=64)

    def kept(time):
        x = jnp.ones((B, time, I))
        _, pull = jax.vjp(lambda params, x: run(params, x)[1], params, x)
        return sum(leaf.size for leaf in jax.tree.leaves(pull))

    assert (kept(40) - kept(20)) / 20 == pytest.approx(B * (widths * 64 + I), rel=0.1)


def test_the_associative_scan_has_a_chain_of_log_time_steps():
    run, params, x = make("associative", time=64)
    assert not scans(jax.make_jaxpr(run)(params, x))
    run, params, x = make("linear", time=64)
    assert [eqn.params["length"] for eqn in scans(jax.make_jaxpr(run)(params, x))] == [64]
