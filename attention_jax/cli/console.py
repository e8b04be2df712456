"""What commands print: results to stdout, everything else to stderr."""

import json
import os
import sys
from typing import Any


class InputError(Exception):
    """The command line or an input is wrong; its text is all that the user sees, and the exit status is 2."""


def say(line: str) -> None:
    """A line for the person who waits."""
    print(line, file=sys.stderr, flush=True)


def show(results: str) -> None:
    """The results of a command, to stdout."""
    try:
        print(results, flush=True)
    except OSError as error:  # a full disk, a reader that has left
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - or Python complains once more at exit
        raise InputError(f"stdout cannot be written ({error.strerror or error})") from None


def as_json(results: Any) -> str:
    """Results as JSON, two spaces deep, with nothing that JSON cannot say (no NaN)."""
    return json.dumps(results, indent=2, ensure_ascii=False, allow_nan=False)
