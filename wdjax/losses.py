r"""Per-sample classification losses: ``[n, K]`` logits and ``[n]`` labels in, ``[n]`` values out.

Every loss is to be *increased* by an attacker, and ``margin > 0`` means "misclassified".
"""

import jax
import jax.numpy as jnp
import optax


def _true_logit(logits, y):
    return jnp.take_along_axis(logits, y[:, None], axis=-1)[:, 0]


def _without(logits, y):
    """The logits with the entry of the class ``y`` set to minus infinity."""
    return jnp.where(jax.nn.one_hot(y, logits.shape[-1], dtype=bool), -jnp.inf, logits)


def _need_classes(logits, least, loss):
    if logits.shape[-1] < least:
        raise ValueError(
            f"{loss} needs at least {least} classes, got logits of shape {logits.shape}; "
            "use losses.margin for fewer classes."
        )


def cross_entropy(logits, y):
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


def margin(logits, y):
    r"""Margin (Carlini-Wagner) loss ``max_{j != y} z_j - z_y``, positive where misclassified.

    The second loss of Theorem 3.1: the paper calls its equation (13) DLR, but the loss there has no
    denominator. The true :func:`dlr` is not Lipschitz, so no certificate holds for it.

    Args:
      logits: ``[n, K]`` floats.
      y: ``[n]`` integer labels.

    Returns:
      ``[n]`` margins in logits.

    >>> margin(jnp.array([[1.0, 3.0, 0.0]]), jnp.array([0])).tolist()
    [2.0]
    """
    return jnp.max(_without(logits, y), axis=-1) - _true_logit(logits, y)


def targeted_margin(logits, y, target):
    """Margin to one rival, ``z_target - z_y``, per sample.

    >>> targeted_margin(jnp.array([[1.0, 3.0, 0.0]]), jnp.array([0]), jnp.array([2])).tolist()
    [-1.0]
    """
    return _true_logit(logits, target) - _true_logit(logits, y)


def dlr(logits, y):
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

    Source: Croce and Hein (2020), equation 6.

    >>> round(float(dlr(jnp.array([[3.0, 2.0, 1.0, 0.0]]), jnp.array([0]))[0]), 4)
    -0.5
    """
    _need_classes(logits, 3, "DLR")
    top = jax.lax.top_k(logits, 3)[0]
    return margin(logits, y) / (top[:, 0] - top[:, 2] + 1e-12)


def targeted_dlr(logits, y, target):
    r"""Targeted DLR ``-(z_y - z_t) / (z_(1) - (z_(3) + z_(4)) / 2)``.

    Args:
      logits: ``[n, K]`` floats, ``K >= 4``.
      y: ``[n]`` integer labels.
      target: ``[n]`` integer labels of the rivals.

    Returns:
      ``[n]`` losses.

    Raises:
      ValueError: fewer than four classes.

    Source: Croce and Hein (2020), equation 7.

    >>> logits = jnp.array([[4.0, 2.0, 1.0, 0.0]])
    >>> round(float(targeted_dlr(logits, jnp.array([0]), jnp.array([1]))[0]), 4)
    -0.5714
    """
    _need_classes(logits, 4, "targeted DLR")
    top = jax.lax.top_k(logits, 4)[0]
    return targeted_margin(logits, y, target) / (top[:, 0] - (top[:, 2] + top[:, 3]) / 2 + 1e-12)


def softplus_margin(logits, y, confidence=0.0):
    r"""NPPR's loss ``softplus(z_y - max_{j != y} z_j + confidence)``, which attackers *decrease*.

    The one loss here with the defender's sign, as the paper writes it.

    Args:
      logits: ``[n, K]`` floats.
      y: ``[n]`` integer labels.
      confidence: margin (in logits) beyond the decision boundary that the attacker aims at.

    Returns:
      ``[n]`` positive losses.

    Source: Wang et al., NPPR, equation 11.

    >>> round(float(softplus_margin(jnp.array([[0.0, 0.0]]), jnp.array([0]))[0]), 4)  # log 2
    0.6931
    """
    return jax.nn.softplus(confidence - margin(logits, y))
