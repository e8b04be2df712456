"""Right answers where other libraries went wrong: every case of tests/cases/attention.json, through every kernel."""

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import attention_jax as aj
from attention_jax import reference
from attention_jax.kernels import KERNELS

CASES = cases.load("attention")
WRITTEN_BELOW = {"BG-06", "FM-06", "DC-04"}  # a bias made from a table; integers, which are refused
LITERAL = {n: c for n, c in CASES.items() if c.operation != "jvp_and_hvp" and c.expected and n not in WRITTEN_BELOW}
GIVING_WEIGHTS = {"dense"}
DTYPES = ["float64", "float32", "bfloat16", "float16"]

kernels = pytest.mark.parametrize("kernel", KERNELS)


def turned(x):
    """Between (batch, length, heads, width) and (batch, heads, length, width)."""
    return x.swapaxes(1, 2)


def cast(x, dtype):
    with np.errstate(over="ignore"):
        return np.asarray(x).astype(jnp.dtype(dtype))


def is_exact(x, dtype):
    return np.array_equal(x, cast(x, dtype).astype(np.float64), equal_nan=True)


def runs_in(case, dtype):
    """Whether the case has a tolerance for the dtype, and its operands survive the cast."""
    wide = dtype in ("float32", "float64")
    return dtype in case.tolerance and (wide or all(is_exact(case.inputs[name], dtype) for name in "qkv"))


RUNS = [(name, dtype) for name, case in LITERAL.items() for dtype in DTYPES if runs_in(case, dtype)]


def mask_of(case):
    options, mask = case.options, aj.Full()
    if "mask" in options:
        mask = mask & np.asarray(options["mask"], bool)
    if options.get("causal"):
        mask = mask & aj.Causal()
    if "window" in options:
        mask = mask & aj.Window(*options["window"])
    if "kv_len" in options:
        mask = mask & aj.Lengths(kv=options["kv_len"])
    if "q_seg" in options:
        mask = mask & aj.Segments(options["q_seg"], options.get("kv_seg"), pad=options.get("pad_seg"))
    return mask


def operands_of(case, dtype):
    """q, k, v and perhaps a bias; a bias that the dtype cannot hold is float32."""
    arrays = {name: jnp.asarray(cast(turned(case.inputs[name]), dtype)) for name in "qkv"}
    if "bias" in case.options:
        bias = np.asarray(case.options["bias"], np.float64)
        arrays["bias"] = jnp.asarray(cast(bias, dtype if is_exact(bias, dtype) or dtype == "float64" else "float32"))
    return arrays


def settings_of(case):
    settings = {"scale": case.options["scale"]} if "scale" in case.options else {}
    queries, keys = case.inputs["q"].shape[1], case.inputs["k"].shape[1]
    if queries != keys:
        settings["q_positions"] = 0 if case.options.get("align") == "top_left" else keys - queries
    return settings


def solve(case, dtype, kernel):
    """What the library answers, by the names and in the layout of the case."""
    with jax.enable_x64(dtype == "float64"):
        arrays, mask = operands_of(case, dtype), mask_of(case)
        call = functools.partial(aj.attention, mask=mask, **settings_of(case), implementation=kernel)
        asked = {"lse"} | ({"weights"} if kernel in GIVING_WEIGHTS else set())
        asked &= set(case.expected)
        extras = {f"return_{name}": name in asked for name in ("lse", "weights")}
        names = ["out"] + [name for name in ("lse", "weights") if name in asked]
        differentiated = any(name[0] == "d" for name in case.expected)

        def run(arrays, cotangent):
            found = call(**arrays, **extras)
            found = dict(zip(names, found if len(names) > 1 else [found], strict=True))
            if differentiated:
                grads = jax.vjp(lambda a: call(**a), arrays)[1](cotangent)[0]
                found |= {f"d{name}": grads[name] for name in grads}
            return found

        cotangent = jnp.asarray(cast(turned(case.inputs["do"]), dtype)) if differentiated else None
        found = jax.jit(run)(arrays, cotangent)
    flipped = ("out", "dq", "dk", "dv")
    return {n: np.asarray(turned(x) if n in flipped else x).astype(np.float64) for n, x in found.items()}


def problem_of(case):
    """The case as the oracle takes it."""
    q, k, v = (turned(case.inputs[name]) for name in "qkv")
    logits, settings = (*q.shape[:-1], k.shape[-2]), settings_of(case)
    rule = oracle.everything
    options = case.options
    for name, predicate in {
        "mask": lambda m: oracle.dense(np.asarray(m, bool)),
        "causal": lambda _: oracle.causal,
        "window": lambda w: oracle.window(*w),
        "kv_len": oracle.lengths,
        "q_seg": lambda ids: oracle.segments(ids, options.get("kv_seg"), options.get("pad_seg")),
    }.items():
        if name in options:
            rule = oracle.both(rule, predicate(options[name]))
    visible = oracle.visible(rule, logits, settings.get("q_positions"))
    return oracle.Problem(q, k, v, visible, options.get("bias"), settings.get("scale"))


def oracle_of(case):
    """What the oracle answers, by the names and in the layout of the case."""
    problem = problem_of(case)
    found = oracle.attention(problem)._asdict()
    if "do" in case.inputs:
        found |= {f"d{n}": g for n, g in oracle.vjp(problem, turned(case.inputs["do"])).items()}
    return {n: turned(x) if n in ("out", "dq", "dk", "dv") else x for n, x in found.items()}


def untouched_of(case):
    """Where nothing can come from, likewise."""
    nothing = oracle.untouched(problem_of(case))
    return {"out": turned(nothing["out"])} | {f"d{n}": turned(nothing[n]) for n in "qkv"}


def assert_answers(found, case, tolerance):
    expected, untouched = case.expected, untouched_of(case)
    for name in expected.keys() & found.keys():
        literal = expected[name]
        got, open_entries = found[name], np.isnan(literal)
        assert got.shape == literal.shape, name
        assert np.isfinite(got).all(), f"{name}: {got}"
        error = np.abs(got - literal) / np.maximum(1, np.abs(literal))
        assert (open_entries | (error <= tolerance)).all(), f"{name}: {got}, expected {literal}"
        if name in untouched:
            assert (got[untouched[name]] == 0).all(), f"{name} is not exactly 0 where nothing comes: {got}"


@pytest.mark.parametrize("name", LITERAL)
def test_the_oracle_gives_the_cases_answer(name):
    assert_answers(oracle_of(CASES[name]), CASES[name], CASES[name].tolerance["float64"])


@kernels
@pytest.mark.parametrize(("name", "dtype"), RUNS)
def test_attention_gives_the_cases_answer(name, dtype, kernel):
    assert_answers(solve(CASES[name], dtype, kernel), CASES[name], CASES[name].tolerance[dtype])


@pytest.mark.parametrize("name", [n for n, c in LITERAL.items() if c.operation == "attention"])
def test_the_definition_gives_the_cases_answer(name):
    case = CASES[name]
    (batch, queries, heads, _), keys = case.inputs["q"].shape, case.inputs["k"].shape[1]
    settings = settings_of(case)
    where = {n: settings.pop(n) for n in ("q_positions",) if n in settings}
    with jax.enable_x64(True):
        mask = mask_of(case).array(queries, keys, batch=(batch,), heads=heads, **where)
        found = reference.attention(**operands_of(case, "float64"), mask=mask, **settings)._asdict()
    found = {n: np.asarray(turned(x) if n == "out" else x) for n, x in found.items()}
    assert_answers(found, case, case.tolerance["float64"])
