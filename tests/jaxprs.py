"""Reading jaxprs."""

import jax

from attention_jax.kernels.rules import code_of


def equations(jaxpr):
    """Every equation, of inner jaxprs too."""
    for equation in jaxpr.eqns:
        yield equation
        if (code := code_of(equation)) is not None:
            yield from equations(code)
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from equations(inner)
