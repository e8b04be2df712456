"""Right answers where other libraries went wrong: inputs, options and literal answers, one JSON file per subject.

`attention.json` holds the cases about attention, masks, dtypes and transformations. Left out until `score=` exists:
SC-01, SC-03 and SC-04, which cap the logits. Cases about caches and generation come with those.
"""

import dataclasses
import json
import pathlib
from typing import Any

import numpy as np
from oracle import exact


@dataclasses.dataclass(frozen=True)
class Case:
    """One case, its inputs evaluated. Arrays are (batch, length, heads, width)."""

    id: str
    description: str
    operation: str
    inputs: dict[str, np.ndarray]
    options: dict[str, Any]
    expected: dict[str, np.ndarray]
    tolerance: dict[str, float]

    def __repr__(self) -> str:
        return self.id


def load(subject: str) -> dict[str, Case]:
    """The cases of a subject by id; one for each convention where a case leaves a choice, as `id:convention`."""
    data = json.loads((pathlib.Path(__file__).parent / f"{subject}.json").read_text(encoding="utf-8"))
    cases = {}
    for entry in data["cases"]:
        call, expected = entry["call"], entry["expected"]
        inputs, options = evaluate(entry["inputs"]), call.get("options", {})
        tolerance = entry.get("tolerance", data["default_tolerance"])
        variants = {entry["id"]: (options, expected)}
        if expected["type"] == "by_convention":
            conventions = call["conventions"]
            variants = {
                f"{entry['id']}:{n}": ({**options, **conventions[n]}, e) for n, e in expected["conventions"].items()
            }
        for name, (chosen, answer) in variants.items():
            resolved = {key: _resolve(value, inputs) for key, value in chosen.items()}
            arrays = _arrays(answer)
            cases[name] = Case(name, entry["description"], call["op"], inputs, resolved, arrays, tolerance)
    return cases


def evaluate(expressions: dict[str, str]) -> dict[str, np.ndarray]:
    """The inputs of a case, in order; later expressions may use earlier names."""
    names: dict[str, Any] = {"np": np, "R": exact, "inf": np.inf, "nan": np.nan}
    for name, expression in expressions.items():
        names[name] = eval(expression, names)
    return {name: names[name] for name in expressions}


def _resolve(value: Any, inputs: dict[str, np.ndarray]) -> Any:
    return inputs[value[1:]] if isinstance(value, str) and value.startswith("@") else value


def _arrays(answer: dict[str, Any]) -> dict[str, np.ndarray]:
    if answer["type"] != "arrays":
        return {}
    literal = {name: np.asarray(value, np.float64) for name, value in answer.items() if name not in ("type", "shapes")}
    shapes = answer["shapes"]
    return {name: value.reshape(shapes.get(name, value.shape)) for name, value in literal.items()}
