"""Cost of a pack in training.

It is the sum over the documents of a function of their length and number of images. `Balance` orders packs by their
cost, and `OnlinePacker(max_cost=)` limits it. Costs are integers, because an order must not depend on rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import index
from typing import TypeAlias

from savable_pipeline.core.on_error import from_user_code
from savable_pipeline.errors import EncodeError
from savable_pipeline.stages.stage_settings import function_name

Cost: TypeAlias = Callable[[int, int], int]
Size: TypeAlias = tuple[int, int]  # length in tokens and number of images of a document

_LIMIT = 1 << 62  # costs, and sums of them, fit into 8 bytes of a state


def waiting_share(steps: Iterable[Sequence[int]]) -> float:
    """Return the fraction of time that ranks wait for the slowest rank.

    Each step is the costs of the batches of all ranks, which count as their durations. A step of costs 2 and 4 has the
    fraction 0.25.
    """
    times = [(sum(costs), max(costs) * len(costs)) for costs in steps]  # rank-seconds of work, and of work and waiting
    total = sum(in_step for _, in_step in times)
    return 1 - sum(work for work, _ in times) / total if total else 0.0


@dataclass(frozen=True, slots=True)
class _AttentionCost:
    hidden: int
    per_image: int

    def __call__(self, length: int, images: int) -> int:
        return length * length + 6 * self.hidden * length + self.per_image * images

    def __str__(self) -> str:
        per_image = f", per_image={self.per_image}" if self.per_image else ""
        return f"attention_cost(hidden={self.hidden}{per_image})"


def attention_cost(*, hidden: int, per_image: int = 0) -> Cost:
    """Return a cost function for documents in a transformer.

    A document of n tokens costs the integer n² + 6 · `hidden` · n.

    n² is for attention within the document, and 6 · `hidden` · n for the layers' matrices. For another model write your
    own function of a document's length and number of images.

    Args:
        hidden: The hidden size of the model, at least 1.
        per_image: The cost of an image, in the same unit, which is the attention of one pair of tokens.

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
    """Raise ValueError unless `cost` is a function."""
    if not callable(cost):
        raise ValueError(f"{stage}: cost must be a function such as sp.attention_cost(hidden=2048), not {cost!r}")


class Costing:
    """Cost function of one stage.

    A failure is raised as an `EncodeError` that names the stage.
    """

    def __init__(self, stage: str, cost: Cost) -> None:
        check_cost(stage, cost)
        self._stage, self._cost = stage, cost

    @property
    def name(self) -> str:
        """The name of the function in a saved state."""
        return str(self._cost) if isinstance(self._cost, _AttentionCost) else function_name(self._cost)

    def of(self, length: int, images: int) -> int:
        """Return the cost of one document."""
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
        """Return the cost of a pack of documents with these lengths and numbers of images."""
        return min(sum(self.of(length, images) for length, images in sizes), _LIMIT)
