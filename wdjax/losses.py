r"""Per-sample classification losses: ``[n, K]`` logits and ``[n]`` labels in, ``[n]`` values out.

Attackers *increase* every loss, and ``margin > 0`` means "misclassified".
"""

from typing import Protocol

import jax
import jax.numpy as jnp
import optax


class Loss(Protocol):
    """A loss: the type of the functions here, and of ``loss`` arguments elsewhere."""

    def __call__(self, logits: jax.Array, y: jax.Array, /) -> jax.Array:
        """``[n, K]`` logits and ``[n]`` integer labels to ``[n]`` values."""
        ...


def _logit(logits: jax.Array, y: jax.Array) -> jax.Array:
    """The logit of class ``y``, ``[n]``; NaN for a label out of range.

    Computed by a masked sum, whose gradient is a mask; that of a gather would be a scatter.
    """
    known = (y >= 0) & (y < logits.shape[-1])
    return jnp.where(known, jnp.sum(jnp.where(_mask(logits, y), logits, 0), axis=-1), jnp.nan)


def _without(logits: jax.Array, y: jax.Array) -> jax.Array:
    """The logits with the entry of the class ``y`` set to minus infinity."""
    return jnp.where(_mask(logits, y), -jnp.inf, logits)


def _mask(logits: jax.Array, y: jax.Array) -> jax.Array:
    """``[n, K]`` booleans: True at each row's class ``y``; nowhere for labels out of range."""
    return jax.nn.one_hot(y, logits.shape[-1], dtype=bool)


def _need_classes(logits: jax.Array, least: int, loss: str) -> None:
    """Raises if there are fewer than ``least`` classes; ``loss`` is its name for the message."""
    if logits.shape[-1] < least:
        raise ValueError(
            f"{loss} needs at least {least} classes, got logits of shape {logits.shape}; "
            "use losses.margin for fewer classes."
        )


def cross_entropy(logits: jax.Array, y: jax.Array) -> jax.Array:
    r"""Cross-entropy ``log sum_k exp(z_k) - z_y``.

    Args:
      logits: ``[n, K]`` floats.
      y: ``[n]`` integer labels.

    Returns:
      ``[n]`` losses in nats.

    >>> float(cross_entropy(jnp.zeros((1, 4)), jnp.array([2]))[0])  # log 4
    1.3862...
    """
    return optax.softmax_cross_entropy_with_integer_labels(logits, y)


def margin(logits: jax.Array, y: jax.Array) -> jax.Array:
    r"""Margin (Carlini-Wagner) loss ``max_{j != y} z_j - z_y``, positive where misclassified.

    The second loss of Theorem 3.1, which the paper's equation (13) calls DLR although it has no
    denominator. The true :func:`dlr` is not Lipschitz, so no certificate holds for it.

    Args:
      logits: ``[n, K]`` floats.
      y: ``[n]`` integer labels.

    Returns:
      ``[n]`` margins in logits.

    >>> margin(jnp.array([[1.0, 3.0, 0.0]]), jnp.array([0])).tolist()
    [2.0]
    """
    return jnp.max(_without(logits, y), axis=-1) - _logit(logits, y)


def decision_margin(logits: jax.Array, y: jax.Array) -> jax.Array:
    r"""The :func:`margin` with the sign of the decision, also where the largest logits tie.

    On a tie the margin is 0, and ``argmax`` takes the first of the tied classes; if that is not
    ``y``, the smallest normal float is added. For finite logits the result is thus positive if and
    only if :func:`wdjax.metrics.correct` is False.

    Args:
      logits: ``[n, K]`` floats.
      y: ``[n]`` integer labels.

    Returns:
      ``[n]`` margins in logits, with the margin's gradient; NaN where a logit is NaN.

    >>> logits = jnp.array([[1.0, 1.0], [1.0, 1.0], [0.0, 3.0]])
    >>> (decision_margin(logits, jnp.array([0, 1, 0])) > 0).tolist()
    [False, True, True]
    """
    value, label = margin(logits, y), _logit(logits, y)[:, None]
    earlier = jnp.arange(logits.shape[-1])[None] < y[:, None]
    lost = (value == 0) & jnp.any(jnp.where(earlier, logits >= label, logits > label), axis=-1)
    return value + jnp.where(lost, jnp.finfo(value.dtype).tiny, 0).astype(value.dtype)


def targeted_margin(logits: jax.Array, y: jax.Array, target: jax.Array) -> jax.Array:
    """Margin to one rival, ``z_target - z_y``, per sample.

    Args:
      logits: ``[n, K]``
      y: ``[n]`` labels.
      target: ``[n]`` classes.

    >>> targeted_margin(jnp.array([[1.0, 3.0, 0.0]]), jnp.array([0]), jnp.array([2])).tolist()
    [-1.0]
    """
    return _logit(logits, target) - _logit(logits, y)


def dlr(logits: jax.Array, y: jax.Array) -> jax.Array:
    r"""Difference-of-logits ratio ``-(z_y - max_{j != y} z_j) / (z_(1) - z_(3))``.

    Invariant to shift and scale of the logits. The denominator is kept above 1e-12.

    Args:
      logits: ``[n, K]`` floats, ``K >= 3``.
      y: ``[n]`` integer labels.

    Returns:
      ``[n]`` losses, at least -1; positive where misclassified, and at most 1 there as long as
      ``y`` is among the three largest logits.

    Raises:
      ValueError: fewer than three classes.

    Source: Croce and Hein [croce2020], equation 6.

    >>> round(float(dlr(jnp.array([[3.0, 2.0, 1.0, 0.0]]), jnp.array([0]))[0]), 4)
    -0.5
    """
    _need_classes(logits, 3, "DLR")
    top = jax.lax.top_k(logits, 3)[0]
    return margin(logits, y) / (top[:, 0] - top[:, 2] + 1e-12)


def targeted_dlr(logits: jax.Array, y: jax.Array, target: jax.Array) -> jax.Array:
    r"""Targeted DLR ``-(z_y - z_t) / (z_(1) - (z_(3) + z_(4)) / 2)``.

    Args:
      logits: ``[n, K]`` floats, ``K >= 4``.
      y: ``[n]`` integer labels.
      target: ``[n]`` integer labels of the rivals.

    Returns:
      ``[n]`` losses.

    Raises:
      ValueError: fewer than four classes.

    Source: Croce and Hein [croce2020], equation 7.

    >>> logits = jnp.array([[4.0, 2.0, 1.0, 0.0]])
    >>> round(float(targeted_dlr(logits, jnp.array([0]), jnp.array([1]))[0]), 4)
    -0.5714
    """
    _need_classes(logits, 4, "targeted DLR")
    top = jax.lax.top_k(logits, 4)[0]
    return targeted_margin(logits, y, target) / (top[:, 0] - (top[:, 2] + top[:, 3]) / 2 + 1e-12)


def rectified_dlr(logits: jax.Array, y: jax.Array) -> jax.Array:
    r"""DLR while a sample is classified correctly, else 0: ``min(DLR, 0)``.

    A budget that follows its gradient is not spent on samples that are misclassified already.

    Args:
      logits: ``[n, K]`` floats.
      y: ``[n]`` integer labels.

    Returns:
      ``[n]`` losses in ``[-1, 0]``; for two classes, for which DLR is constant, margins.

    Source: Bai et al. (2023), ReDLR.

    >>> rectified_dlr(jnp.array([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0]]), jnp.array([0, 1])).tolist()
    [-0.5, 0.0]
    """
    value = dlr_or_margin(logits, y)
    return jnp.where(value < 0, value, 0.0)


def dlr_or_margin(logits: jax.Array, y: jax.Array) -> jax.Array:
    r""":func:`dlr` for three classes and more; for two, whose ratio is constant, the margin.

    Args:
      logits: ``[n, K]`` floats.
      y: ``[n]`` integer labels.

    Returns:
      ``[n]`` losses.

    >>> dlr_or_margin(jnp.array([[3.0, 2.0]]), jnp.array([0])).tolist()
    [-1.0]
    """
    return margin(logits, y) if logits.shape[-1] == 2 else dlr(logits, y)


def targeted_dlr_or_margin(logits: jax.Array, y: jax.Array, target: jax.Array) -> jax.Array:
    r""":func:`targeted_dlr` for four classes and more, with substitutes for fewer.

    Three classes have no fourth logit: the denominator is that of :func:`dlr`, ``z_(1) - z_(3)``.
    For two classes the ratio is constant: the targeted margin is used.

    Args:
      logits: ``[n, K]`` floats.
      y: ``[n]`` integer labels.
      target: ``[n]`` integer labels of the rivals.

    Returns:
      ``[n]`` losses.

    >>> logits = jnp.array([[3.0, 2.0, 1.0]])
    >>> targeted_dlr_or_margin(logits, jnp.array([0]), jnp.array([2])).tolist()
    [-1.0]
    """
    classes = logits.shape[-1]
    if classes > 3:
        return targeted_dlr(logits, y, target)
    value = targeted_margin(logits, y, target)
    if classes == 2:
        return value
    top = jax.lax.top_k(logits, 3)[0]
    return value / (top[:, 0] - top[:, 2] + 1e-12)


def probability_margin(logits: jax.Array, y: jax.Array) -> jax.Array:
    r"""The margin in probability space, ``max_{j != y} p_j - p_y`` with ``p = softmax(z)``.

    Bounded and invariant to shifts; its gradient vanishes where the model is certain, so an
    attacker concentrates on samples near the boundary.

    Args:
      logits: ``[n, K]`` floats.
      y: ``[n]`` integer labels.

    Returns:
      ``[n]`` margins in ``[-1, 1]``, positive where misclassified.

    Source: arXiv 2411.15210 (PMA).

    >>> probability_margin(jnp.log(jnp.array([[0.7, 0.2, 0.1]])), jnp.array([0])).round(4).tolist()
    [-0.5]
    """
    return margin(jax.nn.softmax(logits, axis=-1), y)


def softplus_margin(logits: jax.Array, y: jax.Array, confidence: float = 0.0) -> jax.Array:
    r"""NPPR's loss ``-softplus(z_y - max_{j != y} z_j + confidence)``, a margin that saturates.

    Args:
      logits: ``[n, K]`` floats.
      y: ``[n]`` integer labels.
      confidence: margin in logits beyond the decision boundary at which the attacker aims.

    Returns:
      ``[n]`` negative losses.

    Differs: in sign. The paper minimises the softplus; here attackers increase every loss.

    Source: Wang et al. [wang2025], equation 11.

    >>> round(float(softplus_margin(jnp.array([[0.0, 0.0]]), jnp.array([0]))[0]), 4)  # -log 2
    -0.6931
    """
    return -jax.nn.softplus(confidence - margin(logits, y))
