"""Scanned RNNs beside attention of the same width, against the length T; Flax's and torch's with the same weights."""

import argparse
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import recurrent
from . import contest, peers, timing
from .contest import Arrays, Entry, NotSupported
from .display import Display
from .names import LAYERS, mixer_of

BASE = LAYERS["attention 8 heads"]
OURS = tuple(name for layer, name in LAYERS.items() if "flax" not in layer)
LENGTHS = (64, 256, 1024)
DIRECTIONS = ("forward", "forward and backward")
TORCH = {"GRU of torch": "gru", "LSTM of torch": "lstm"}
TOLERANCE = 1e-3  # of a thousand steps in float32


def measure(results: dict[str, Any], options: argparse.Namespace, display: Display) -> None:
    """Fill `results` with a row per length, direction and layer."""
    made = {LAYERS[name]: layer for name, layer in timing.layers(0).items()}
    turns = [(length, direction) for length in LENGTHS for direction in DIRECTIONS]
    with display.bar("layers", len(turns)) as show:
        for done, (length, direction) in enumerate(turns):
            show(done, f"T = {length}, {direction}")
            x = timing.inputs(0, length)
            enter = {name: functools.partial(_of_jax, layer, direction, x) for name, layer in made.items()}
            for name, cell in TORCH.items() if "torch" in peers.installed() else ():
                enter[name] = functools.partial(_of_torch, cell, made[LAYERS[cell]].params, direction, x)
            # layers of the same parameters must agree with the same numbers, which are computed once
            computed = {
                id(layer.params): functools.cache(functools.partial(_expected, layer, direction, x))
                for layer in made.values()
            }
            expected = {name: computed[id(layer.params)] for name, layer in made.items()}
            expected |= {name: expected[LAYERS[cell]] for name, cell in TORCH.items()}
            rows = contest.hold(enter, expected, TOLERANCE, options.rounds)
            results["rows"] += [row | {"point": f"T = {length}", "direction": direction} for row in rows]


def _numbers(direction: str, result: Any) -> Arrays:
    """The outputs, or their gradient by the inputs."""
    return [np.asarray(result if direction == "forward" else result[1][1], np.float64)]


def _of_jax(layer: timing.Layer, direction: str, x: jax.Array) -> Entry:
    return contest.jitted(layer.directed(direction), layer.params, x, numbers=functools.partial(_numbers, direction))


def _expected(layer: timing.Layer, direction: str, x: jax.Array) -> Arrays:
    """What the layer must give: attention as jax.nn has it, a recurrence step by step."""
    mixer, params = mixer_of(layer.name), layer.params
    if mixer == "attention":
        stepwise = timing.official
    else:
        cell = recurrent.CELLS[mixer]

        def stepwise(params: Any, x: jax.Array) -> jax.Array:
            start = cell.carry_of(jnp.zeros((x.shape[0], timing.WIDTH)))
            _, outputs = jax.lax.scan(functools.partial(cell.step, params), start, x.swapaxes(0, 1))
            return outputs.swapaxes(0, 1)

    with jax.default_matmul_precision("highest"):
        checked = dataclasses.replace(layer, apply=stepwise)
        return _numbers(direction, jax.jit(checked.directed(direction))(params, x))


def _of_torch(cell: str, params: Any, direction: str, x: jax.Array) -> Entry:
    """Torch's layer with the weights of ours: its gates come in the same order, its matrices are transposed."""
    if jax.default_backend() != "cpu":
        raise NotSupported("compared on a CPU only")
    torch = peers.torch_on_all_cores()
    layer = {"gru": torch.nn.GRU, "lstm": torch.nn.LSTM}[cell](timing.WIDTH, timing.WIDTH, batch_first=True)
    weights = {
        "weight_ih_l0": params["input"].T,
        "weight_hh_l0": params["state"].T,
        "bias_ih_l0": params["bias"],
        "bias_hh_l0": jnp.zeros_like(params["bias"]),  # where ours has one it is 0 as well
    }
    layer.load_state_dict({name: torch.from_numpy(np.array(array)) for name, array in weights.items()})
    inputs = torch.from_numpy(np.array(x))

    def forward() -> Any:
        with torch.inference_mode():
            return layer(inputs)[0].numpy()

    def both() -> Any:
        leaf = inputs.clone().requires_grad_()
        loss = layer(leaf)[0].square().mean()
        *_, by_inputs = torch.autograd.grad(loss, (*layer.parameters(), leaf))
        return None, (None, by_inputs.numpy())

    return Entry(forward if direction == "forward" else both, functools.partial(_numbers, direction))
