"""Where does the tiled kernel overtake the dense one?

Both run the same call, forward and forward with backward, in rounds that take turns; the table gives the median of
dense over tiled, so that 2 means that tiled takes half the time. `DENSE_UP_TO` in
`dispatch.py` is what was concluded.

    python benchmarks/crossover.py --rounds 9
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import attention_jax as aj

SHAPES = [(1, 1, 16), (1, 8, 64), (1, 8, 128), (4, 8, 128), (8, 4, 256), (32, 8, 128), (4, 4, 512), (1, 8, 1024)]
MASKS = {"full": None, "causal": aj.Causal()}
KERNELS = ("dense", "tiled")


def calls(kernel: str, mask: Any, q: Any, k: Any, v: Any) -> list[Callable[[], Any]]:
    """The forward pass, and forward with backward."""

    def attend(q: Any, k: Any, v: Any) -> Any:
        return aj.attention(q, k, v, mask, implementation=kernel)

    def both(q: Any, k: Any, v: Any) -> Any:
        out, pullback = jax.vjp(attend, q, k, v)
        return out, pullback(out)

    return [functools.partial(lambda fn: jax.block_until_ready(fn(q, k, v)), jax.jit(fn)) for fn in (attend, both)]


def seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def ratios(shape: tuple[int, int, int], mask: Any, rounds: int) -> list[float]:
    """The median of dense over tiled, forward and both."""
    q, k, v = (jax.random.normal(key, (*shape, 64), jnp.float32) for key in jax.random.split(jax.random.key(0), 3))
    dense, tiled = (calls(kernel, mask, q, k, v) for kernel in KERNELS)
    found = []
    for a, b in zip(dense, tiled, strict=True):
        for x, y in zip(jax.tree.leaves(a()), jax.tree.leaves(b()), strict=True):
            np.testing.assert_allclose(x, y, 1e-4, 1e-4)
        found.append(statistics.median(seconds(a) / seconds(b) for _ in range(rounds)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    print(f"jax {jax.__version__} on {jax.devices()[0].platform}; dense over tiled, forward and both")
    print(f"{'B×H×T, D=64':>12}  {'logits MiB':>10}  " + "  ".join(f"{name:>12}" for name in MASKS))
    for shape in SHAPES:
        batch, heads, length = shape
        cells = (", ".join(f"{x:.2f}" for x in ratios(shape, mask, rounds)) for mask in MASKS.values())
        size = 4 * batch * heads * length**2 / 2**20
        print(f"{'×'.join(map(str, shape)):>12}  {size:>10.2f}  " + "  ".join(f"{cell:>12}" for cell in cells))


if __name__ == "__main__":
    main()
