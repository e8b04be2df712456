"""Attention for JAX: right in every corner, differentiable in every way."""

from .dispatch import attention as attention
from .dispatch import plan as plan
from .masks import Causal as Causal
from .masks import Dense as Dense
from .masks import Full as Full
from .masks import Lengths as Lengths
from .masks import Prefix as Prefix
from .masks import Segments as Segments
from .masks import Where as Where
from .masks import Window as Window
from .multihead import init_mha as init_mha
from .multihead import mha as mha
from .rotary import Rotary as Rotary

__version__ = "0.1.0"
