"""Does skipping survive `vmap`? Attention mapped over a batch, beside the same batch given at once.

Forward, and forward with backward, of the tiled kernel; medians of rounds that take turns, after the numbers agreed.
1.0 means that `vmap` costs nothing.

    python benchmarks/mapped.py --rounds 9
"""

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import attention_jax as aj
from attention_jax.cli.contest import quartiles, take_turns

B, H, T, D = 8, 4, 2048, 64
LENGTHS = np.linspace(T // 8, T, B).astype(np.int32)
SEGMENTS = np.sort(np.random.default_rng(0).integers(0, 6, (B, T)), -1).astype(np.int32)
# The mask of some examples, made of an array that has an entry for each of them.
MASKS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "Causal": (lambda _: aj.Causal(), LENGTHS),
    "Lengths": (lambda lengths: aj.Lengths(kv=lengths), LENGTHS),
    "Segments": (lambda ids: aj.Segments(q=ids, kv=ids), SEGMENTS),
}


def calls(mask_of: Callable[[Any], Any]) -> dict[str, Callable[..., Any]]:
    """Functions of (q, k, v, the mask's array): at once and mapped, forward and both."""

    def attend(q: Any, k: Any, v: Any, array: Any) -> Any:
        return aj.attention(q, k, v, mask_of(array), implementation="tiled")

    def with_backward(forward: Callable[..., Any]) -> Callable[..., Any]:
        def both(q: Any, k: Any, v: Any, array: Any) -> Any:
            out, pullback = jax.vjp(lambda *x: forward(*x, array), q, k, v)
            return out, pullback(out)

        return both

    made = {}
    for way, fn in (("at once", attend), ("mapped", jax.vmap(attend))):
        made |= {f"{way}, forward": jax.jit(fn), f"{way}, both": jax.jit(with_backward(fn))}
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    q, k, v = (jax.random.normal(key, (B, H, T, D), jnp.float32) for key in jax.random.split(jax.random.key(0), 3))
    print(
        f"jax {jax.__version__} on {jax.devices()[0].platform}; {B}×{H}×{T}×{D}: mapped over at once, forward and both"
    )
    for name, (mask_of, array) in MASKS.items():
        made = calls(mask_of)
        results = {key: fn(q, k, v, array) for key, fn in made.items()}
        for what in ("forward", "both"):
            jax.tree.map(
                lambda x, y: np.testing.assert_allclose(x, y, 1e-4, 1e-4),
                *(results[f"{way}, {what}"] for way in ("at once", "mapped")),
            )
        runs = {key: lambda fn=fn, array=array: jax.block_until_ready(fn(q, k, v, array)) for key, fn in made.items()}
        taken = {key: quartiles(times)["median_ms"] for key, times in take_turns(runs, rounds).items()}
        ratios = (taken[f"mapped, {what}"] / taken[f"at once, {what}"] for what in ("forward", "both"))
        print(f"{name:>9}  " + ", ".join(f"{ratio:.2f}" for ratio in ratios))


if __name__ == "__main__":
    main()
