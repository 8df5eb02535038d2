"""AutoAttack (Croce and Hein 2020): the parameter-free ensembles that the field reports."""

from collections.abc import Callable
from typing import Any

from wdjax import losses
from wdjax.attacks import APGD, FAB, Square
from wdjax.balls import Lp
from wdjax.checks import arguments, validate
from wdjax.core import AnyArray, Array, Attack, Found, PyTree
from wdjax.engine.diagnosis import diagnosed
from wdjax.ensembles.cascade import cascade

VERSIONS = ("standard", "plus")

_HOMEWARD = (3.0, 2.0, 1.0)
"""Radii, of eps, from which APGD on cross-entropy comes home in l2: around a sample whose gradients
are masked there is nothing to follow, farther out there is. It left 4 to 7 of 100 images of such a
net, 48 and 50 without; of four others the whole suite left as many or fewer."""


def members(ball: Lp = Lp(), version: str = "standard") -> dict[str, Attack]:
    """What an AutoAttack consists of, by name and in order; for random models see :mod:`.rand`.

    Args:
      ball: norm and box.
      version: ``"standard"``: APGD on cross-entropy, targeted APGD, targeted FAB, Square;
        ``"plus"``: the untargeted ones with five restarts, the targeted ones besides.

    Raises:
      ValueError: another version.

    >>> list(members())
    ['apgd-ce', 'apgd-t', 'fab-t', 'square']
    """
    validate.check_choice("version", version, VERSIONS)
    plus = version == "plus"
    # In l1 the authors restart, and aim at fewer classes.
    restarts, targets = (5 if plus or ball.norm == 1 else 1), (5 if ball.norm == 1 else 9)
    known: dict[str, Attack] = {
        "apgd-ce": APGD(ball, restarts=restarts, widths=_HOMEWARD if ball.norm == 2 else None),
        "apgd-dlr": APGD(ball, loss=losses.dlr_or_margin, restarts=restarts),
        "fab": FAB(ball, restarts=5, bounded=True),
        "square": Square(ball),
        "apgd-t": APGD(ball, targets=targets),
        "fab-t": FAB(ball, targets=9, bounded=True),
    }
    standard = ("apgd-ce", "apgd-t", "fab-t", "square")
    return known if plus else {name: known[name] for name in standard}


@diagnosed
def autoattack(
    model: Callable[[Array], PyTree],
    x: AnyArray,
    y: AnyArray,
    *,
    eps: Any,
    key: Array,
    ball: Lp = Lp(),
    version: str = "standard",
    **options: Any,
) -> Found:
    """AutoAttack: four or six attacks without parameters, each on the survivors of the last.

    Args:
      model: a pytree callable, ``[n, *shape] -> [n, K]``, ``K >= 2``.
      x: ``[n, *shape]``
      y: ``[n]``
      eps: the radius, a number or ``[n]``.
      key: a typed ``jax.random.key``.
      ball: norm and box.
      version: see :func:`members`.
      **options: of :func:`~wdjax.ensembles.cascade.cascade`, such as ``checkpoint`` and ``report``.

    Returns:
      A :class:`~wdjax.core.Found`; what is left is ``mean(correct & ~success)``.

    Raises:
      ValueError: what the cascade and the search refuse.

    Cost: some 100 passes for a sample that falls at once, and up to some 1900 backward and 7800
    forward passes for one that never does.

    Differs: samples leave as soon as they fall, randomness is every sample's own, and points are
      kept, measured and saved. The differences of the members are told there. With few classes
      there are as many targets as there are rivals. In l1, phases reach from 10 eps, not from 3,
      and in l2 the untargeted APGD on cross-entropy has phases, too, from 3 eps.

    Source: Croce and Hein [croce2020], Section 5; version 0.1 of the authors' code.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> from wdjax import Model
    >>> model = Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [-1.0, 1.0]]))
    >>> x, y = jnp.array([[0.6, 0.4], [0.65, 0.35]]), jnp.array([0, 0])
    >>> autoattack(model, x, y, eps=0.2, key=jax.random.key(0)).success.tolist()
    [True, True]
    """
    arguments.check(model=model, x=x, y=y, eps=eps, key=key, ball=ball)
    return cascade(members(ball, version), model, x, y, eps=eps, key=key, diagnose=False, **options)
