"""The command line: `attention-jax COMMAND`, one file per command; the only place in the package that prints.

Exit status: 0; 1 a check failed; 2 usage or input; 130 interrupted (SIGTERM likewise).
"""

import argparse
import importlib
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from .. import __version__
from .budget import seconds_since_start
from .console import InputError, say
from .devices import choose_platform

COMMANDS = {
    "bench": "time attention, RNNs or language models beside other libraries",
    "compare": "train attention and RNNs on the same text, time them, and write a report",
    "memory": "show what attention allocates as its text grows, with the matrix of scores and without",
    "verify": "check a hand-computed example against row-by-row and official results",
}
EXTRAS = {"bench": "cli", "compare": "cli"}
MIXERS = ("attention", "elman", "gru", "lstm", "linear")
PASSED, FAILED, WRONG_INPUT, INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the words after the program's name; None: those of this process.

    Returns:
        The exit status.
    """
    try:
        with _sigterm_like_ctrl_c():
            words = list(sys.argv[1:] if argv is None else argv)
            if strange := [word for word in words if any("\ud800" <= letter <= "\udfff" for letter in word)]:
                raise InputError(f"{strange[0]!a} is not UTF-8, as names of files must be")
            options = _parser().parse_args(words)
            options.words = words
            options.begun = time.perf_counter() - (seconds_since_start() if argv is None else 0.0)
            choose_platform(options.platform)
            return _load(options.command).run(options)
    except InputError as error:
        say(f"attention-jax: {error}")
        return WRONG_INPUT
    except KeyboardInterrupt:
        say("attention-jax: interrupted")
        return INTERRUPTED
    except SystemExit as leave:  # argparse, after --help and --version
        return PASSED if leave.code is None else int(leave.code)


def _load(command: str):
    try:
        return importlib.import_module(f"attention_jax.cli.{command}")
    except ModuleNotFoundError as missing:
        if command not in EXTRAS or (missing.name or "").startswith("attention_jax"):
            raise
        extra = EXTRAS[command]
        raise InputError(
            f'{command} needs the extra "{extra}" ({missing.name} is not installed): '
            f"pip install 'attention_jax[{extra}]'"
        ) from None


class _Parser(argparse.ArgumentParser):
    """Says a usage error in one line."""

    def error(self, message: str) -> NoReturn:
        command = self.prog.removeprefix("attention-jax").strip()
        raise InputError(f"{command}: {message}" if command else message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="attention-jax", description="Attention for JAX, and how it compares with RNNs.")
    parser.add_argument("--version", action="version", version=f"attention_jax {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    parsers = {
        name: commands.add_parser(name, help=what, description=f"{name}: {what}.") for name, what in COMMANDS.items()
    }
    for each in parsers.values():
        each.add_argument("--json", action="store_true", help="print the results as JSON instead of text")
        each.add_argument("--platform", choices=("cpu", "cuda", "tpu"), help="where to run (default: JAX's choice)")
    _bench_arguments(parsers["bench"])
    _compare_arguments(parsers["compare"])
    _memory_arguments(parsers["memory"])
    return parser


def _compare_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--budget", type=_seconds, default=225.0, metavar="SECONDS", help="time for the whole job (225)"
    )
    parser.add_argument(
        "--mixers",
        nargs="+",
        choices=MIXERS,
        default=["attention", "gru", "linear"],
        metavar="MIXER",
        help=f"what mixes the positions of the models: {', '.join(MIXERS)} (attention gru linear)",
    )
    parser.add_argument("--text", nargs="+", metavar="FILE", help="UTF-8 text to train on (Python's reference manual)")
    parser.add_argument("--seed", type=_seed, default=0, help="of parameters and batches (0)")
    parser.add_argument("--out", default="report", metavar="FOLDER", help="folder of the report (report)")


def _bench_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--what", choices=("attention", "rnn", "lm"), default="attention", help="(attention)")
    parser.add_argument("--rounds", type=_count, default=7, metavar="N", help="how often each runs, in turn (7)")
    parser.add_argument("--out", metavar="FOLDER", help="folder for the results as JSON and as a picture (none)")
    only = parser.add_argument_group("for attention only")
    only.add_argument("--dtype", choices=("float32", "bfloat16"), help="(float32)")
    only.add_argument(
        "--shapes", nargs="+", type=_shape, metavar="BxHxTxD", help="as 1x16/4x2048x64, with 4 key/value heads (many)"
    )
    only.add_argument("--masks", nargs="+", choices=("full", "causal", "window", "segments"), help="(all)")


def _memory_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--heads", type=_count, default=1, metavar="N", help="query and key/value heads (1)")
    parser.add_argument("--batch", type=_count, default=1, metavar="N", help="examples (1)")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="(bfloat16)")
    parser.add_argument(
        "--lengths", nargs="+", type=_count, default=[1000, 8000, 32000], metavar="T", help="(1000 8000 32000)"
    )


def _count(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"a whole number from 1 to {2**31 - 1} is needed, not {text!r}")
    return int(text)


def _shape(text: str) -> tuple[int, ...]:
    if not (found := re.fullmatch(r"(\d{1,6})x(\d{1,6})(?:/(\d{1,6}))?x(\d{1,9})x(\d{1,6})", text)):
        raise argparse.ArgumentTypeError(f"sizes like 1x8x2048x64 or 1x16/4x2048x64 are needed, not {text!r}")
    batch, heads, kv_heads, length, width = (int(size or found[2]) for size in found.groups())
    if 0 in (batch, heads, kv_heads, length, width) or heads % kv_heads:
        raise argparse.ArgumentTypeError(f"no size is 0 and key/value heads divide the heads, unlike in {text!r}")
    return batch, heads, kv_heads, length, width


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"a positive number of seconds is needed, not {text!r}")
    return seconds


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**31:
        raise argparse.ArgumentTypeError(f"a whole number from 0 to {2**31 - 1} is needed, not {text!r}")
    return int(text)


@contextmanager
def _sigterm_like_ctrl_c() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
