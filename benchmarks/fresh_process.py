"""What a process of its own pays: seconds to compile, and the growth of its peak resident size.

Each figure is the median of fresh processes without a compile cache; the tiled kernel, causal, H=4, D=64, float32,
the pullback of `jax.vjp` on given cotangents. Resident size: the process's peak less its size when the inputs stand,
as the kernel of Linux tells them.

    python benchmarks/fresh_process.py --processes 5
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

LENGTHS = (1024, 4096, 32768)
DIRECTIONS = ("forward", "gradient")


def in_child(length: int, direction: str) -> dict[str, float]:
    """Seconds to compile, MiB that running adds, and MiB of temporaries that the compiler tells."""
    import jax
    import jax.numpy as jnp

    import attention_jax as aj
    from attention_jax.cli.memory import temporaries

    def attend(q, k, v):
        return aj.attention(q, k, v, aj.Causal(), implementation="tiled")

    def gradient(q, k, v, cotangent):
        return jax.vjp(attend, q, k, v)[1](cotangent)

    arrays = [jax.random.normal(jax.random.key(n), (1, 4, length, 64), jnp.float32) for n in range(4)]
    fn, arrays = (attend, arrays[:3]) if direction == "forward" else (gradient, arrays)
    jax.block_until_ready(arrays)
    begin = time.perf_counter()
    lowered = jax.jit(fn).lower(*arrays)
    compiled = lowered.compile()
    seconds = time.perf_counter() - begin
    told = temporaries(lowered)
    before = _resident("VmRSS")
    with open("/proc/self/clear_refs", "w") as peak:
        peak.write("5")  # the peak counts anew from here
    jax.block_until_ready(compiled(*arrays))
    return {"seconds": seconds, "grown": _resident("VmHWM") - before, "told": told / 2**20}


def _resident(field: str) -> float:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) / 2**10 for line in lines if line.startswith(field))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(in_child(int(options.child[0]), options.child[1])))
        return
    environment = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    print(f"{'':>16}  compile s  resident MiB, results included  temporaries MiB")
    for direction in DIRECTIONS:
        for length in LENGTHS:
            command = [sys.executable, __file__, "--child", str(length), direction]
            runs = [
                subprocess.run(command, env=environment, check=True, capture_output=True)
                for _ in range(options.processes)
            ]
            found = [json.loads(run.stdout) for run in runs]
            seconds, grown, told = (statistics.median(each[name] for each in found) for name in found[0])
            print(f"{direction:>8} T={length:>5}  {seconds:>9.2f}  {grown:>30.0f}  {told:>16.1f}")


if __name__ == "__main__":
    main()
