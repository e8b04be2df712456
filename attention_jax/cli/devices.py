"""Which device a command runs on, and how a report names it."""

import importlib.metadata
import os
import platform as host
from collections.abc import Iterable

import jax

from .console import InputError, say

ACCELERATORS = {  # what the extras install
    "jax-cuda12-plugin": "cuda12",
    "jax-cuda13-plugin": "cuda13",
    "libtpu": "tpu",
}


def choose_platform(platform: str | None) -> None:
    """Make JAX use `platform`, and say so where an installed accelerator was not found.

    Args:
        platform: "cpu", "cuda" or "tpu"; None: what JAX prefers.

    Raises:
        InputError: JAX finds no such device.
    """
    if platform is not None:
        jax.config.update("jax_platforms", platform if platform == "cpu" else f"{platform},cpu")
        try:
            jax.devices(platform)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise InputError(f"--platform {platform}: JAX finds no such device here ({reason})") from None
    elif jax.default_backend() == "cpu":
        for package in filter(_installed, ACCELERATORS):
            say(
                f'attention-jax: the extra "{ACCELERATORS[package]}" is installed ({package} '
                f"{importlib.metadata.version(package)}) but JAX found no such device: running on the CPU "
                "(--platform cpu hides this line)"
            )


def describe() -> dict[str, object]:
    """Device and versions, for a report."""
    device = jax.devices()[0]
    packages = ("attention_jax", "jax", "jaxlib", "numpy", "flax", "optax")
    return {
        "platform": jax.default_backend(),
        "device": device.device_kind if jax.default_backend() != "cpu" else _processor(),
        "cpu_cores": cores(),
        "system": f"{host.system()} {host.machine()}",
        "python": host.python_version(),
        "versions": versions(packages),
    }


def cores() -> int | None:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def versions(packages: Iterable[str]) -> dict[str, str]:
    """The versions of those packages that are installed."""
    return {name: importlib.metadata.version(name) for name in packages if _installed(name)}


def _installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):  # not Linux, or a processor without this line
        return host.processor() or host.machine()
