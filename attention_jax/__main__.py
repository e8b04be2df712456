"""`python -m attention_jax` is the command `attention-jax`."""

import sys

from attention_jax.cli import main

if __name__ == "__main__":
    sys.exit(main())
