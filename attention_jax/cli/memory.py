"""How much memory does attention need as its text grows, with the matrix of scores and without?

Method: one causal attention of `--batch` examples and `--heads` heads of width 64 is compiled for each length, once
written out as softmax(q kᵀ) v, once as the tiled kernel, forward and forward with backward; what the compiler set
aside for temporaries is read off. Nothing is run. On a CPU one kind of fusion is switched off, since with it the
compiler does not tell what it allocates.
Output: a row for each length. `scores` is the size of one (T, S) matrix of scores per head in `--dtype`, by arithmetic;
the others are temporaries without arguments and results. Bytes are decimal: 1 MB is 10^6 bytes. FLOPs are those of
`plan` for the tiled kernel, which computes no tile that the mask leaves empty: time stays quadratic.
`--json` prints `device`, `heads`, `batch`, `dtype` and `rows` (`length`, then bytes, or FLOP where the name says so).

    attention-jax memory --heads 8
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .. import Causal, attention, plan
from .console import as_json, say, show
from .devices import describe

WIDTH = 64
COLUMNS = {
    "length": "T",
    "scores": "scores",
    "definition": "written out",
    "definition_gradient": "its gradient",
    "tiled": "tiled",
    "tiled_gradient": "its gradient",
    "flop": "FLOP",
    "gradient_flop": "its gradient",
}


def run(options: argparse.Namespace) -> int:
    """The command; returns the exit status."""
    rows = []
    for length in options.lengths:
        say(f"attention-jax memory: compiling for T = {length:,}")
        rows.append(measure(length, options.heads, options.batch, options.dtype))
    if options.json:
        settings = {name: getattr(options, name) for name in ("heads", "batch", "dtype")}
        show(as_json({"device": describe(), **settings, "rows": rows}))
    else:
        show(table(rows, f"{options.batch} × {options.heads} heads of width {WIDTH}, {options.dtype}, causal"))
    return 0


def measure(length: int, heads: int, batch: int, dtype: str) -> dict[str, int]:
    """One row: bytes and FLOP by the names of the columns."""
    x = jax.ShapeDtypeStruct((batch, heads, length, WIDTH), jnp.dtype(dtype))
    tiled = functools.partial(attention, mask=Causal(), implementation="tiled")
    cost = plan(x, x, x, Causal(), implementation="tiled").cost
    return {
        "length": length,
        "scores": batch * heads * length**2 * x.dtype.itemsize,
        "definition": temporaries(jax.jit(written_out).lower(x, x, x)),
        "definition_gradient": temporaries(jax.jit(pulled_back, static_argnums=0).lower(written_out, x, x, x, x)),
        "tiled": temporaries(jax.jit(tiled).lower(x, x, x)),
        "tiled_gradient": temporaries(jax.jit(pulled_back, static_argnums=0).lower(tiled, x, x, x, x)),
        "flop": cost.flops,
        "gradient_flop": cost.gradient_flops,
    }


def written_out(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention as the formula says it, with all scores at once."""
    scores = jnp.einsum("bhtd,bhsd->bhts", q, k) / jnp.asarray(WIDTH**0.5, q.dtype)
    visible = jnp.tri(q.shape[2], dtype=bool)[None, None]
    return jnp.einsum("bhts,bhsd->bhtd", jax.nn.softmax(jnp.where(visible, scores, -jnp.inf)), v)


def pulled_back(fn: Callable[..., Any], q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array) -> Any:
    """Gradients by q, k and v."""
    return jax.vjp(fn, q, k, v)[1](d_out)


def temporaries(lowered: jax.stages.Lowered) -> int:
    """Bytes that the program, once compiled, sets aside besides its arguments and results."""
    options: Any = {"xla_cpu_experimental_ynn_fusion_type": ""} if jax.default_backend() == "cpu" else None
    memory = lowered.compile(compiler_options=options).memory_analysis()
    if memory is None:
        raise RuntimeError("this platform does not tell what it allocates")
    if jax.default_backend() == "tpu":  # vector memory does not count as temporary there
        return memory.peak_memory_in_bytes - memory.argument_size_in_bytes - memory.output_size_in_bytes
    return memory.temp_size_in_bytes


def table(rows: list[dict[str, int]], title: str) -> str:
    """The rows under each other, aligned."""
    cells = [list(COLUMNS.values())]
    for row in rows:
        sizes = (with_unit(row[name], "FLOP" if "flop" in name else "B") for name in list(COLUMNS)[1:])
        cells.append([f"{row['length']:,}", *sizes])
    widths = [max(len(line[n]) for line in cells) for n in range(len(COLUMNS))]
    lines = ["  ".join(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True)) for line in cells]
    return "\n".join([title, *lines])


def with_unit(number: int, unit: str) -> str:
    """Four digits and a decimal unit: 2.048 GB."""
    power = min((len(str(number)) - 1) // 3, 5)
    return f"{number / 1000**power:.4g} {' kMGTP'[power].strip()}{unit}"
