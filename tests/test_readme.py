"""The README is true: its code runs, its map shows every file, and it is short."""

import pathlib
import re

import pytest

import attention_jax

README = (pathlib.Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
PACKAGE = pathlib.Path(attention_jax.__file__).parent


def test_the_code_runs_as_it_stands(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    found = {}
    exec(code, found)
    assert found["out"].shape == found["gradient"].shape == (2, 8, 1024, 64)
    assert found["y"].shape == (2, 1024, 512)
    assert "implementation" in capsys.readouterr().out


@pytest.mark.parametrize("path", sorted(path for path in PACKAGE.glob("*") if path.name not in ("__main__.py",)))
def test_every_file_of_the_package_stands_in_the_map(path):
    if path.suffix == ".py":
        assert re.search(rf"\b{path.stem}(\.py)?\b", README)
    elif path.is_dir() and path.name != "__pycache__":
        assert f"  {path.name}/" in README


def test_it_has_at_most_150_lines():
    assert len(README.splitlines()) <= 150
