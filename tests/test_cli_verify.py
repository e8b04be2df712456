"""`attention-jax verify`: what it prints, and that it sees an attention that is wrong."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax import Causal, attention, reference
from attention_jax.cli import main, verify

LINES = "first row: 5.6667\nmatrix / rowwise / official: OK\ncausal / official: OK\n"


def test_verify_prints_three_lines_and_ends_with_status_0(capsys):
    assert main(["verify"]) == 0
    printed = capsys.readouterr()
    assert printed.out == LINES
    assert "jax.nn.dot_product_attention of jax" in printed.err
    assert "tolerance 1e-12" in printed.err
    assert "tolerance 1e-06" in printed.err
    assert ("of torch" in printed.err) == verify.torch_installed()


def test_verify_as_json_names_the_library_and_tolerance_behind_each_line(capsys):
    assert main(["verify", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert results["passed"] is True
    assert results["first_row"] == pytest.approx(17 / 3, abs=1e-12)
    assert results["device"]["versions"]["jax"] == jax.__version__
    for line in (verify.FULL, verify.CAUSAL):
        behind = {
            check["against"].split(" of ")[0]: check["tolerance"]
            for check in results["checks"]
            if check["line"] == line
        }
        assert behind["jax.nn.dot_product_attention"] == 1e-6
        assert behind[f"a loop over rows in NumPy {np.__version__}"] == 1e-12
        assert ("scaled_dot_product_attention" in behind) == verify.torch_installed()


def drops_the_mask(q, k, v, mask=None):
    return attention(q, k, v)


def zeroes_weights_after_the_softmax(q, k, v, mask=None):
    weights = jax.nn.softmax(q @ k.mT / math.sqrt(q.shape[-1]), axis=-1)
    visible = jnp.tri(q.shape[-2], dtype=bool) if isinstance(mask, Causal) else (True if mask is None else mask)
    return jnp.where(visible, weights, 0) @ v


def forgets_the_scale(q, k, v, mask=None):
    return attention(q, k, v, mask, scale=1.0)


def computes_in_single_precision(q, k, v, mask=None):
    return attention(*(x.astype(jnp.float32) for x in (q, k, v)), mask).astype(q.dtype)


def gives_nan(q, k, v, mask=None):
    return attention(q, k, v, mask) * jnp.nan


@pytest.mark.parametrize(
    ("wrong", "lines"),
    [
        (drops_the_mask, {verify.FULL, verify.CAUSAL}),
        (zeroes_weights_after_the_softmax, {verify.FULL, verify.CAUSAL}),
        (forgets_the_scale, {verify.FULL, verify.CAUSAL}),
        (computes_in_single_precision, {verify.FULL, verify.CAUSAL}),
        (gives_nan, {verify.FULL, verify.CAUSAL}),
    ],
)
def test_a_wrong_attention_ends_with_status_1_and_the_differing_numbers(wrong, lines, monkeypatch, capsys):
    monkeypatch.setattr(verify, "attention", wrong)
    assert main(["verify"]) == 1
    printed = capsys.readouterr()
    assert {line.removesuffix(": DIFFERS") for line in printed.out.splitlines() if "DIFFERS" in line} == lines
    assert "  got      [" in printed.err
    assert "  expected [" in printed.err
    assert main(["verify", "--json"]) == 1
    results = json.loads(capsys.readouterr().out)
    differing = [check for check in results["checks"] if not check["passed"]]
    assert {check["line"] for check in differing} == lines
    assert all(check["got"] != check["expected"] for check in differing)


def test_forbidding_the_third_key_gives_thirds_and_not_sixths(monkeypatch):
    monkeypatch.setattr(verify, "attention", zeroes_weights_after_the_softmax)
    with jax.enable_x64(True):
        check = next(check for check in verify.by_hand() if "without the third key" in check.case)
    assert check.expected.tolist() == [1 / 3, 2 / 3, 0]
    np.testing.assert_allclose(check.got, [1 / 6, 2 / 6, 0], atol=1e-12)
    assert not check.passed


def test_rows_one_by_one_equal_the_definition():
    q, k, v = np.random.default_rng(3).standard_normal((3, 2, 6, 4))
    visible = np.tri(6, dtype=bool)
    with jax.enable_x64(True):
        expected = reference.attention(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), jnp.asarray(visible))
    np.testing.assert_allclose(verify.row_by_row(q, k, v, visible), np.asarray(expected.out), atol=1e-12)
