"""Losses against PyTorch and against the formulas written out in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wdjax import losses, metrics

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(40, 7)).astype(np.float32) * 5
LABELS = RNG.integers(0, 7, 40)
TARGETS = (LABELS + RNG.integers(1, 7, 40)) % 7
ROWS = np.arange(40)
UNTARGETED = [
    losses.cross_entropy,
    losses.margin,
    losses.decision_margin,
    losses.dlr,
    losses.softplus_margin,
]


def rivals():
    other = LOGITS.copy()
    other[ROWS, LABELS] = -np.inf
    return other


def test_cross_entropy_and_softplus_are_torchs():
    torch = pytest.importorskip("torch")
    logits, labels = torch.tensor(LOGITS), torch.tensor(LABELS)
    expected = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    np.testing.assert_allclose(losses.cross_entropy(LOGITS, LABELS), expected, rtol=1e-5, atol=1e-6)
    gap = LOGITS[ROWS, LABELS] - rivals().max(axis=1)
    expected = -torch.nn.functional.softplus(torch.tensor(gap) + 0.5)
    found = losses.softplus_margin(jnp.array(LOGITS), LABELS, 0.5)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.fast
def test_margins_are_differences_of_logits():
    own = LOGITS[ROWS, LABELS]
    np.testing.assert_array_equal(
        losses.margin(jnp.array(LOGITS), LABELS), rivals().max(axis=1) - own
    )
    np.testing.assert_array_equal(
        losses.targeted_margin(jnp.array(LOGITS), LABELS, TARGETS), LOGITS[ROWS, TARGETS] - own
    )


@pytest.mark.fast
def test_dlr_follows_its_definition():
    own, ordered = LOGITS[ROWS, LABELS], -np.sort(-LOGITS, axis=1)
    expected = -(own - rivals().max(axis=1)) / (ordered[:, 0] - ordered[:, 2])
    np.testing.assert_allclose(losses.dlr(jnp.array(LOGITS), LABELS), expected, rtol=1e-5)
    scale = ordered[:, 0] - (ordered[:, 2] + ordered[:, 3]) / 2
    expected = -(own - LOGITS[ROWS, TARGETS]) / scale
    found = losses.targeted_dlr(jnp.array(LOGITS), LABELS, TARGETS)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.fast
def test_dlr_ignores_shift_and_scale_and_lies_in_its_range():
    logits = jnp.array(LOGITS)
    moved = losses.dlr(3.0 * logits - 7.0, LABELS)
    np.testing.assert_allclose(moved, losses.dlr(logits, LABELS), rtol=1e-4, atol=1e-5)
    wrong = losses.margin(logits, LABELS) > 0
    values = np.asarray(losses.dlr(logits, LABELS))
    third = np.sort(LOGITS, axis=1)[:, -3]
    podium = wrong & (LOGITS[ROWS, LABELS] >= third)
    assert podium.any()
    assert np.all((values[podium] > 0) & (values[podium] <= 1 + 1e-6))
    assert np.all((values[~wrong] <= 0) & (values[~wrong] >= -1 - 1e-6))


@pytest.mark.fast
@pytest.mark.parametrize("loss", [losses.margin, losses.dlr])
def test_sign_tells_misclassified(loss):
    wrong = LOGITS.argmax(axis=1) != LABELS
    np.testing.assert_array_equal(loss(jnp.array(LOGITS), LABELS) > 0, wrong)


@pytest.mark.fast
@pytest.mark.parametrize("loss", UNTARGETED)
@pytest.mark.parametrize("logits", [jnp.zeros((2, 5)), 1e4 * jnp.eye(5)[:2], -1e4 * jnp.eye(5)[:2]])
def test_values_and_gradients_stay_finite(loss, logits):
    y = jnp.array([0, 1])
    assert np.all(np.isfinite(loss(logits, y)))
    assert np.all(np.isfinite(jax.grad(lambda z: loss(z, y).sum())(logits)))


@pytest.mark.fast
@pytest.mark.parametrize("loss", UNTARGETED)
def test_attackers_increase_every_loss(loss):
    slope = jax.grad(lambda z: loss(z, LABELS).sum())(jnp.array(LOGITS))[ROWS, LABELS]
    assert np.all(slope <= 1e-6)
    assert np.mean(slope < -1e-3) > 0.5


@pytest.mark.fast
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("classes", [2, 3, 5])
def test_decision_margin_has_the_sign_of_the_decision(dtype, classes):
    """On every pattern of few levels, hence on every tie in any position, against every label."""
    levels = np.array([-1.0, 0.0, 1e-30, 1.0], dtype)
    grid = np.stack(np.meshgrid(*[levels] * classes), axis=-1).reshape(-1, classes)
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        logits = np.concatenate([grid, grid + grid[:, ::-1] / 3])
        y = jnp.repeat(jnp.arange(classes), len(logits))
        logits = jnp.array(np.tile(logits, (classes, 1)), dtype)
        wrong = ~np.asarray(metrics.correct(logits, y))
        for found in (losses.decision_margin, jax.jit(losses.decision_margin)):
            value = found(logits, y)
            assert value.dtype == dtype
            np.testing.assert_array_equal(value > 0, wrong)
            np.testing.assert_allclose(value, losses.margin(logits, y), rtol=1e-6, atol=1e-37)
        slopes = [
            jax.grad(lambda z, f=f: f(z, y).sum())(logits)
            for f in (losses.decision_margin, losses.margin)
        ]
        np.testing.assert_array_equal(*slopes)


@pytest.mark.fast
def test_decision_margin_of_no_number_is_none():
    logits = jnp.array([[jnp.nan, 1.0, 0.0], [1.0, jnp.nan, 0.0]])
    assert np.all(np.isnan(losses.decision_margin(logits, jnp.array([0, 0]))))


@pytest.mark.fast
def test_gradient_of_cross_entropy_is_probabilities_less_one_hot():
    found = jax.grad(lambda z: losses.cross_entropy(z, LABELS).sum())(jnp.array(LOGITS))
    expected = jax.nn.softmax(LOGITS) - jax.nn.one_hot(LABELS, 7)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.fast
def test_two_classes_are_enough_for_the_margin_only():
    logits, y = jnp.array([[1.0, 2.0]]), jnp.array([0])
    assert losses.margin(logits, y).tolist() == [1.0]
    with pytest.raises(ValueError, match="at least 3 classes"):
        losses.dlr(logits, y)
    with pytest.raises(ValueError, match="at least 4 classes"):
        losses.targeted_dlr(jnp.zeros((1, 3)), y, jnp.array([1]))


@pytest.mark.parametrize("label", [-1, 7])
def test_a_class_that_there_is_not_has_no_margin(label):
    y = jnp.array([label, 3])
    for loss in (losses.margin, losses.decision_margin):
        assert np.isnan(loss(LOGITS[:2], y)).tolist() == [True, False]
