"""Associative recall: attention looks a pair up, a recurrence must remember it."""

import itertools

import numpy as np
import pytest
from flax import nnx

from attention_jax import data, recall
from attention_jax.recall import accuracy, train_recall


class Knows(nnx.Module):
    """Gives the right answer to a share of the queries, and a wrong one to the rest and to the pairs."""

    def __init__(self, share):
        self.share = nnx.static(share)

    def __call__(self, keys, values):
        length = keys.shape[-1]
        right = self.share * (length // 2)
        asked = np.arange(length) - length // 2
        # what a key goes with, by looking at all pairs
        table = (keys[:, :, None] == keys[:, None, :]) * values[:, None, :]
        answer = table.max(-1)
        answer = np.where((asked >= 0) & (asked < right), answer, 0)
        return np.eye(data.RECALL_VALUES + 1, dtype=np.float32)[answer]


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_accuracy_is_the_share_of_queries_answered_right(share, monkeypatch):
    asked = data.recall_batch(np.random.default_rng(0), 5, pairs=8)
    monkeypatch.setattr(recall, "_share", recall._share.__wrapped__)  # so that the model may be NumPy
    assert accuracy(Knows(share), asked) == share


def test_the_sequences_trained_on_depend_on_seed_and_step_alone_and_are_not_those_of_the_test():
    drawn = lambda seed, start: recall._sequences(seed, 4, 6, start)  # noqa: E731
    one = list(itertools.islice(drawn(3, 0), 3))
    np.testing.assert_array_equal(next(drawn(3, 2)).keys, one[2].keys)
    assert not np.array_equal(one[0].keys, one[1].keys)
    assert not np.array_equal(next(drawn(4, 0)).keys, one[0].keys)


def test_recall_reports_the_first_look_every_so_often_and_the_last_and_repeats_itself():
    run = lambda: list(train_recall("elman", pairs=2, steps=7, batch=4, width=8, look_every=3))  # noqa: E731
    looks = run()
    assert [look.step for look in looks] == [1, 3, 6, 7]
    assert all(0 <= look.accuracy <= 1 and look.steps == 7 for look in looks)
    assert run() == looks


def test_recall_stops_once_it_is_good_enough():
    looks = list(train_recall("elman", pairs=2, steps=7, batch=4, width=8, look_every=3, enough=0.0))
    assert [look.step for look in looks] == [1]


@pytest.mark.slow  # about fifteen seconds of two cores
def test_attention_recalls_eight_pairs_within_two_hundred_steps():
    *_, last = train_recall("attention", pairs=8, steps=200)
    assert last.accuracy > 0.95


@pytest.mark.slow  # about thirty seconds of two cores
def test_a_gru_of_the_same_size_does_not_recall_eight_pairs_after_two_hundred_steps():
    *_, last = train_recall("gru", pairs=8, steps=200)
    assert last.accuracy < 0.3
