"""The random numbers of an encoder: pinned for ever, and with the distributions they promise."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from savable_pipeline.core.keyed_random import word
from savable_pipeline.core.rng import Rng, _log, _normal_quantile

PARTS = (3, 1, 2)
GOLDEN = {
    "key": 6780931853406537990,
    "bits": 5757899639150662144,
    "random": 0.31213636488603247,
    "integers": [0, 0, 3, 312, 2878949819575331072, 5757899639150662144],
    "uniform": 0.1849545542022275,
    "normal": -0.4898038165466279,
    "normal(100, 15)": 92.65294275180058,
    "choice": "c",
    "permutation": [3, 0, 7, 6, 4, 1, 5, 2],
    "numpy": 4326801514352645393,
    "torch": 7361466738315094096,
    "python": 14330940049142024181,
}


def test_the_first_numbers_of_every_rng_method_equal_the_golden_values() -> None:
    assert Rng(7, PARTS).key == GOLDEN["key"]
    assert Rng(7, PARTS).bits() == GOLDEN["bits"]
    assert Rng(7, PARTS).random() == GOLDEN["random"]
    assert [Rng(7, PARTS).integers(n) for n in (1, 2, 10, 1000, 2**63, 2**64)] == GOLDEN["integers"]
    assert Rng(7, PARTS).uniform(-2.0, 5.0) == GOLDEN["uniform"]
    assert Rng(7, PARTS).normal() == GOLDEN["normal"]
    assert Rng(7, PARTS).normal(100.0, 15.0) == GOLDEN["normal(100, 15)"]
    assert Rng(7, PARTS).choice("abcdefgh") == GOLDEN["choice"]
    assert Rng(7, PARTS).permutation(8) == GOLDEN["permutation"]


def test_the_keys_of_numpy_torch_and_python_generators_equal_the_golden_values() -> None:
    rng = Rng(7, PARTS)
    assert [word(rng.key, -1 - i) for i in (1, 2, 3)] != [word(rng.key, i) for i in (0, 1, 2)]
    assert int(rng.numpy.bit_generator.random_raw()) == GOLDEN["numpy"]
    assert rng.torch.initial_seed() == GOLDEN["torch"]
    assert rng.python.getrandbits(64) == GOLDEN["python"]


def test_the_same_key_gives_the_same_numbers_and_another_gives_others() -> None:
    def numbers(rng: Rng) -> list[object]:
        own = [rng.random(), rng.integers(100), rng.normal(), rng.permutation(5), rng.choice("abc"), rng.uniform(1, 2)]
        return [*own, rng.numpy.random(), rng.python.random(), torch.rand(1, generator=rng.torch).item()]

    assert numbers(Rng(7, PARTS)) == numbers(Rng(7, PARTS))
    others = [Rng(8, PARTS), Rng(7, (0, 1, 2)), Rng(7, (3, 0, 2)), Rng(7, (3, 1, 0)), Rng(7, (1, 3, 2))]
    assert len({Rng(7, PARTS).bits(), *(rng.bits() for rng in others)}) == 6


def test_a_rekeyed_rng_starts_at_the_first_number_of_the_new_key() -> None:
    rng = Rng(7, (9, 9, 9))
    rng.random(), rng.numpy.random(), rng.python.random(), torch.rand(1, generator=rng.torch)
    rng.rekey(PARTS)
    fresh = Rng(7, PARTS)
    assert (rng.draws, rng.key) == (0, fresh.key)
    assert [rng.random(), rng.numpy.random(), rng.python.random()] == [
        fresh.random(),
        fresh.numpy.random(),
        fresh.python.random(),
    ]
    assert torch.equal(torch.rand(3, generator=rng.torch), torch.rand(3, generator=fresh.torch))


def test_draws_counts_words_and_restores_a_position() -> None:
    rng = Rng(7, PARTS)
    for _ in range(5):
        rng.random()
    assert rng.draws == 5
    assert Rng(7, PARTS, draws=5).random() == rng.random()


def test_generator_of_another_library_is_built_once() -> None:
    rng = Rng(7, PARTS)
    assert rng.numpy is rng.numpy and rng.torch is rng.torch and rng.python is rng.python
    assert rng.draws == 0  # and takes none of the words


@pytest.mark.parametrize("n", [1, 3, 7, 100])
def test_integers_below_a_small_n_are_equally_likely(n: int) -> None:
    rng, expected = Rng(n), 20_000 / n
    counts = np.bincount([rng.integers(n) for _ in range(20_000)], minlength=n)
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert len(counts) == n
    assert chi_square < n + 4 * math.sqrt(2 * n) + 8  # far beyond p = 0.001 for n - 1 degrees of freedom


def test_integers_are_without_bias_where_a_plain_product_would_be_biased() -> None:
    rng, n = Rng(5), 3 * 2**62  # of the 2**64 words a quarter is drawn again
    drawn = [rng.integers(n) >> 62 for _ in range(12_000)]
    assert rng.draws > 15_000
    assert (np.abs(np.bincount(drawn) - 4000) < 250).all()


@given(st.integers(0, 2**64 - 1), st.integers(1, 2**64))
def test_integers_stay_below_n(base: int, n: int) -> None:
    assert 0 <= Rng(base).integers(n) < n


@pytest.mark.parametrize("n", [0, -1, 2**64 + 1])
def test_integers_rejects_an_n_that_is_out_of_range(n: int) -> None:
    with pytest.raises(ValueError, match="1 ≤ n ≤ 2\\*\\*64"):
        Rng(0).integers(n)


def test_integers_accepts_numpy_integers_and_rejects_floats() -> None:
    assert Rng(7, PARTS).integers(np.int64(10)) == Rng(7, PARTS).integers(10)
    assert Rng(7, PARTS).permutation(np.int32(5)) == Rng(7, PARTS).permutation(5)
    with pytest.raises(TypeError):
        Rng(0).integers(2.5)  # type: ignore[arg-type]


def test_random_is_a_multiple_of_two_to_the_minus_53_below_one() -> None:
    rng = Rng(1)
    drawn = np.array([rng.random() for _ in range(20_000)])
    assert (drawn * 2.0**53 % 1 == 0).all()
    assert drawn.min() >= 0 and drawn.max() < 1
    assert abs(drawn.mean() - 0.5) < 0.01
    assert abs(drawn.var() - 1 / 12) < 0.002


@given(st.floats(1e-300, 1 - 1e-15))
def test_the_quantile_is_that_of_the_normal_distribution(p: float) -> None:
    assert _normal_quantile(p) == pytest.approx(NormalDist().inv_cdf(p), rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("p", [2.0**-53, 0.075, 0.0750001, 0.5 - 1e-9, 0.5, 0.5 + 1e-9, 0.925, 0.9250001, 1 - 2.0**-53])
def test_quantile_is_right_at_the_borders_of_its_formulas(p: float) -> None:
    assert _normal_quantile(p) == pytest.approx(NormalDist().inv_cdf(p), rel=1e-12, abs=1e-12)


@given(st.floats(1e-300, 1, exclude_max=True))
def test_the_logarithm_is_right_to_the_last_bits(x: float) -> None:
    assert _log(x) == pytest.approx(math.log(x), rel=4e-16 * 8, abs=1e-16)


def test_normal_has_the_moments_of_a_normal_distribution() -> None:
    rng = Rng(3)
    drawn = np.array([rng.normal(10.0, 2.0) for _ in range(20_000)])
    standard = (drawn - 10) / 2
    assert abs(standard.mean()) < 0.03
    assert abs(standard.std() - 1) < 0.02
    assert abs((standard**3).mean()) < 0.08
    assert abs((standard**4).mean() - 3) < 0.2


class Extreme(Rng):
    """Draws the same word again and again."""

    def bits(self) -> int:
        return self._base


def test_normal_is_symmetric_to_the_outermost_of_its_values() -> None:
    assert Extreme(2**64 - 1).normal() == -Extreme(0).normal() == pytest.approx(8.20953615160139)
    assert (Extreme(0).random(), Extreme(2**64 - 1).random()) == (0.0, 1 - 2.0**-53)


def test_choice_and_permutation_give_each_order_as_often() -> None:
    rng = Rng(2)
    orders = ["".join("abc"[i] for i in rng.permutation(3)) for _ in range(6000)]
    counts = {order: orders.count(order) for order in set(orders)}
    assert len(counts) == 6
    assert all(abs(count - 1000) < 130 for count in counts.values())
    assert {rng.choice(["x", "y"]) for _ in range(50)} == {"x", "y"}
    assert (rng.permutation(0), rng.permutation(1)) == ([], [0])
