"""Checkpoints: what a kill leaves, and that a run continued ends as one never interrupted."""

import dataclasses
import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attention_jax import checkpoints, training
from attention_jax.models import CausalLM
from attention_jax.training import Recipe, train

TEXT = np.tile(np.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7], np.uint8), 60)
RECIPE = Recipe(steps=8, batch=3, length=9, learning_rate=1e-2, warmup=3, seed=5)


def small(mixer="elman", seed=0, **options):
    return CausalLM(vocab=16, width=8, depth=1, heads=2, mixer=mixer, rngs=nnx.Rngs(seed), **options)


def run(model, recipe=RECIPE, **options):
    return list(train(model, TEXT, recipe, **options))


def bits_of(model):
    """Every array of a model, random streams included, as bytes."""
    leaves = jax.tree.leaves(nnx.state(model))
    is_key = lambda leaf: jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)  # noqa: E731
    return [np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf).tobytes() for leaf in leaves]


def test_a_run_continued_from_its_checkpoint_ends_with_the_bits_of_one_never_interrupted(tmp_path):
    whole, begun, continued = (small(dropout=0.2) for _ in range(3))
    run(whole)
    for now in train(begun, TEXT, RECIPE, folder=tmp_path, report_every=1):
        if now.step == 5:
            break
    assert checkpoints.newest(tmp_path) == 5
    steps = [now.step for now in train(continued, TEXT, RECIPE, folder=tmp_path, report_every=1)]
    assert steps == [6, 7, 8]
    assert bits_of(continued) == bits_of(whole)
    again = small(seed=9, dropout=0.2)
    assert run(again, folder=tmp_path) == []  # nothing was left to do
    assert bits_of(again) == bits_of(whole)


def test_a_folder_of_another_run_is_refused(tmp_path):
    run(small(), folder=tmp_path)
    other = dataclasses.replace(RECIPE, learning_rate=3e-3)
    with pytest.raises(ValueError, match=r"(?s)another run.*0\.01.*0\.003"):
        run(small(), other, folder=tmp_path)
    with pytest.raises(ValueError, match="another run"):
        run(small(), folder=tmp_path, settings={"text": "other"})
    with pytest.raises(ValueError, match=r"(?s)another model.*leaf"):
        run(small("gru"), folder=tmp_path)


def test_checkpoints_keep_the_two_newest_steps_and_their_settings(tmp_path):
    tree = {"a": jnp.arange(3), "key": jax.random.key(7), "b": [jnp.ones((2, 2), jnp.bfloat16)]}
    for step in (2, 4, 6, 6):
        checkpoints.save(tmp_path, step, tree, {"step": step, "名": "x"})
    (tmp_path / "8.orbax-checkpoint-tmp").mkdir()  # what a kill in the middle of saving leaves
    assert checkpoints.newest(tmp_path) == 6
    assert checkpoints.settings_of(tmp_path) == {"step": 6, "名": "x"}
    back = checkpoints.restore(tmp_path, jax.tree.map(jnp.zeros_like, {**tree, "key": None}) | {"key": tree["key"]})
    assert back["b"][0].dtype == jnp.bfloat16
    np.testing.assert_array_equal(back["a"], tree["a"])
    assert jax.random.bits(back["key"]) == jax.random.bits(tree["key"])
    checkpoints.save(tmp_path, 9, tree, {})
    assert {path.name for path in tmp_path.iterdir()} == {"6", "9"}


def test_a_folder_without_a_checkpoint_says_so(tmp_path):
    assert checkpoints.newest(tmp_path / "nowhere") is None
    assert not (tmp_path / "nowhere").exists()
    with pytest.raises(ValueError, match="no checkpoint"):
        checkpoints.restore(tmp_path, {"a": jnp.ones(2)})


KILLED = """
import json, sys
import numpy as np
from flax import nnx
from attention_jax.models import CausalLM
from attention_jax.training import Recipe, train

model = CausalLM(vocab=16, width=8, depth=1, heads=2, mixer=sys.argv[1], dropout=0.1, rngs=nnx.Rngs(0))
text = np.random.default_rng(0).integers(0, 16, 2000).astype(np.uint8)
recipe = Recipe(steps=30, batch=4, length=9, learning_rate=1e-2, warmup=3)
folder = sys.argv[2] if len(sys.argv) > 2 else None
for now in train(model, text, recipe, report_every=1, folder=folder, save_every=4):
    print(now.step, flush=True)
leaves = nnx.to_flat_state(nnx.state(model, nnx.Param))
print(json.dumps({".".join(map(str, path)): np.asarray(leaf[...]).tobytes().hex() for path, leaf in leaves}))
"""


def start(*arguments):
    """The program above in a process of its own, which finds its compiled step in the cache of these tests."""
    folder = str(pathlib.Path(training.__file__).parents[1])
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")]),
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.3",
    }
    command = [sys.executable, "-c", KILLED, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def finish(*arguments):
    """What the program said: (the steps it took, its parameters)."""
    with start(*arguments) as process:
        *steps, parameters = process.stdout
    assert process.returncode == 0
    return [int(step) for step in steps], json.loads(parameters)


@pytest.mark.slow  # four processes, each of which imports and compiles
def test_a_run_killed_twice_and_resumed_ends_with_the_bits_of_one_never_interrupted(tmp_path):
    runs = []
    for last in (6, 18):
        runs.append([])
        with start("attention", tmp_path) as process:
            for line in process.stdout:
                runs[-1].append(int(line))
                if runs[-1][-1] == last:
                    process.send_signal(signal.SIGKILL)
                    break
        assert process.returncode == -signal.SIGKILL
    steps, parameters = finish("attention", tmp_path)
    runs.append(steps)
    assert runs[0] == list(range(1, 7))
    for before, after in itertools.pairwise(runs):  # each went on from a checkpoint, of which there is one in 4 steps
        assert before[-1] - 4 < after[0] <= before[-1] + 5
        assert after[0] % 4 == 1
    assert runs[-1][-1] == 30
    whole, expected = finish("attention")
    assert whole == list(range(1, 31))
    assert parameters == expected


def test_settings_that_json_changes_are_still_the_same_run(tmp_path):
    def run():
        model = CausalLM(width=8, depth=1, heads=1, mixer="elman", rngs=nnx.Rngs(0))
        recipe = Recipe(2, batch=2, length=8)
        return [
            p.step for p in train(model, np.zeros(99, np.uint8), recipe, folder=tmp_path, settings={"sizes": (1, 2)})
        ]

    assert run() == [1, 2]
    assert run() == []


def test_a_folder_that_is_a_file_is_refused_before_work_starts(tmp_path):
    (tmp_path / "file").write_text("")
    model = CausalLM(width=8, depth=1, heads=1, mixer="elman", rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="is a file"):
        next(train(model, np.zeros(99, np.uint8), Recipe(2, batch=2, length=8), folder=tmp_path / "file"))
