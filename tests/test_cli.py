"""The command line: exit statuses, one clear line for a usage error, platforms, missing extras, signals."""

import importlib.metadata
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import pytest

import attention_jax
from attention_jax import cli, models
from attention_jax.cli import devices, main, names, plots, remembering, stopping

ROOT = pathlib.Path(__file__).parent.parent


def command(*words, **options):
    options.setdefault("env", os.environ | {"JAX_PLATFORMS": "cpu"})
    line = [sys.executable, "-m", "attention_jax", *map(str, words)]
    return subprocess.run(line, capture_output=True, text=True, check=False, cwd=ROOT, timeout=300, **options)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "COMMAND"),
        (["teach"], "'bench', 'compare', 'memory', 'verify'"),
        (["verify", "--fast"], "--fast"),
        (["verify", "--platform", "abacus"], "'cpu', 'cuda', 'tpu'"),
        (["compare", "--budget", "0"], "positive number of seconds"),
        (["compare", "--budget", "nan"], "positive number of seconds"),
        (["compare", "--budget", "soon"], "positive number of seconds"),
        (["compare", "--seed", "-1"], "whole number"),
        (["compare", "--mixers", "attention", "mamba"], "'attention', 'elman', 'gru', 'lstm', 'linear'"),
    ],
)
def test_a_usage_error_is_one_line_on_stderr_and_status_2(words, said, capsys):
    assert main(words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("attention-jax: ")
    assert said in printed.err
    assert printed.err.count("\n") == 1


def test_help_and_version_end_with_status_0(capsys):
    assert main(["--help"]) == 0
    assert "compare" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"attention_jax {attention_jax.__version__}\n"


def test_a_platform_that_jax_does_not_find_is_named_with_status_2():
    ran = command("verify", "--platform", "cuda", env=os.environ | {"JAX_PLATFORMS": ""})
    assert ran.returncode == 2
    assert ran.stdout == ""
    assert "--platform cuda: JAX finds no such device" in ran.stderr.splitlines()[-1]


def test_an_accelerator_extra_without_its_device_gets_a_line_unless_the_cpu_was_asked_for(monkeypatch, capsys):
    ours = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "9.9" if name == "jax-cuda12-plugin" else ours(name)
    )
    assert jax.default_backend() == "cpu"
    devices.choose_platform(None)
    said = capsys.readouterr().err
    assert '"cuda12"' in said
    assert "jax-cuda12-plugin 9.9" in said
    assert "running on the CPU" in said
    devices.choose_platform("cpu")
    assert capsys.readouterr().err == ""


def without(*modules):
    """The environment of a Python that lacks these modules."""
    hide = (
        "import sys\n"
        "class Lacking:\n"
        "    def __init__(self, finder): self.finder = finder\n"
        "    def __getattr__(self, name): return getattr(self.finder, name)\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        return None if name.split('.')[0] in {modules!r} else self.finder.find_spec(name, path, target)\n"
        "sys.meta_path[:] = map(Lacking, sys.meta_path)\n"
        "sys.argv[0] = 'attention-jax'\n"
        "from attention_jax.cli import main\n"
        "sys.exit(main())\n"
    )
    return lambda *words: subprocess.run(
        [sys.executable, "-c", hide, *words], capture_output=True, text=True, check=False, cwd=ROOT, timeout=300
    )


@pytest.mark.parametrize("module", ["flax", "optax", "orbax", "rich", "matplotlib", "jinja2"])
def test_compare_without_its_extra_says_which_with_status_2(module):
    ran = without(module)("compare")
    assert ran.returncode == 2
    assert ran.stderr.count("\n") == 1
    assert f"({module}" in ran.stderr
    assert "pip install 'attention_jax[cli]'" in ran.stderr


def test_verify_runs_with_the_core_install_alone():
    core_only = without("flax", "optax", "orbax", "rich", "matplotlib", "jinja2", "chex", "torch")
    ran = core_only("verify")
    assert ran.returncode == 0, ran.stderr
    assert "torch is not installed" in ran.stderr


def test_a_name_that_is_not_utf8_is_an_input_error(capsys):
    assert main(["compare", "--out", "report\udcff"]) == 2
    assert "is not UTF-8" in capsys.readouterr().err


@pytest.mark.skipif(not pathlib.Path("/dev/full").exists(), reason="no /dev/full here")
def test_results_that_cannot_be_written_are_status_2_without_a_traceback():
    with open("/dev/full", "w") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "attention_jax", "verify"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert ran.returncode == 2
    assert "stdout cannot be written" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_mixers_are_called_by_the_same_names_everywhere():
    assert cli.MIXERS == models.MIXERS == tuple(names.MIXERS)
    assert set(names.COLOURS) == set(plots.MARKERS) == set(models.MIXERS)
    assert set(remembering.pick(list(models.MIXERS))) <= set(models.MIXERS)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_any_command_with_status_130_and_no_traceback(sent):
    slow = (
        "import sys, time\n"
        "from attention_jax import cli\n"
        "class Command:\n"
        "    def run(self, options):\n"
        "        print('started', flush=True)\n"
        "        time.sleep(60)\n"
        "cli._load = lambda command: Command()\n"
        "sys.exit(cli.main(['verify']))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", slow], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    time.sleep(0.1)
    process.send_signal(sent)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said == "attention-jax: interrupted\n"


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_comes_inside_a_callback_is_not_lost(sent):
    class Callback:
        def __del__(self):  # an exception raised here is printed and forgotten
            os.kill(os.getpid(), sent)
            time.sleep(0.01)

    before = signal.getsignal(sent)
    with stopping.heeded():
        Callback()
        time.sleep(0.01)
        with pytest.raises(KeyboardInterrupt):
            stopping.stop_if_asked()
    assert signal.getsignal(sent) is before
    stopping.stop_if_asked()


def test_a_second_signal_does_not_wait_and_none_disturbs_the_writing():
    with stopping.heeded():
        with stopping.undisturbed():
            os.kill(os.getpid(), signal.SIGINT)
        stopping.stop_if_asked()
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)


def test_an_error_of_ours_is_not_taken_for_a_missing_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "attention_jax.cli.compare", None)
    with pytest.raises(ModuleNotFoundError):
        main(["compare"])
