"""Projections on a hyperplane in a box, against linear programs and the optimality conditions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize

from wdjax import norms
from wdjax.attacks import hyperplane

NORMS = (1, 2, np.inf)
EVERY_NORM = pytest.mark.parametrize("norm", NORMS)


def cases(n=60, d=9):
    """Points, normals and gaps: with zeros, ties, points on the box, and gaps out of reach."""
    rng = np.random.default_rng(0)
    z = rng.uniform(size=(n, d)).astype(np.float32)
    z[::4, :3] = 1.0
    w = (rng.normal(size=(n, d)) * 10.0 ** rng.integers(-3, 3, (n, 1))).astype(np.float32)
    w[::3, 2:5] = 0.0
    w[::5] = np.round(w[::5] / np.abs(w[::5]).max(axis=1, keepdims=True) * 2)
    gap = (
        rng.normal(size=n).astype(np.float32)
        * np.abs(w).sum(axis=1)
        * rng.choice([0.03, 0.3, 1.5], n)
    )
    return z, w, gap.astype(np.float32)


def reach(z, w, gap):
    """The most that the affine function can do towards 0 inside the box, in float64."""
    forward = -np.sign(gap)[:, None] * w.astype(float)
    return (np.abs(forward) * np.where(forward > 0, 1 - z, z)).sum(axis=1)


def nearest(z, w, gap, norm):
    """The exact distance of one point, by HiGHS or from the multiplier of the quadratic program."""
    z, w, gap, d = z.astype(float), w.astype(float), float(gap), len(z)
    target = w @ z - gap
    if norm == 2:

        def left(multiplier):
            return w @ np.clip(z - multiplier * w, 0, 1) - target

        far = np.sign(gap) * 2 / np.abs(w[w != 0]).min()
        best = scipy.optimize.brentq(left, 0, far, xtol=1e-300, rtol=1e-14, maxiter=2000)
        return np.linalg.norm(np.clip(z - best * w, 0, 1) - z)
    slacks = d if norm == 1 else 1
    cost = np.concatenate([np.zeros(d), np.ones(slacks)])
    magnitudes = np.eye(d) if norm == 1 else np.ones((d, 1))
    above, below = np.hstack([np.eye(d), -magnitudes]), np.hstack([-np.eye(d), -magnitudes])
    solved = scipy.optimize.linprog(
        cost,
        A_ub=np.vstack([above, below]),
        b_ub=np.concatenate([z, -z]),
        A_eq=np.concatenate([w, np.zeros(slacks)])[None],
        b_eq=[target],
        bounds=[(0, 1)] * d + [(0, None)] * slacks,
    )
    assert solved.status == 0, solved.message
    return solved.fun


@pytest.mark.fast
@EVERY_NORM
def test_projections_are_the_nearest_points(norm):
    z, w, gap = cases()
    inside = reach(z, w, gap) > 1.001 * np.abs(gap)
    assert inside.sum() > 25
    assert (~inside).sum() > 3
    found = np.asarray(hyperplane.project(z, w, gap, norm, (0.0, 1.0)))
    assert found.min() >= 0
    assert found.max() <= 1
    scale = np.abs(w).sum(axis=1)
    left = ((found.astype(float) - z) * w).sum(axis=1) + gap
    np.testing.assert_allclose((left / np.maximum(scale, 1e-9))[inside], 0, atol=2e-6)
    distance = np.asarray(norms.lp_norm(jnp.array(found - z), norm))
    for row in np.flatnonzero(inside & (scale > 0)):
        np.testing.assert_allclose(
            distance[row], nearest(z[row], w[row], gap[row], norm), atol=5e-6
        )
    # Out of reach: the corner that is nearest to the hyperplane.
    outside = reach(z, w, gap) < 0.999 * np.abs(gap)
    corner = np.where(w == 0, z, (-np.sign(gap)[:, None] * w > 0).astype(np.float32))
    np.testing.assert_array_equal(found[outside], corner[outside])


@pytest.mark.fast
@EVERY_NORM
def test_projections_without_a_box_have_closed_forms(norm):
    z, w, gap = cases()
    w[np.abs(w).max(axis=1) == 0] = 1.0
    found = hyperplane.project(z, w, gap, norm)
    distance = np.abs(gap) / np.asarray(norms.lp_norm(jnp.array(w), norms.dual(norm)))
    np.testing.assert_allclose(norms.lp_norm(found - z, norm), distance, rtol=2e-5, atol=1e-7)


@pytest.mark.fast
@EVERY_NORM
@pytest.mark.parametrize("box", [None, (0.0, 1.0)])
def test_degenerate_hyperplanes_stay_finite(norm, box):
    z = jnp.array([[0.2, 0.5, 1.0]])
    for w, gap in (
        ([0.0, 0.0, 0.0], 1.0),
        ([0.0, 0.0, 0.0], -jnp.inf),
        ([1.0, 2.0, 0.0], 0.0),
        ([1e-38, 1e38, 1.0], 1.0),
        ([1e-30, 1e-30, 1e-30], -1e-31),
    ):
        found = jax.jit(hyperplane.project, static_argnums=(3, 4))(
            z, jnp.array([w]), jnp.array([gap]), norm, box
        )
        assert np.isfinite(found).all()
        if gap == 0 or not any(w):
            np.testing.assert_array_equal(found, z)
