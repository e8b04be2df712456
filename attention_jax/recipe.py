"""How long, how fast and on how much at a time a model is trained: the numbers of a run in one place."""

import dataclasses
import math
import operator

from .errors import explain


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Everything a training run depends on besides the model and the text. Equal recipes give equal bits.

    The defaults suit a `models.CausalLM` of default size (width 128, 2 blocks, 460,000 parameters) on half a megabyte
    of English: within 100 steps it falls below the bigram table, 3.34 bits per unseen byte of the manual of Python
    3.11, with attention and with a GRU. Batches are small because at equal cost more steps teach more.

    Attributes:
        steps: length of the run, and of the learning-rate schedule.
        batch: windows per step.
        length: tokens per window; the model is scored on `length` - 1 of them.
        learning_rate: its peak.
        warmup: steps of linear rise before the cosine falls to a tenth of the peak.
        clip: largest norm of the gradient over all parameters.
        weight_decay: AdamW's, on all parameters.
        seed: of the order of the windows.
    """

    steps: int
    batch: int = 8
    length: int = 128
    learning_rate: float = 3e-3
    warmup: int = 20
    clip: float = 1.0
    weight_decay: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "length", "warmup", "seed"):  # NumPy's numbers too; checkpoints hold Python's
            object.__setattr__(self, name, operator.index(getattr(self, name)))
        for name in ("learning_rate", "clip", "weight_decay"):
            object.__setattr__(self, name, float(getattr(self, name)))
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(explain("Recipe", f"{name} must be finite, not negative.", dataclasses.asdict(self)))
        if self.steps < 1 or self.batch < 1 or self.length < 2 or self.warmup < 0:
            rule = "steps and batch are at least 1, length at least 2, warmup at least 0."
            raise ValueError(explain("Recipe", rule, dataclasses.asdict(self)))

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / (self.warmup + 1)
        share = min((step - self.warmup) / max(self.steps - self.warmup, 1), 1.0)
        return self.learning_rate * (0.55 + 0.45 * math.cos(math.pi * share))
