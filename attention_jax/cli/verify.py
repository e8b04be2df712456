"""Does `attention` give what its definition says, and what other libraries give?

Method: three queries, keys and values small enough to work out by hand, and one random case with two heads, in
float64; `attention` (all rows at once) against the hand-computed numbers, against a loop over rows, against
`jax.nn.dot_product_attention`, and against torch where it is installed; then the same under a causal mask.
Output: three lines on stdout; on stderr each comparison with its library, tolerance and largest difference.
`--json` prints `device`, `seed`, `first_row`, `passed` and `checks` (`line`, `case`, `against`, `tolerance`,
`largest_difference`, `passed`, and where they differ `got` and `expected`); all are plain numbers without a unit.

    attention-jax verify
"""

import argparse
import dataclasses
import importlib
import importlib.util
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import Causal, attention
from .console import as_json, say, show
from .devices import describe

FULL, CAUSAL = "matrix / rowwise / official", "causal / official"
EXACT = 1e-12  # float64 on both sides
SEED = 0
SINGLE = 1e-6  # jax.nn's softmax is float32 always


@dataclasses.dataclass(frozen=True)
class Check:
    """One comparison: of which line, on what, against whom, and both results."""

    line: str
    case: str
    against: str
    tolerance: float
    got: np.ndarray
    expected: np.ndarray

    @property
    def largest_difference(self) -> float:
        """The largest absolute difference; NaN where either side has one."""
        return float(np.max(np.abs(self.got - self.expected)))

    @property
    def passed(self) -> bool:
        """Whether every number agrees (a NaN never does)."""
        return self.largest_difference <= self.tolerance

    def record(self) -> dict[str, Any]:
        """The check as JSON says it."""
        facts: dict[str, Any] = {name: getattr(self, name) for name in ("line", "case", "against", "tolerance")}
        facts |= {"largest_difference": _plain(self.largest_difference), "passed": self.passed}
        if not self.passed:
            facts |= {"got": _plain(self.got.tolist()), "expected": _plain(self.expected.tolist())}
        return facts


def run(options: argparse.Namespace) -> int:
    """Print the verdict; 0 when every number agrees, else 1."""
    results = verify()
    for check in results["checks"]:
        verdict = "agrees" if check["passed"] else "DIFFERS"
        say(
            f"{check['line']}: {check['case']}, against {check['against']}: {verdict}, largest difference "
            f"{check['largest_difference']} (tolerance {check['tolerance']})"
        )
        if not check["passed"]:
            say(f"  got      {check['got']}\n  expected {check['expected']}")
    if not torch_installed():
        say("torch is not installed: not compared")
    show(as_json(results | {"device": describe(), "seed": SEED}) if options.json else "\n".join(lines(results)))
    return 0 if results["passed"] else 1


def lines(results: dict[str, Any]) -> list[str]:
    """The three lines of the verdict."""
    failed = {check["line"] for check in results["checks"] if not check["passed"]}
    verdicts = [f"{line}: {'DIFFERS' if line in failed else 'OK'}" for line in (FULL, CAUSAL)]
    return [f"first row: {float(results['first_row']):.4f}", *verdicts]


def verify() -> dict[str, Any]:
    """All comparisons, as plain numbers."""
    with jax.enable_x64(True):
        checks = [*by_hand(), *against_others()]
        first_row = float(all_rows(*example())[0, 0, 0])
    return {
        "first_row": _plain(first_row),
        "passed": all(check.passed for check in checks),
        "checks": [check.record() for check in checks],
    }


def example() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q, k, v of one head and width 1, (H, T, D) = (1, 3, 1), whose weights are small fractions."""
    q, k, v = [1.0, 2.0, 3.0], [0.0, math.log(2), math.log(3)], [2.0, 4.0, 8.0]
    return np.reshape(q, (1, 3, 1)), np.reshape(k, (1, 3, 1)), np.reshape(v, (1, 3, 1))


def by_hand() -> Iterator[Check]:
    """The first query is 1, so its weights are as exp(k): 1 to 2 to 3. Values of the unit matrix show the weights."""
    q, k, v = example()
    unit = np.eye(3)[None]
    third_hidden = np.array([[True, True, False]])
    for case, values, mask, expected in (
        ("first row's weights", unit, None, [1 / 6, 2 / 6, 3 / 6]),
        ("first row", v, None, [17 / 3]),
        ("first row's weights without the third key", unit, third_hidden, [1 / 3, 2 / 3, 0]),
    ):
        yield Check(
            FULL, case, "numbers worked out by hand", EXACT, all_rows(q, k, values, mask)[0, 0], np.array(expected)
        )


def against_others() -> Iterator[Check]:
    """Matrix form against the loop over rows, jax.nn and torch, without a mask and under a causal one."""
    draw = np.random.default_rng(SEED).standard_normal
    cases = {"the example": example(), "two random heads": tuple(draw((2, 5, 4)) for _ in range(3))}
    for line, causal in ((FULL, False), (CAUSAL, True)):
        for case, (q, k, v) in cases.items():
            got = all_rows(q, k, v, Causal() if causal else None)
            visible = np.tri(q.shape[1], dtype=bool) | (not causal)
            yield Check(
                line, case, f"a loop over rows in NumPy {np.__version__}", EXACT, got, row_by_row(q, k, v, visible)
            )
            name = f"jax.nn.dot_product_attention of jax {jax.__version__}"
            yield Check(line, case, name, SINGLE, got, official(q, k, v, causal))
            if torch_installed():
                name, theirs = torch_attention(q, k, v, causal)
                yield Check(line, case, name, EXACT, got, theirs)


def all_rows(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: Any = None) -> np.ndarray:
    """Matrix form: `attention` on (H, T, D) arrays."""
    mask = jnp.asarray(mask) if isinstance(mask, np.ndarray) else mask
    return np.asarray(attention(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), mask))


def row_by_row(q: np.ndarray, k: np.ndarray, v: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """out[i] = Σⱼ exp(q[i]·k[j]/√D) v[j] / Σⱼ exp(q[i]·k[j]/√D) over the visible j, one head and one row at a time."""
    out = np.empty((*q.shape[:2], v.shape[2]))
    for h in range(q.shape[0]):
        for i in range(q.shape[1]):
            seen = visible[i]
            weights = np.exp(k[h][seen] @ q[h, i] / math.sqrt(q.shape[2]))
            out[h, i] = weights @ v[h][seen] / weights.sum()
    return out


def official(q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool) -> np.ndarray:
    """The function that comes with JAX, whose layout is (T, H, D)."""
    theirs = [jnp.asarray(x).swapaxes(0, 1) for x in (q, k, v)]
    with jax.numpy_dtype_promotion("standard"):  # it mixes float64 values with its float32 softmax
        out = jax.nn.dot_product_attention(*theirs, is_causal=causal)
    return np.asarray(out).swapaxes(0, 1)


def torch_installed() -> bool:
    """Whether torch can be asked too."""
    return importlib.util.find_spec("torch") is not None


def torch_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool) -> tuple[str, np.ndarray]:
    """Name and result of torch's function."""
    torch = importlib.import_module("torch")
    q, k, v = (torch.from_numpy(x) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=causal)
    return f"scaled_dot_product_attention of torch {torch.__version__}", out[0].numpy()


def _plain(number: Any) -> Any:
    if isinstance(number, list):
        return [_plain(each) for each in number]
    return number if math.isfinite(number) else str(number)
