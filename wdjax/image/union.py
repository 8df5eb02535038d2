"""Unions of attacks in the image-Wasserstein ball, whose points all carry a plan as proof."""

import dataclasses
from collections.abc import Callable
from os import PathLike
from typing import Any

import numpy as np

from wdjax import losses
from wdjax.checks import arguments, validate
from wdjax.core import AnyArray, Array, Attack, Found, PyTree
from wdjax.engine import driver
from wdjax.engine.diagnosis import diagnosed
from wdjax.ensembles.cascade import survivors
from wdjax.ensembles.question import question
from wdjax.image.ball import ImageWasserstein
from wdjax.image.frank_wolfe import FrankWolfe
from wdjax.image.nearest_transport import NearestTransport


def members(ball: ImageWasserstein) -> tuple[tuple[FrankWolfe, float], ...]:
    """The attacks of :func:`image_wasserstein`, each with its share of the radius.

    Defended nets mask gradients, each from different members: cold vertices jump past flips that
    warm ones follow, and some flips are found in a smaller ball but missed in a large one.
    """
    # A stage of 50 steps would compile a smaller batch for the last survivors, which costs more.
    entropy = FrankWolfe(ball, steps=49)
    margin = dataclasses.replace(entropy, loss=losses.margin, momentum=0.9)
    cold = dataclasses.replace(margin, temperature=0.01, momentum=0.8)
    return (
        (entropy, 1.0),
        (cold, 1.0),
        (margin, 1.0),
        (dataclasses.replace(entropy, momentum=0.9), 1.0),
        (cold, 0.5),
    )


@diagnosed
def image_wasserstein(
    model: Callable[[Array], PyTree],
    x: AnyArray,
    y: AnyArray,
    *,
    eps: Any,
    ball: ImageWasserstein = ImageWasserstein(),  # noqa: B008
    only: Any = None,
    checkpoint: str | PathLike[str] | None = None,
    **options: Any,
) -> Found:
    r"""Attacks within an image-Wasserstein radius: a union of Frank-Wolfe searches.

    Five Frank-Wolfe searches over transport plans, each on the survivors of the previous ones, with
    cross-entropy or margin, at two temperatures, the last in half the radius. Each begins at the
    unmoved image: beginning at the best point so far made the union up to three points weaker. Each
    point that counts is in the ball and the box, with its plan in ``proof``. If
    :func:`minimum_radius` is used too, add its flips by :func:`wdjax.engine.driver.within`.

    Args:
      model: as for :func:`wdjax.search`.
      x: ``[n, height, width, channels]`` in the ball's box.
      y: ``[n]`` integer labels.
      eps: radius, a number or ``[n]``; k pixels are ``k / (height width)``.
      ball: window, power, channels and the largest value of a pixel.
      only: ``[n]`` booleans, the samples to attack; the others stay as they are.
      checkpoint: a folder; a call that was interrupted resumes from it, bit for bit.
      **options: ``criterion``, ``index``, ``batch_size``, ``mesh``, ``callback`` of
        :func:`wdjax.search`.

    Returns:
      A :class:`~wdjax.core.Found`.

    Raises:
      ValueError: a call inside a trace, or what :func:`wdjax.search` refuses.

    Cost: at most 260 forward and 245 backward passes an image; about 0.15 s on one CPU core for an
      MNIST image that survives everything.

    Source: after Wu et al. [wu2020]; the ball is Hu et al.'s [hu2020].

    >>> import jax.numpy as jnp
    >>> import wdjax.image
    >>> w = jnp.array([[0.0, 0.0], [0.0, 1.0], [-0.5, 1.0], [0.0, 0.0]])
    >>> model = wdjax.Model(lambda w, x: 4 * x.reshape(len(x), -1) @ w - jnp.eye(2)[1], w)
    >>> x, y = jnp.array([0.6, 0.2, 0.2, 0.0]).reshape(1, 1, 4, 1), jnp.array([1])
    >>> ball = ImageWasserstein(window=3)
    >>> image_wasserstein(model, x, y, eps=0.2, ball=ball).success.tolist()
    [True]
    """
    arguments.check(model=model, x=x, y=y, eps=eps, ball=ball)
    ask = question("image_wasserstein", model, x, y, None, checkpoint, options, random=False)
    radii = np.asarray(validate.check_radii(eps, len(ask.y)), np.float32)
    chosen = validate.check_mask("only", only, len(ask.y))
    found, left = None, chosen
    for number, (attack, share) in enumerate(members(ball)):
        result = ask.search(number, attack, eps=share * radii, only=left)
        found = result if found is None else driver.best_of(found, result)
        left = survivors(found, chosen)
        if not left.any():
            break
    assert found is not None
    return found


@diagnosed
def minimum_radius(
    model: Callable[[Array], PyTree],
    x: AnyArray,
    y: AnyArray,
    *,
    ball: ImageWasserstein = ImageWasserstein(),  # noqa: B008
    checkpoint: str | PathLike[str] | None = None,
    **options: Any,
) -> Found:
    r"""The least image-Wasserstein radius found at which each image is misclassified.

    The nearer flip of two :class:`~wdjax.image.NearestTransport` searches, one on the cross-entropy
    and one, at a lower temperature, on the margin.

    Args:
      model, x, y, ball, checkpoint, **options: as in :func:`image_wasserstein`.

    Returns:
      A :class:`~wdjax.core.Found`: ``cost`` is the radius, where ``success`` is True.

    Raises:
      ValueError: a call inside a trace, or what :func:`wdjax.search` refuses.

    Cost: 318 forward and 300 backward passes an image; about 0.2 s for an MNIST image on one CPU
      core.

    Source: this library's own.

    >>> import jax.numpy as jnp
    >>> import wdjax.image
    >>> w = jnp.array([[0.0, 0.0], [0.0, 1.0], [-0.5, 1.0], [0.0, 0.0]])
    >>> model = wdjax.Model(lambda w, x: 4 * x.reshape(len(x), -1) @ w - jnp.eye(2)[1], w)
    >>> x, y = jnp.array([0.6, 0.2, 0.2, 0.0]).reshape(1, 1, 4, 1), jnp.array([1])
    >>> round(float(minimum_radius(model, x, y, ball=ImageWasserstein(window=3)).cost[0]), 2)
    0.17
    """
    arguments.check(model=model, x=x, y=y)
    ask = question("minimum_radius", model, x, y, None, checkpoint, options, random=False)
    searches: tuple[Attack, ...] = (
        NearestTransport(ball),
        NearestTransport(ball, loss=losses.margin, temperature=0.01),
    )
    return driver.best_of(*(ask.search(number, attack) for number, attack in enumerate(searches)))
