"""Where tokens come from: a text whose tokens are its bytes, what counting predicts of it, and associative recall.

Nothing here knows of models, and all of it is NumPy on the host: drawing a batch compiles nothing.
"""

import dataclasses
import hashlib
import importlib
import os
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from .errors import explain
from .given import AnyArray

BYTES = 256
LEAST_BYTES = 4096  # below this the validation tenth holds no more than three windows of 128 bytes


@dataclasses.dataclass(frozen=True, eq=False)
class Text:
    """A text as tokens, and what identifies it in a report.

    Attributes:
        name: the file names, or which manual of which Python.
        size_bytes: its length, which is the number of tokens.
        sha256: of its bytes, in hexadecimal.
        tokens: the bytes themselves, uint8.
    """

    name: str
    size_bytes: int
    sha256: str
    tokens: np.ndarray


def load_text(paths: Sequence[str | os.PathLike] | str | os.PathLike | None = None) -> Text:
    """The text of some UTF-8 files joined by newlines, or the reference manual of the running interpreter.

    Args:
        paths: one file or several. Without any, all topics of the module `pydoc_data.topics` in their own order, joined
            by newlines: 460 to 510 kB of English by version of Python.

    Raises:
        ValueError: a file that cannot be read or is empty or not UTF-8; fewer than 4,096 bytes in all; an interpreter
            that does not carry its manual.

    Example:
        >>> text = load_text()
        >>> text.size_bytes == len(text.tokens), text.tokens.dtype
        (True, dtype('uint8'))
    """
    if paths is None:
        name, content = _manual()
    else:
        files = [pathlib.Path(path) for path in ([paths] if isinstance(paths, str | os.PathLike) else paths)]
        name, content = ", ".join(file.name for file in files), b"\n".join(map(_read, files))
    if len(content) < LEAST_BYTES:
        facts = {"text": name or "no file", "bytes": len(content), "least": LEAST_BYTES}
        raise ValueError(explain("load_text", "the text is too short to train and to validate on.", facts))
    tokens = np.frombuffer(content, np.uint8)
    return Text(name, len(content), hashlib.sha256(content).hexdigest(), tokens)


def _manual() -> tuple[str, bytes]:
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ImportError as error:
        rule = "this Python does not carry its reference manual (module pydoc_data.topics)."
        raise ValueError(
            explain("load_text", rule, remedy="Give files of your own (on the command line: --text FILE).")
        ) from error
    version = ".".join(map(str, sys.version_info[:3]))
    return f"reference manual of Python {version} (pydoc_data.topics)", "\n".join(topics.values()).encode()


def _read(file: pathlib.Path) -> bytes:
    try:
        content = file.read_bytes()
    except OSError as error:
        facts = {"file": file, "reason": error.strerror or error}
        raise ValueError(explain("load_text", "a text file must be readable.", facts)) from error
    if not content:
        raise ValueError(explain("load_text", "a text file must not be empty.", {"file": file}))
    try:
        content.decode()
    except UnicodeDecodeError as error:
        facts = {"file": file, "first bad byte at": error.start}
        remedy = "Save it as UTF-8; any language will do, since tokens are bytes."
        raise ValueError(explain("load_text", "a text file must be UTF-8.", facts, remedy)) from error
    return content


def split(tokens: np.ndarray, validation: float = 0.1) -> tuple[np.ndarray, np.ndarray]:
    """Cuts (train, validation): the last tenth, rounded down, is never trained on.

    Example:
        >>> [len(part) for part in split(np.arange(25))]
        [23, 2]
    """
    if not 0 < validation < 1:
        raise ValueError(explain("split", "validation is a fraction between 0 and 1.", {"validation": validation}))
    cut = len(tokens) - int(len(tokens) * validation)
    return tokens[:cut], tokens[cut:]


SMOOTHING = 0.05


def ngram_bits(train: np.ndarray, validation: np.ndarray, order: int) -> float:
    """Bits per byte that a table of counts gives to the validation text; what any model that reads context must beat.

    p(b | the order - 1 bytes before) = (n(context, b) + 0.05) / (n(context) + 0.05 · 256): additive smoothing, with no
    back-off to shorter contexts. On the manual of Python 3.11 the bigram (order 2) gives 3.34, the trigram (order 3)
    2.53.
    Every validation byte is scored but the first order - 1, which have no full context.

    Args:
        train: bytes that are counted.
        validation: bytes that are scored.
        order: 1, 2 or 3; the table takes 8 · 256^order bytes (128 MiB for 3).

    Example:
        >>> alternating = np.tile(np.array([0, 1], np.uint8), 50_000)
        >>> round(ngram_bits(alternating, alternating, 1)), round(ngram_bits(alternating, alternating, 2), 2)
        (1, 0.0)
    """
    if order not in (1, 2, 3):
        raise ValueError(explain("ngram_bits", "order must be 1, 2 or 3.", {"order": order}))
    if len(validation) < order:
        facts = {"validation bytes": len(validation), "order": order}
        raise ValueError(explain("ngram_bits", "the validation text is shorter than one n-gram.", facts))
    counts = np.bincount(_grams(train, order), minlength=BYTES**order)
    scored = _grams(validation, order)
    of_context = counts.reshape(-1, BYTES).sum(axis=1)[scored // BYTES]
    probability = (counts[scored] + SMOOTHING) / (of_context + SMOOTHING * BYTES)
    return float(-np.log2(probability).mean())


def _grams(tokens: np.ndarray, order: int) -> np.ndarray:
    """Each run of `order` bytes as one number in base 256."""
    count = max(len(tokens) - order + 1, 0)
    grams = np.zeros(count, np.int64)
    for offset in range(order):
        grams = grams * BYTES + tokens[offset : offset + count]
    return grams


def batches(tokens: np.ndarray, batch: int, length: int, seed: int, start: int = 0) -> Iterator[np.ndarray]:
    """Endless random windows of a text, (batch, length) int32.

    Batch n depends on (seed, n) alone, so a run that resumes at step n continues with `start=n` and sees what it would
    have seen.

    Raises:
        ValueError: the text is shorter than one window.

    Example:
        >>> first = next(batches(np.arange(100), batch=2, length=5, seed=0))
        >>> first.shape, bool((np.diff(first) == 1).all())
        ((2, 5), True)
    """
    if batch < 1 or length < 1 or len(tokens) < length:
        facts = {"tokens": len(tokens), "batch": batch, "length": length}
        raise ValueError(explain("batches", "a window must fit into the text, and hold at least one token.", facts))

    def windows() -> Iterator[np.ndarray]:
        step = start
        while True:
            first = np.random.default_rng((seed, step)).integers(0, len(tokens) - length + 1, (batch, 1))
            yield tokens[first + np.arange(length)].astype(np.int32)
            step += 1

    return windows()


class RecallBatch(NamedTuple):
    """Associative recall: P tokens that carry a key and a value, then P queries that carry a key alone.

    Attributes:
        keys: (B, 2P), from 0 to `RECALL_KEYS` - 1.
        values: (B, 2P), from 1 to `RECALL_VALUES`; 0, "no value", at the queries.
        answers: (B, 2P), the value to be given at each query; -1 at the pairs, where nothing is asked.
    """

    keys: Int[AnyArray, "B L"]
    values: Int[AnyArray, "B L"]
    answers: Int[AnyArray, "B L"]


RECALL_KEYS = 64
RECALL_VALUES = 16


def recall_batch(rng: np.random.Generator, batch: int, pairs: int) -> RecallBatch:
    """Draws sequences of `pairs` distinct keys with random values, then asks for every key once, in a new random order.

    A guess is right with probability 1/16. The distance between a pair and its query is P on average.

    Raises:
        ValueError: more pairs than there are keys (64).

    Example:
        >>> drawn = recall_batch(np.random.default_rng(0), batch=2, pairs=3)
        >>> drawn.keys.shape, drawn.answers[0, :3].tolist()
        ((2, 6), [-1, -1, -1])
    """
    if not 1 <= pairs <= RECALL_KEYS:
        facts = {"pairs": pairs, "keys": RECALL_KEYS}
        raise ValueError(explain("recall_batch", "keys must be distinct, so there are 1 to 64 pairs.", facts))
    all_keys = np.tile(np.arange(RECALL_KEYS, dtype=np.int32), (batch, 1))
    keys = rng.permuted(all_keys, axis=1)[:, :pairs]
    values = rng.integers(1, RECALL_VALUES + 1, (batch, pairs), np.int32)
    asked = rng.permuted(np.tile(np.arange(pairs), (batch, 1)), axis=1)
    nothing = np.zeros_like(values)
    return RecallBatch(
        np.concatenate([keys, np.take_along_axis(keys, asked, axis=1)], axis=1),
        np.concatenate([values, nothing], axis=1),
        np.concatenate([nothing - 1, np.take_along_axis(values, asked, axis=1)], axis=1),
    )
