"""The part "time" of the main job: how long does one layer of each kind take, and how many steps must it wait for?

Method: causal attention with 1 and with 8 heads, a GRU and an LSTM, of the same width on the same input, against the
length T; beside ours the recurrent layers of Flax with the same weights. Each is first compared with another
implementation, and is not timed where its numbers disagree. The layers take turns, so a busy machine slows all alike;
of the repetitions the median and the quartiles count. The chains of dependent steps are read off the jaxpr.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from .. import recurrent
from ..masks import Causal
from ..multihead import init_mha, mha
from .budget import Budget
from .chains import longest_chain
from .contest import quartiles
from .display import Display
from .names import LAYERS
from .stopping import stop_if_asked

BATCH, WIDTH = 4, 128
LENGTHS = (64, 512, 256, 1024, 128)  # in this order, so that a short budget sees two that lie apart
CHAIN_LENGTHS = (16, 64, 256, 1024)
DIRECTIONS = ("forward", "forward and backward")
MANY_HEADS = 8
LEAST_REPEATS, MOST_REPEATS = 5, 40
AGAINST = {"gru": "flax gru", "lstm": "flax lstm"}
TOLERANCE = 1e-4  # of outputs of size 1 in float32, after a few hundred steps
BESIDE = "attention 8 heads"

Function = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Layer:
    """A function of parameters and (..., T, W) inputs, and its parameters."""

    name: str
    apply: Function
    params: Any

    def directed(self, direction: str) -> Function:
        """The function to time: of (params, x), forward alone or with the gradients of both."""
        if direction == "forward":
            return self.apply
        return jax.value_and_grad(lambda params, x: jnp.square(self.apply(params, x)).mean(), argnums=(0, 1))


def layers(seed: int) -> dict[str, Layer]:
    """Everything that is timed, or whose chain is counted, by name."""
    draw = np.random.default_rng(seed)
    made = {}
    for heads in (1, MANY_HEADS):
        name = "attention 1 head" if heads == 1 else f"attention {heads} heads"
        shapes = jax.eval_shape(lambda heads=heads: init_mha(jax.random.key(0), WIDTH, heads))
        made[name] = Layer(name, _attend, _drawn(draw, {name: each.shape for name, each in shapes.items()}))
    for cell in ("gru", "lstm", "linear"):
        params = _drawn(draw, recurrent.CELLS[cell].shapes(WIDTH, WIDTH))
        params |= {name: jnp.zeros_like(array) for name, array in params.items() if array.ndim == 1}
        made[cell] = Layer(cell, _recur(cell), params)
        if cell in AGAINST:
            made[AGAINST[cell]] = _of_flax(cell, params)
    made["linear associative"] = Layer("linear associative", _recur_at_once, made["linear"].params)
    return made


def _drawn(draw: np.random.Generator, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, jax.Array]:
    """Numbers as small as trained ones; NumPy draws without compiling anything."""
    drawn = {name: draw.normal(0, WIDTH**-0.5, shape) for name, shape in shapes.items()}
    return {name: jnp.asarray(array, jnp.float32) for name, array in drawn.items()}


def _attend(params: Mapping[str, jax.Array], x: jax.Array) -> jax.Array:
    return mha(params, x, mask=Causal())


def _attend_at_once(params: Mapping[str, jax.Array], x: jax.Array) -> jax.Array:
    """The plain form, all pairs at once, whose every step the jaxpr shows."""
    return mha(params, x, mask=Causal(), implementation="dense")


def _recur(cell: str) -> Function:
    return lambda params, x: recurrent.unroll(recurrent.CELLS[cell], params, x)[1]


def _recur_at_once(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return recurrent.unroll_associative(params, x)[1]


def _of_flax(cell: str, params: Mapping[str, jax.Array]) -> Layer:
    """Flax's layer with the weights of ours (its GRU has no second bias, and ours is 0 here)."""
    kind = {"gru": nnx.GRUCell, "lstm": nnx.OptimizedLSTMCell}[cell]

    def apply(params: Mapping[str, jax.Array], x: jax.Array) -> Any:
        # NNX adds arrays of unlike ranks and dtypes
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            inner = kind(WIDTH, WIDTH, rngs=nnx.Rngs(0))  # what it draws is not used, and so not computed
            inner.dense_i.kernel[...], inner.dense_h.kernel[...] = params["input"], params["state"]
            (inner.dense_i if cell == "gru" else inner.dense_h).bias[...] = params["bias"]
            return nnx.RNN(inner)(x)

    return Layer(AGAINST[cell], apply, params)


def time_layers(part: dict[str, Any], seed: int, budget: Budget, display: Display) -> None:
    """Count chains, check, and time; `part` is filled length by length, and valid at any time."""
    part |= {"batch_sequences": BATCH, "width": WIDTH, "chain_lengths_tokens": []}
    made = layers(seed)
    with display.bar("chains of steps", len(CHAIN_LENGTHS)) as show:
        for done, length in enumerate(CHAIN_LENGTHS):
            part["chains"] += chains(made, length)
            part["chain_lengths_tokens"].append(length)
            show(done + 1)
    begin = time.perf_counter()
    with display.bar("checking layers", None):
        part["checks"] += list(checks(made, seed))
    checking = time.perf_counter() - begin
    wrong = {check["layer"] for check in part["checks"] if not check["passed"]}
    timed = [layer for name, layer in made.items() if name not in wrong and not name.startswith("linear")]
    part["finished"] = measure(part, timed, seed, budget, display, checking)


def chains(made: Mapping[str, Layer], length: int) -> list[dict[str, Any]]:
    """The longest chain of each layer, forward and with its backward pass."""
    x = jax.ShapeDtypeStruct((BATCH, length, WIDTH), jnp.float32)
    rows = []
    for name, layer in made.items():
        counted = dataclasses.replace(layer, apply=_attend_at_once) if name.startswith("attention") else layer
        for direction in DIRECTIONS:
            if not name.startswith("flax"):
                chain = longest_chain(counted.directed(direction), layer.params, x)
                row = {"layer": name, "direction": direction, "length_tokens": length}
                rows.append(row | {"steps": chain.steps, "exact": chain.exact})
    return rows


def checks(made: Mapping[str, Layer], seed: int) -> Iterator[dict[str, Any]]:
    """Each layer against another implementation: attention against jax.nn, recurrences against Flax's."""
    x = inputs(seed, 48)
    for name, layer in made.items():
        if name.startswith("attention"):
            yield _check(name, "jax.nn.dot_product_attention", _call(layer, x), jax.jit(official)(layer.params, x))
        elif name in AGAINST:
            other = made[AGAINST[name]]
            yield _check(name, LAYERS[AGAINST[name]], _call(layer, x), _call(other, x))


def _call(layer: Layer, x: jax.Array) -> jax.Array:
    return jax.jit(layer.apply)(layer.params, x)


def _check(layer: str, against: str, got: jax.Array, expected: jax.Array) -> dict[str, Any]:
    difference = float(np.max(np.abs(np.asarray(got) - np.asarray(expected))))
    facts = {"layer": layer, "against": against, "tolerance": TOLERANCE, "passed": difference <= TOLERANCE}
    return facts | {"largest_difference": difference if np.isfinite(difference) else str(difference)}


def official(params: Mapping[str, jax.Array], x: jax.Array) -> jax.Array:
    """The attention layers with `jax.nn.dot_product_attention`, at the highest precision."""
    q, k, v = (jnp.einsum("btw,whd->bthd", x, params[name], precision="highest") for name in ("q", "k", "v"))
    with jax.default_matmul_precision("highest"):
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return jnp.einsum("bthv,hvo->bto", out, params["out"], precision="highest")


def inputs(seed: int, length: int) -> jax.Array:
    """Normal numbers, (B, T, W)."""
    return jax.random.normal(jax.random.key(seed), (BATCH, length, WIDTH))


def measure(part: dict[str, Any], timed: list[Layer], seed: int, budget: Budget, display: Display, cost: float) -> bool:
    """Time all layers at one length and direction after the other; whether all were reached.

    `cost`: the seconds that a turn is expected to take, since it compiles all layers; then those of the turn before.
    """
    turns = [(length, direction) for length in LENGTHS for direction in DIRECTIONS]
    with display.bar("timing layers", len(turns)) as show:
        for done, (length, direction) in enumerate(turns):
            if budget.left < 1.3 * cost:
                return False
            begin = time.perf_counter()
            show(done, f"T = {length}, {direction}")
            compiled = {layer.name: _compiled(layer, direction, inputs(seed, length)) for layer in timed}
            rows = take_turns(compiled, budget.part(0.5 / (len(turns) - done)))
            rows = [row | {"direction": direction, "length_tokens": length} for row in rows]
            part["timings"] += rows
            part["ratios"] += ratios(rows)
            for key in ("timings", "ratios"):
                part[key].sort(key=lambda row: (DIRECTIONS.index(row["direction"]), row["length_tokens"]))
            cost = time.perf_counter() - begin
    return True


def _compiled(layer: Layer, direction: str, x: jax.Array) -> Callable[[], Any]:
    stop_if_asked()
    function = jax.jit(layer.directed(direction)).lower(layer.params, x).compile()
    call = lambda: jax.block_until_ready(function(layer.params, x))  # noqa: E731
    call()  # the first call allocates
    return call


def take_turns(calls: Mapping[str, Callable[[], Any]], budget: Budget) -> list[dict[str, Any]]:
    """Call each in turn until the budget is over, at least 5 and at most 40 times; milliseconds by name."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(MOST_REPEATS):
        if turn >= LEAST_REPEATS and budget.over:
            break
        stop_if_asked()
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            taken[name].append(1e3 * (time.perf_counter() - begin))
    rows = []
    for name, all_ms in taken.items():
        rows.append({"layer": name, **quartiles(all_ms), "repeats": len(all_ms)})
    return rows


def ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Times of the recurrent layers over that of attention with 8 heads; None for a layer slower than Flax's."""
    at = {row["layer"]: row["median_ms"] for row in rows}
    where = {key: rows[0][key] for key in ("direction", "length_tokens")} if rows else {}
    made = []
    for layer, other in AGAINST.items():
        if layer in at and BESIDE in at:
            fair = at[layer] <= at.get(other, 0.0)
            made.append({"layer": layer, **where, "time_over_attention": at[layer] / at[BESIDE] if fair else None})
    return made
