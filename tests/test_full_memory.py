"""When a device's memory is full, batches are halved, which is said, and no number changes."""

import jax
import numpy as np
import pytest
from many_devices import KEY, MODEL, X, Y

import wdjax
from wdjax import attacks, certify, nppr, parallel, smoothing
from wdjax.certify import pointwise
from wdjax.engine import batching, rounds
from wdjax.nppr import counting, distributions
from wdjax.smoothing import noise, votes

PGD = attacks.PGD(steps=3, random_start=True)
VOTES = {"noise": noise.Gaussian(0.25), "key": KEY, "n0": 10, "n": 100, "batch_size": 64}
FULL = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.")


class Planted:
    """A function that fails as on a full device while one of its arguments is too large."""

    def __init__(self, function, place, most, spared=0):
        self.function, self.place, self.most, self.spared = function, place, most, spared

    def __call__(self, *given, **options):
        rows = given[self.place]
        if np.size(getattr(rows, "y", rows)) > self.most:
            if not self.spared:
                raise FULL
            self.spared -= 1
        return self.function(*given, **options)

    def __getattr__(self, name):
        return getattr(self.function, name)


def search(**how):
    return wdjax.search(PGD, MODEL, X[:8], Y[:8], eps=0.3, key=KEY, diagnose=False, **how)


METHODS = {
    "search": (rounds, "_steps", 2, 2, lambda: search(batch_size=8)),
    "certificate": (
        pointwise, "bounds", 2, 3,
        lambda: certify.margin_bounds(MODEL, X, Y, norm=2, eps=0.1, batch_size=8),
    ),
    "count": (
        counting, "_counted", 1, 2,
        lambda: nppr.estimate(
            MODEL, distributions.UniformBall(0.6), X, Y, key=KEY, draws=40, batch_size=160
        ).survived,
    ),
    "votes": (votes, "_vote", 1, 100, lambda: smoothing.certify(MODEL, X, Y, **VOTES)),
}  # fmt: skip


@pytest.mark.parametrize("name", METHODS)
def test_batches_are_halved(name, monkeypatch):
    room, function, place, most, measure = METHODS[name]
    whole = measure()
    monkeypatch.setattr(room, function, Planted(getattr(room, function), place, most))
    with pytest.warns(UserWarning, match=r"out of memory with \d+ samples at once; goes on with"):
        smaller = measure()
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(smaller), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


def test_a_search_goes_on_from_its_checkpoint(monkeypatch, tmp_path):
    whole, done = search(batch_size=8), []
    monkeypatch.setattr(rounds, "_steps", Planted(rounds._steps, 2, 4, spared=2))
    with pytest.warns(UserWarning, match="with 8 samples at once; goes on with 4"):
        found = search(
            batch_size=8,
            checkpoint=tmp_path / "search",
            every=0.0,
            callback=lambda seen: done.append(seen.taken),
        )
    assert done == [8, 16, 24, 32]  # Steps of all samples; none is reported twice.
    np.testing.assert_allclose(whole.x_adv, found.x_adv, atol=1e-6)


def test_other_errors_and_single_samples_are_raised(monkeypatch):
    def work(size):
        raise jax.errors.JaxRuntimeError("INTERNAL: broken")

    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        batching.halving(work, 8, None)
    with (
        pytest.warns(UserWarning, match="goes on with 1"),
        pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE"),
    ):
        batching.halving(Planted(int, 0, 0), 3, parallel.data_mesh(), whole=6)
