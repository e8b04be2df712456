"""Ctrl-C and SIGTERM, heeded where it is safe.

Python raises KeyboardInterrupt wherever it happens to be. In the middle of JAX that was seen to get lost (raised in a
callback of the garbage collector, it is printed and forgotten) and to crash the process when it ended. So a long job
only notes the signal, and asks for it between two pieces of work.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_asked = False


def stop_if_asked() -> None:
    """Raise KeyboardInterrupt here if a signal has come since `heeded` began."""
    if _asked:
        raise KeyboardInterrupt


@contextmanager
def heeded() -> Iterator[None]:
    """Note the first signal for `stop_if_asked`; a second one, from somebody who cannot wait, raises at once."""
    global _asked
    _asked = False

    def note(*_: Any) -> None:
        global _asked
        if _asked:
            raise KeyboardInterrupt
        _asked = True
        os.write(2, b"\nattention-jax: stopping after this step, to write what is done\n")  # print is not re-entrant

    try:
        with _handled(note):
            yield
    finally:
        _asked = False


@contextmanager
def undisturbed() -> Iterator[None]:
    """No signal cuts off what is done here: writing the results."""
    with _handled(signal.SIG_IGN):
        yield


@contextmanager
def _handled(handler: Any) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield
        return
    before = {each: signal.signal(each, handler) for each in SIGNALS}
    try:
        yield
    finally:
        for each, old in before.items():
            signal.signal(each, old)
