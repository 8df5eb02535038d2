"""Training inside ``jit``, for defences at test time and for their base models."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from wdjax import loops, losses, models
from wdjax.checks import arguments, validate
from wdjax.core import Array, Attack, Model, PyTree
from wdjax.engine import driver
from wdjax.precision import training_precision

Network = Callable[..., Model]
"""``network(key=key)``: a model with random parameters."""


Rule = Callable[[int], optax.GradientTransformation]
"""Makes an optimiser from the number of steps."""


class Opponent(NamedTuple):
    """The attack of an adversarial training: half of the loss is that of attacked samples."""

    attack: Attack
    eps: Array | float


def batches(key: Array, n: int, size: int, steps: int) -> Array:
    """``[steps, size]`` indices: consecutive permutations of ``n``, without incomplete batches.

    >>> batches(jax.random.key(0), 5, 2, 3).shape
    (3, 2)
    """
    size = min(size, n)
    each = n // size
    keys = jax.random.split(key, -(-steps // each))
    order = jax.vmap(lambda key: jax.random.permutation(key, n)[: each * size])(keys)
    return order.reshape(-1, size)[:steps]


def augmented(key: Array, x: Array, reach: int = 4) -> Array:
    """Images ``[n, H, W, C]``, each flipped by chance and cropped from a black border.

    Args:
      key: of flips and crops.
      x: the images.
      reach: how many pixels a crop may move an image, in each direction.

    >>> augmented(jax.random.key(0), jnp.ones((2, 8, 8, 1)), reach=0).mean().item()
    1.0
    """
    first, second = jax.random.split(key)
    corners = jax.random.randint(first, (len(x), 2), 0, 2 * reach + 1)
    flips = jax.random.bernoulli(second, shape=(len(x),))
    padded = jnp.pad(x, ((0, 0), (reach, reach), (reach, reach), (0, 0)))

    def one(image: Array, corner: Array, flip: Array) -> Array:
        cut = jax.lax.dynamic_slice(image, (corner[0], corner[1], 0), x.shape[1:])
        return jnp.where(flip, cut[:, ::-1], cut)

    return jax.vmap(one)(padded, corners, flips)


def falling_sgd(
    steps: int, falls: tuple[float, ...], decay: float, peak: float = 0.1
) -> optax.GradientTransformation:
    """SGD with Nesterov's momentum of 0.9, whose rate falls to a tenth at shares of the steps.

    Args:
      steps: number of updates.
      falls: the shares.
      decay: weight decay.
      peak: the first rate.

    >>> len(jax.tree.leaves(falling_sgd(10, (0.5,), 1e-4).init(jnp.ones(2))))
    2
    """
    rate = optax.piecewise_constant_schedule(peak, {round(at * steps): 0.1 for at in falls})
    return optax.chain(
        optax.add_decayed_weights(decay), optax.sgd(rate, momentum=0.9, nesterov=True)
    )


@training_precision
def train_classifier(
    model: Model,
    x: Array,
    y: Array,
    *,
    key: Array,
    steps: int,
    size: int = 128,
    rule: optax.GradientTransformation | None = None,
    opponent: Opponent | None = None,
    augment: bool = False,
) -> Model:
    """Trains a classifier, with BatchNorm in training mode, on clean and attacked samples.

    With an opponent, half of the loss is that of clean samples and half that of attacked ones,
    which are found with the model in inference mode.

    Args:
      model: with its initial parameters.
      x: ``[n, *shape]``
      y: ``[n]``
      key: for batches and starts.
      steps: number of updates.
      size: samples in a step.
      rule: an optax transformation; by default Adam with a rate from 0.003 to 0 along a cosine.
      opponent: the attack to train against.
      augment: crop and flip the images of every step by chance.

    Returns:
      The trained model.

    Raises:
      ValueError: a bad model, samples, labels or key.

    Cost: 1 forward and 1 backward pass a sample and step; with an opponent, the attack's passes and
      1 more of each.

    Source: Madry et al. [madry2018].

    >>> net = models.norm_mlp((1, 8, 2), key=jax.random.key(0))
    >>> x, y = jnp.linspace(0, 1, 8)[:, None], jnp.arange(8) // 4
    >>> trained = train_classifier(net, x, y, key=jax.random.key(1), steps=100, size=8)
    >>> bool((trained(x).argmax(1) == y).all())
    True
    """
    arguments.check(model=model, x=x, y=y, key=key)
    logits = validate.shapes_of(model, x)
    if not validate.traced(y):
        validate.check_labels(np.asarray(y), logits.shape[-1])
    x, y = jnp.asarray(x), jnp.asarray(y)
    rule = rule or optax.adam(optax.cosine_decay_schedule(3e-3, steps))
    order_key, attack_key = jax.random.split(key)
    crop_key = jax.random.fold_in(order_key, 0)

    def step(carried: PyTree, row: tuple[Array, Array]) -> tuple[PyTree, None]:
        (model, known), (batch, number) = carried, row
        images, labels = x[batch], y[batch]
        if augment:
            images = augmented(jax.random.fold_in(crop_key, number), images)
        moved = None
        if opponent is not None:
            own_key = jax.random.fold_in(attack_key, number)
            moved = _attacked(opponent, model, images, labels, own_key)

        def loss(model: Model) -> tuple[Array, Model]:
            logits, after = models.training_pass(model, images)
            value = jnp.mean(losses.cross_entropy(logits, labels))
            if moved is None:
                return value, after
            logits, after = models.training_pass(after, moved)
            return (value + jnp.mean(losses.cross_entropy(logits, labels))) / 2, after

        model, known, _ = models.descend(rule, loss, model, known)
        return (model, known), None

    rows = batches(order_key, len(y), size, steps), jnp.arange(steps)
    (model, _), _ = loops.scan(step, (model, rule.init(models.parameters(model))), rows)
    return model


def _attacked(opponent: Opponent, model: Model, x: Array, y: Array, key: Array) -> Array:
    """``[n, *shape]``: the samples attacked by the opponent, without a gradient."""
    attack, eps = opponent
    found = driver.search(
        attack, model, x, y, eps=jnp.asarray(eps, x.dtype), key=key, skip_misclassified=False
    )
    return jax.lax.stop_gradient(found.x_adv)


def chunked(function: Callable[[Any], PyTree], rows: PyTree, size: int = 256) -> PyTree:
    """Applies ``function`` to ``[n, ...]`` leaves in batches of ``size``, to bound the memory.

    >>> chunked(lambda x: 2 * x, jnp.arange(5), 2).tolist()
    [0, 2, 4, 6, 8]
    """
    n = len(jax.tree.leaves(rows)[0])
    if n <= size:
        return function(rows)
    count = -(-n // size)
    positions = jnp.minimum(jnp.arange(count * size), n - 1).reshape(count, size)
    parts = jax.lax.map(
        lambda indices: function(jax.tree.map(lambda leaf: leaf[indices], rows)), positions
    )
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[:n], parts)
