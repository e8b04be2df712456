"""What the recurrent functions refuse, and how they say so."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.recurrent import GRU, LSTM, LstmState, bidirectional, unroll, unroll_associative

B, T, I, N = 3, 5, 4, 3
PARAMS = GRU.init(jax.random.key(0), I, N)
X, CARRY = jnp.ones((B, T, I)), jnp.ones((B, N))
OF_LSTM = LstmState(CARRY, CARRY)
REFUSED = {
    "cell by name": (TypeError, 'CELLS["gru"]', lambda: unroll("gru", PARAMS, X)),
    "params of another cell": (ValueError, "not parameters of lstm", lambda: unroll(LSTM, PARAMS, X)),
    "params as a list": (TypeError, "params must be a dict", lambda: unroll(GRU, list(PARAMS.values()), X)),
    "params with a list": (TypeError, "bias must be an array", lambda: unroll(GRU, PARAMS | {"bias": [0.0]}, X)),
    "params of another width": (ValueError, "input, expected", lambda: unroll(GRU, PARAMS, X[..., :2])),
    "params too many": (ValueError, "extra, given", lambda: unroll(GRU, PARAMS | {"extra": X}, X)),
    "params too few": (ValueError, "not parameters", lambda: unroll(GRU, {"input": PARAMS["input"]}, X)),
    "x as a list": (TypeError, "jnp.asarray(x)", lambda: unroll(GRU, PARAMS, [[1.0]])),
    "x of integers": (TypeError, "x must hold floats", lambda: unroll(GRU, PARAMS, X.astype(int))),
    "x of complex": (TypeError, "x must hold floats", lambda: unroll(GRU, PARAMS, X.astype(jnp.complex64))),
    "x without time": (ValueError, "x (..., T, I) = (4,)", lambda: unroll(GRU, PARAMS, X[0, 0])),
    "carry of another batch": (ValueError, "= (2, 3)\n  expected", lambda: unroll(GRU, PARAMS, X, CARRY[:2])),
    "carry of another cell": (TypeError, "carry must be that of gru", lambda: unroll(GRU, PARAMS, X, OF_LSTM)),
    "carry of integers": (TypeError, "carry must hold floats", lambda: unroll(GRU, PARAMS, X, CARRY.astype(int))),
    "carry as a list": (TypeError, "carry must be that of gru", lambda: unroll(GRU, PARAMS, X, [0.0, 0.0])),
    "lengths as a list": (TypeError, "array of integers", lambda: unroll(GRU, PARAMS, X, lengths=[1, 2, 3])),
    "lengths as floats": (TypeError, "float32(3,)", lambda: unroll(GRU, PARAMS, X, lengths=jnp.ones(3))),
    "lengths as a bool": (TypeError, "lengths = bool", lambda: unroll(GRU, PARAMS, X, lengths=True)),
    "lengths of another batch": (ValueError, "(2,)", lambda: unroll(GRU, PARAMS, X, lengths=np.array([1, 2]))),
    "a length too long": (ValueError, "largest  = 8", lambda: unroll(GRU, PARAMS, X, lengths=np.array([1, 8, 0]))),
    "an int too long": (ValueError, "at most T", lambda: unroll(GRU, PARAMS, X, lengths=8)),
    "a length below 0": (ValueError, "smallest = -1", lambda: unroll(GRU, PARAMS, X, lengths=np.array([1, -1, 0]))),
    "an unknown option": (TypeError, "time_major", lambda: unroll(GRU, PARAMS, X, time_major=True)),
    "associative of gru": (ValueError, "unroll_associative: ", lambda: unroll_associative(PARAMS, X)),
    "one half of a pair": (TypeError, "pair (forward, backward)", lambda: bidirectional(GRU, PARAMS, X)),
    "one carry for two": (TypeError, "pair", lambda: bidirectional(LSTM, (PARAMS,) * 2, X, OF_LSTM)),
    "no width": (ValueError, "at least 1", lambda: GRU.init(jax.random.key(0), 3, 0)),
    "parameters of integers": (TypeError, "floats", lambda: GRU.init(jax.random.key(0), 3, 4, int)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_meant_is_refused_with_a_reason(case, plain_errors):
    error, words, call = REFUSED[case]
    with pytest.raises(error) as raised:
        call()
    assert words in str(raised.value)
