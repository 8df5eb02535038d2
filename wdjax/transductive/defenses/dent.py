"""DENT: each sample gets its own scales and shifts, adapted to make the net confident."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import optax

from wdjax import distinct, loops, models
from wdjax.attacks.ascent import setting
from wdjax.checks import validate
from wdjax.core import Array, Model, PyTree
from wdjax.transductive.adamod import adamod
from wdjax.transductive.defense import Stateless

_TINY = 1e-5
"""Added inside logarithms of the objective, as in the authors' code."""


@distinct.register_dataclass
@dataclasses.dataclass(frozen=True)
class DENT(Stateless):
    r"""Defensive entropy minimisation: normalisation's affine parameters, adapted to each sample.

    All other weights and the stored statistics are fixed. Each sample starts from a copy of the
    trained scales and shifts; AdaMod takes a few steps down the information-maximisation loss
    ``mean_i H(p_i) + sum_c pbar_c log pbar_c`` with ``pbar = mean_i p_i``: each prediction becomes
    confident, all together balanced. Samples interact through ``pbar`` only. Stateless.

    Args:
      model: a model of this package, with BatchNorm or LayerNorm.
      steps: AdaMod steps.
      learning_rate: AdaMod's.
      b1: AdaMod's.
      b2: AdaMod's.
      b3: AdaMod's; with the others at their defaults no parameter moves by more than 0.033.

    Raises:
      ValueError: fewer than one step; a model without normalisation, when it is used.

    Cost: 1 forward and 1 backward pass a step, and n copies of the affine parameters.

    Differs: b1, b2 and b3 are not in the paper; they are the code's.

    Source: Wang et al. [dent2021]; equation 8 of Chen et al. [chen2022].

    >>> net = models.norm_mlp((4, 8, 3), key=jax.random.key(0))
    >>> adapted, _ = DENT(net).adapt(jax.random.key(1), (), (), jnp.ones((5, 4)))
    >>> adapted["bn1"]["scale"].shape
    (5, 8)
    """

    per_sample: ClassVar[bool] = True
    uses_inputs: ClassVar[bool] = True

    model: Model
    steps: int = setting(6)
    learning_rate: float | Array = 0.006
    b1: float | Array = 0.9
    b2: float | Array = 0.999
    b3: float | Array = 0.6

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", validate.check_count("steps", self.steps))

    def prepare(self, key: Array, x: Array, y: Array) -> PyTree:
        models.split_affine(self.model.args[0])
        return ()

    def base(self, memory: PyTree, state: PyTree, n: int) -> PyTree:
        affine, _ = models.split_affine(self.model.args[0])
        return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (n, *leaf.shape)), affine)

    def adapt(self, key: Array, memory: PyTree, state: PyTree, x: Array) -> tuple[PyTree, PyTree]:
        return self._fitted(x, None)[0], state

    def _fitted(self, x: Array, beside: Array | None) -> tuple[PyTree, Array]:
        """The adapted parameters of ``[n, *shape]``, and the logits ``[steps, n, K]`` on the way.

        ``beside`` ``[steps, m, K]`` are such logits of other inputs of the batch, if there are any.
        """
        rule = adamod(self.learning_rate, self.b1, self.b2, self.b3)  # type: ignore[arg-type]

        def loss(affine: PyTree, others: Array | None) -> tuple[Array, Array]:
            logits = self.predict((), affine, x)
            batch = logits if others is None else jnp.concatenate([logits, others])
            return information_loss(batch), logits

        def step(carried: PyTree, others: Array | None) -> tuple[PyTree, Array]:
            affine, known = carried
            slopes, logits = jax.grad(loss, has_aux=True)(affine, others)
            updates, known = rule.update(slopes, known)
            return (optax.apply_updates(affine, updates), known), logits

        affine = self.base((), (), len(x))
        (affine, _), logits = loops.scan(
            step, (affine, rule.init(affine)), beside, length=self.steps
        )
        return affine, logits

    def module(self, company: Array) -> Model:
        """DENT as a classifier, which adapts anew to every input, beside ``company``.

        Args:
          company: ``[m, *shape]``, the rest of a batch, whose own adaptation an input does not
            change.

        Its gradient takes the adapted parameters as constants, as that of the authors' code does.

        Cost: of a prediction, ``steps`` forward and backward passes more.

        Source: Wang et al. [dent2021]; "DENT-AA" of Chen et al. [chen2022] attacks it.

        >>> net, x = models.norm_mlp((4, 8, 3), key=jax.random.key(0)), jnp.ones((5, 4))
        >>> DENT(net).module(x)(x[:2]).shape
        (2, 3)
        """
        return Model(_module, {"defense": self, "beside": self._fitted(company, None)[1]})

    def predict(self, memory: PyTree, adapted: PyTree, x: Array) -> Array:
        _, rest = models.split_affine(self.model.args[0])

        def one(affine: PyTree, image: Array) -> Array:
            model = Model(self.model.func, models.join_affine(affine, rest))
            return model(image[None])[0]

        return jax.vmap(one)(adapted, x)


def _module(params: PyTree, x: Array) -> Array:
    """Logits ``[n, K]`` of inputs that adapt one by one."""
    defense, beside = params["defense"], params["beside"]

    def one(image: Array) -> Array:
        affine, _ = defense._fitted(image[None], beside)
        logits: Array = defense.predict((), jax.lax.stop_gradient(affine), image[None])
        return logits[0]

    return jax.vmap(one)(x)


def information_loss(logits: Array) -> Array:
    """Mean entropy of predictions, minus the entropy of their mean.

    Args:
      logits: ``[n, K]``.

    Source: equation 8 of Chen et al. [chen2022].

    >>> bool(information_loss(jnp.array([[50.0, 0.0], [0.0, 50.0]])) < -0.69)  # - log 2
    True
    """
    p = jax.nn.softmax(logits, axis=-1)
    mean = jnp.mean(p, axis=0)
    entropy = -jnp.sum(p * jnp.log(p + _TINY), axis=-1)
    return jnp.mean(entropy) + jnp.sum(mean * jnp.log(mean + _TINY))
