"""Recurrent cells unrolled in plain NumPy float64, one row and one step at a time; shares no code with ours."""

import numpy as np


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def elman(p, carry, x):
    h = np.tanh(x @ p["input"] + carry @ p["state"] + p["bias"])
    return h, h


def gru(p, carry, x):
    wr, wz, wn = np.split(p["input"], 3, axis=1)
    ur, uz, un = np.split(p["state"], 3, axis=1)
    br, bz, bn = np.split(p["bias"], 3)
    r = sigmoid(x @ wr + carry @ ur + br)
    z = sigmoid(x @ wz + carry @ uz + bz)
    n = np.tanh(x @ wn + bn + r * (carry @ un + p["state_bias"]))
    h = (1 - z) * n + z * carry
    return h, h


def lstm(p, carry, x):
    h, c = carry
    i, f, g, o = np.split(x @ p["input"] + h @ p["state"] + p["bias"], 4)
    c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    h = sigmoid(o) * np.tanh(c)
    return np.stack([h, c]), h


def linear(p, carry, x):
    gate, new = np.split(x @ p["input"] + p["bias"], 2)
    h = sigmoid(gate) * carry + (1 - sigmoid(gate)) * new
    return h, h


STEPS = {"elman": elman, "gru": gru, "lstm": lstm, "linear": linear}


def unroll(name, params, x, carry, lengths=None, reverse=False):
    """x (B, T, I); carry (B, N), for an LSTM (2, B, N). Gives (carry, outputs (B, T, N)), in float64."""
    params = {key: np.asarray(value, np.float64) for key, value in params.items()}
    rows = np.moveaxis(carry, -2, 0)
    lasts, outputs = [], np.zeros((*x.shape[:2], rows.shape[-1]))
    for row in range(len(x)):
        state = np.asarray(rows[row], np.float64)
        times = range(x.shape[1] if lengths is None else lengths[row])
        for t in reversed(times) if reverse else times:
            state, outputs[row, t] = STEPS[name](params, state, np.asarray(x[row, t], np.float64))
        lasts.append(state)
    return np.stack(lasts, axis=-2), outputs
