"""How well a model predicts a set of examples."""

import math

from uma.frozen import dataclass


@dataclass(frozen=True, slots=True)
class Score:
    """The mean loss of a supervised token (natural logarithm) over ``rows`` examples."""

    loss: float
    tokens: int
    rows: int

    @property
    def perplexity(self) -> float:
        """``exp(loss)``; infinite where that is no float."""
        return math.exp(self.loss) if self.loss < 700 else math.inf
