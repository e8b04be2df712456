"""The wheel that a user installs: what it holds, and that it verifies itself with the core dependencies alone."""

import importlib.metadata
import os
import pathlib
import re
import subprocess
import sys
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parent.parent
VERIFIED = "first row: 5.6667\nmatrix / rowwise / official: OK\ncausal / official: OK\n"


def run(*line, **options):
    ran = subprocess.run(list(map(str, line)), capture_output=True, text=True, check=False, timeout=300, **options)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def name_of(requirement):
    return re.match(r"[\w.-]+", requirement)[0].replace("_", "-").lower()


def needed(requirements):
    """Names of the distributions that these requirements bring, extras left out."""
    names, waiting = set(), [name_of(each) for each in requirements if "extra ==" not in each]
    while waiting:
        name = waiting.pop()
        if name not in names and installed(name):
            names.add(name)
            more = importlib.metadata.requires(name) or []
            waiting += [name_of(each) for each in more if "extra ==" not in each]
    return names


def installed(name):
    try:
        return bool(importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:  # of another platform or Python
        return False


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT)
    (made,) = folder.glob("*.whl")
    return made


def test_the_wheel_holds_every_module_and_the_template_of_the_report(wheel):
    held = set(zipfile.ZipFile(wheel).namelist())
    tree = {path.relative_to(ROOT).as_posix() for path in (ROOT / "attention_jax").rglob("*.py")}
    assert tree <= held
    assert {"attention_jax/py.typed", "attention_jax/cli/templates/report.html"} <= held
    assert not [name for name in held if name.startswith(("tests/", "examples/"))]
    assert [name for name in held if name.endswith("licenses/LICENSE")]


@pytest.mark.slow
def test_the_wheel_in_a_fresh_environment_verifies_itself(wheel, tmp_path):
    """The environment holds what the wheel's metadata asks for, linked from this one so that no network is needed."""
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", wheel)
    site = pathlib.Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    with zipfile.ZipFile(wheel) as held:
        (metadata,) = [name for name in held.namelist() if name.endswith("METADATA")]
        requirements = importlib.metadata.Distribution.at(site / pathlib.Path(metadata).parent).requires or []
    for name in needed(requirements):
        files = importlib.metadata.distribution(name).files or []
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(pathlib.Path(str(files[0].locate())).parents[len(files[0].parts) - 1] / top)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    assert run(
        python, "-c", "import attention_jax; print(attention_jax.__file__)", cwd=elsewhere, env=clean
    ).startswith(str(site))
    missing = (
        "import importlib.util as u; print([m for m in ('flax', 'rich', 'matplotlib', 'torch') if u.find_spec(m)])"
    )
    assert run(python, "-c", missing, cwd=elsewhere, env=clean) == "[]\n"
    run(python, "-m", "pip", "check", cwd=elsewhere, env=clean)
    command = tmp_path / "venv" / "bin" / "attention-jax"
    for line in ([command], [python, "-m", "attention_jax"]):
        assert run(*line, "verify", cwd=elsewhere, env=clean) == VERIFIED
