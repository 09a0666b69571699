"""Changes of a sample's reward before advantages are computed. Imports no torch."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class OverlongPenalty:
    """DAPO's soft overlong punishment: Yu et al. 2025, equation 13, times `factor`.

    0 for responses of up to `longest - buffer` tokens, then falling linearly to `-factor` at `longest` tokens, and
    `-factor` beyond. In the paper's symbols, `longest` is L_max and `buffer` L_cache; its factor is 1.
    """

    longest: int  # tokens
    buffer: int  # tokens
    factor: float  # in units of reward

    @classmethod
    def if_given(cls, longest: int, buffer: int | None, factor: float) -> OverlongPenalty | None:
        """None without a buffer."""
        return None if buffer is None else cls(longest, buffer, factor)

    def __call__(self, length: int) -> float:
        """What is added to the reward of a response of so many tokens, at most 0."""
        over = length - (self.longest - self.buffer)
        return -self.factor * min(max(over / self.buffer, 0.0), 1.0)
