"""From a point-wise attack to a distributional one: further, with a share of the mass."""

import functools

import jax.numpy as jnp

from wdjax.attacks import ascent
from wdjax.core import Attack


@functools.lru_cache(maxsize=256)
def distributional(attack: Attack, *, order=1) -> Attack:
    r"""Lets any point-wise attack go ``kappa^(1/p) eps`` far with ``1 / kappa`` of the mass.

    The distribution of equation 11 with equal ``kappa_i`` is in the Wasserstein ball of order p
    whenever all its points are within that radius (Corollary C.2). With ``kappa = 1`` nothing
    changes.

    Args:
      attack: a point-wise attack, such as :func:`~wdjax.attacks.pgd`.
      order: Wasserstein order p: 1, 2 or inf.

    Returns:
      An :class:`~wdjax.core.Attack` with the further knob ``kappa``, at least 1.

    Raises:
      ValueError: the attack is distributional already, or another order.

    Cost: that of the attack.

    Source: Le et al., equation 11 and Corollary C.2.

    >>> from wdjax.attacks import pgd
    >>> distributional(pgd(steps=3), order=2).knobs
    (('step_size', None), ('kappa', 1.0))
    """
    ascent.check_order(order)
    if attack.reach is not Attack._field_defaults["reach"]:
        raise ValueError(f"{attack.name} is distributional already; pass a point-wise attack.")

    def widen(function):
        @functools.wraps(function)
        def widened(*arguments, eps, kappa, **knobs):
            return function(*arguments, eps=eps * kappa ** (1 / order), **knobs)

        return widened

    def weigh(cost, success, *, kappa, **knobs):
        return jnp.full_like(cost, 1 / kappa)

    return attack._replace(
        init=widen(attack.init),
        stages=tuple(stage._replace(step=widen(stage.step)) for stage in attack.stages),
        point=widen(attack.point),
        reach=widen(attack.reach),
        weigh=weigh,
        order=order,
        knobs=(*attack.knobs, ("kappa", 1.0)),
    )
