"""Cost of a pack in training.

It is the sum over its documents of an integer function of length and images.

`Balance` uses the order of these numbers, `OnlinePacker(max_cost=)` their sums. Only integers: an order must not depend
on how a library rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import index
from typing import TypeAlias

from savable_pipeline.core.on_error import from_user_code
from savable_pipeline.errors import EncodeError

Cost: TypeAlias = Callable[[int, int], int]
Size: TypeAlias = tuple[int, int]  # of a document: its length in tokens and its number of images

_LIMIT = 1 << 62  # costs, and sums of them, fit into 8 bytes of a state


def waiting_share(steps: Iterable[Sequence[int]]) -> float:
    """Return the fraction of time that ranks wait for the slowest.

    A batch takes as long as its cost.

    Each step is the costs of its ranks' batches: 2 and 4 are 0.25 of waiting.
    """
    sums = [(sum(costs), max(costs) * len(costs)) for costs in steps]
    taken = sum(whole for _, whole in sums)
    return 1 - sum(spent for spent, _ in sums) / taken if taken else 0.0


@dataclass(frozen=True, slots=True)
class _AttentionCost:
    hidden: int
    per_image: int

    def __call__(self, length: int, images: int) -> int:
        return length * length + 6 * self.hidden * length + self.per_image * images

    def __str__(self) -> str:
        more = f", per_image={self.per_image}" if self.per_image else ""
        return f"attention_cost(hidden={self.hidden}{more})"


def attention_cost(*, hidden: int, per_image: int = 0) -> Cost:
    """Return a cost function for documents in a transformer.

    A document of n tokens costs the integer n² + 6 · `hidden` · n.

    n² stands for attention within the document, the rest for the layers' matrices. For another model write a function
    of your own of a document's length and number of images.

    Args:
        hidden: The hidden size of the model, at least 1.
        per_image: Added for each image, in the unit of one pair of tokens.

    Returns:
        The function `cost(length, images)`.

    Raises:
        ValueError: `hidden` is below 1, or `per_image` below 0.

    Example:
        >>> cost = sp.attention_cost(hidden=2048)
        >>> cost(1000, 0), cost(2000, 0)
        (13288000, 28576000)
    """
    if index(hidden) < 1 or index(per_image) < 0:
        raise ValueError(
            f"attention_cost: hidden must be at least 1 and per_image at least 0, not {hidden}, {per_image}"
        )
    return _AttentionCost(index(hidden), index(per_image))


def check_cost(stage: str, cost: object) -> None:
    """Raise ValueError unless this is a function."""
    if not callable(cost):
        raise ValueError(f"{stage}: cost must be a function such as sp.attention_cost(hidden=2048), not {cost!r}")


class Costing:
    """Cost function of one stage.

    Raises ValueError unless it is a function, `EncodeError` if it fails.
    """

    def __init__(self, stage: str, cost: Cost) -> None:
        check_cost(stage, cost)
        self._stage, self._cost = stage, cost

    @property
    def name(self) -> str:
        """The function's name in a saved state."""
        if isinstance(self._cost, _AttentionCost):
            return str(self._cost)
        return str(getattr(self._cost, "__qualname__", type(self._cost).__qualname__))

    def of(self, length: int, images: int) -> int:
        """The cost of one document."""
        try:
            cost = index(self._cost(length, images))
            if not 0 <= cost < _LIMIT:
                raise ValueError(
                    f"{cost} is not between 0 and 2**62. Divide it, because only the order of costs matters."
                )
        except Exception as error:
            raise EncodeError(
                f"{self._stage}: cost {self.name}({length}, {images}) failed: {type(error).__name__}: {error}. "
                "Return an int."
            ) from from_user_code(error)
        return cost

    def of_pack(self, sizes: Iterable[Size]) -> int:
        """The cost of a pack of documents of these lengths and images."""
        return min(sum(self.of(length, images) for length, images in sizes), _LIMIT)
