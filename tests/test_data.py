"""Texts, splits, counts, windows and the recall task."""

import hashlib
import sys

import numpy as np
import pytest

from attention_jax import data


def _manual():
    text = data.load_text()
    return text, *data.split(text.tokens)


def test_the_default_text_is_the_manual_of_the_running_python():
    text = data.load_text()
    assert 440_000 < text.size_bytes < 700_000
    assert "Python" in text.name
    assert "pydoc_data.topics" in text.name
    assert text.sha256 == hashlib.sha256(text.tokens.tobytes()).hexdigest()
    assert b"assert" in text.tokens.tobytes()


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the figures are those of the manual of Python 3.11")
def test_counting_gives_the_published_figures_on_the_manual_of_python_3_11():
    _, train, validation = _manual()
    assert round(data.ngram_bits(train, validation, 2), 2) == 3.34
    assert round(data.ngram_bits(train, validation, 3), 2) == 2.53


def test_counting_more_context_predicts_the_manual_better():
    _, train, validation = _manual()
    one, two, three = (data.ngram_bits(train, validation, order) for order in (1, 2, 3))
    assert 8 > one > two > three > 1


def test_ngram_bits_are_the_entropy_of_the_smoothed_table_by_hand():
    train, validation = np.array([7, 7, 9], np.uint8), np.array([7, 9, 7], np.uint8)
    after_7, after_9 = 1.05 / (2 + 0.05 * 256), 0.05 / (0.05 * 256)
    np.testing.assert_allclose(data.ngram_bits(train, validation, 2), -(np.log2(after_7) + np.log2(after_9)) / 2)


def test_the_validation_text_is_the_last_tenth():
    text, train, validation = _manual()
    assert len(validation) == text.size_bytes // 10
    np.testing.assert_array_equal(np.concatenate([train, validation]), text.tokens)


def test_files_of_any_language_are_joined_as_bytes(tmp_path):
    one, two = tmp_path / "吾輩.txt", tmp_path / "two.txt"
    one.write_text("吾輩は猫である。" * 200, encoding="utf-8")
    two.write_text("名前はまだ無い。" * 200, encoding="utf-8")
    text = data.load_text([one, str(two)])
    assert text.tokens.tobytes() == one.read_bytes() + b"\n" + two.read_bytes()
    assert text.name == "吾輩.txt, two.txt"
    assert data.load_text(one).tokens.tobytes() == one.read_bytes()


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (None, "must be readable"),
        (b"", "must not be empty"),
        (b"\xff" * 9000, "must be UTF-8"),
        (b"a" * 100, "too short"),
    ],
)
def test_a_bad_file_is_named_together_with_the_rule(tmp_path, content, rule):
    file = tmp_path / "my.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError, match=rule) as caught:
        data.load_text([file])
    assert "my.txt" in str(caught.value)


def test_a_folder_is_no_text(tmp_path):
    with pytest.raises(ValueError, match="must be readable"):
        data.load_text([tmp_path])


def test_a_python_without_its_manual_asks_for_a_text(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(ValueError, match="--text"):
        data.load_text()


def test_windows_are_runs_of_the_text_and_depend_on_seed_and_step_alone():
    tokens = np.arange(1000)
    windows = data.batches(tokens, batch=4, length=17, seed=3)
    first, second, third = (next(windows) for _ in range(3))
    assert first.shape == (4, 17)
    assert first.dtype == np.int32
    assert (np.diff(first) == 1).all()
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(next(data.batches(tokens, 4, 17, seed=3, start=2)), third)
    assert not np.array_equal(next(data.batches(tokens, 4, 17, seed=4)), first)


def test_windows_reach_both_ends_of_the_text():
    drawn = next(data.batches(np.arange(6), batch=200, length=5, seed=0))
    assert set(drawn[:, 0]) == {0, 1}


def test_a_window_longer_than_the_text_is_refused_at_once():
    with pytest.raises(ValueError, match="fit into the text"):
        data.batches(np.arange(6), batch=1, length=7, seed=0)


@pytest.mark.parametrize("pairs", [1, 8, 64])
def test_every_query_of_recall_has_one_answer_among_the_pairs(pairs):
    drawn = data.recall_batch(np.random.default_rng(1), 5, pairs)
    for keys, values, answers in zip(*drawn, strict=True):
        table = dict(zip(keys[:pairs], values[:pairs], strict=True))
        assert len(table) == pairs
        assert set(values[:pairs]) <= set(range(1, data.RECALL_VALUES + 1))
        assert (values[pairs:] == 0).all()
        assert (answers[:pairs] == -1).all()
        assert [table[key] for key in keys[pairs:]] == answers[pairs:].tolist()


def test_more_pairs_than_keys_are_refused():
    with pytest.raises(ValueError, match="1 to 64 pairs"):
        data.recall_batch(np.random.default_rng(0), 1, 65)
