"""Attention for JAX: right in every corner, differentiable in every way."""

__version__ = "0.1.0"
