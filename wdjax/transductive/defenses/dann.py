"""DANN: a new model for each set of inputs, trained to give them the features of training data."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax

from wdjax import distinct, loops, losses, models
from wdjax.attacks.ascent import setting
from wdjax.checks import validate
from wdjax.core import Array, Model, PyTree
from wdjax.transductive import fitting
from wdjax.transductive.defense import Retrained
from wdjax.transductive.fitting import Network, Rule


@distinct.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DANN(Retrained):
    r"""Domain-adversarial training from scratch on the labelled data and the unlabelled inputs.

    Each step adds the cross-entropy on the training data and the loss of a discriminator between
    features of the training data (0) and of the inputs (1). The discriminator's gradient reaches
    the features with reversed sign and times ``alpha = peak (2 / (1 + exp(-10 p)) - 1)``, where p
    is the share of steps done; the discriminator itself gets it unchanged. The two domains pass
    BatchNorm separately. Stateless.

    Args:
      network: ``network(key=key)``: a model with random parameters.
      discriminator: likewise, from features to two logits.
      steps: Adam steps of a training.
      size: samples of each domain in a step.
      learning_rate: Adam's.
      peak: final value of alpha.
      rule: makes an optax transformation from the number of steps, in place of Adam.
      augment: crop and flip the images of every step by chance.

    Raises:
      ValueError: a count below 1; a network without features, when it is used.

    Cost: two forward and backward passes a step; one training for every adaptation.

    Differs: dropout is left out. The authors' "epoch" has as many steps as the smaller of the two
      sets has batches.

    Source: Ganin et al. [ganin2016]; as a defence, Chen et al. [chen2022].
    """

    uses_inputs: ClassVar[bool] = True

    network: Network = dataclasses.field(metadata={"static": True})
    discriminator: Network = dataclasses.field(metadata={"static": True})
    steps: int = setting(800)
    size: int = setting(128)
    learning_rate: float | Array = 1e-3
    peak: float | Array = 0.1
    rule: Rule | None = dataclasses.field(default=None, metadata={"static": True})
    augment: bool = setting(False)

    def __post_init__(self) -> None:
        for name in ("steps", "size"):
            object.__setattr__(self, name, validate.check_count(name, getattr(self, name)))

    def prepare(self, key: Array, x: Array, y: Array) -> PyTree:
        """The training data, and the base model, trained without a discriminator."""
        return {"x": x, "y": y, "base": self._train(key, x, y, None)}

    def adapt(self, key: Array, memory: PyTree, state: PyTree, x: Array) -> tuple[PyTree, PyTree]:
        return self._train(key, memory["x"], memory["y"], x), state

    def _seen(self, key: Array, number: Array, x: Array) -> Array:
        """The images ``[b, *shape]`` of a step, cropped and flipped where that is wanted."""
        return fitting.augmented(jax.random.fold_in(key, number), x) if self.augment else x

    def _train(self, key: Array, x: Array, y: Array, target: Array | None) -> Model:
        """Trains a model from scratch on ``x [n, *shape]`` and ``y [n]``.

        With unlabelled inputs ``target`` ``[m, *shape]`` a discriminator's reversed gradient makes
        the features of both sets alike; None trains without it.
        """
        first, second, third, fourth = jax.random.split(key, 4)
        both = {"model": self.network(key=first), "judge": self.discriminator(key=second)}
        rule = optax.adam(self.learning_rate) if self.rule is None else self.rule(self.steps)
        labelled = fitting.batches(third, len(y), self.size, self.steps)
        if target is None:
            other = jnp.zeros((self.steps, 1), jnp.int32)
        else:
            other = fitting.batches(fourth, len(target), self.size, self.steps)

        def step(carried: PyTree, row: tuple[Array, Array, Array]) -> tuple[PyTree, None]:
            (both, known), (source, rest, number) = carried, row
            alpha = self.peak * (2 / (1 + jnp.exp(-10 * number / self.steps)) - 1)

            def loss(both: dict[str, Model]) -> tuple[Array, Any]:
                inputs = None if target is None else self._seen(fourth, number, target[rest])
                images = self._seen(third, number, x[source])
                return _losses(both, images, y[source], inputs, alpha)

            both, known, _ = models.descend(rule, loss, both, known)
            return (both, known), None

        rows = labelled, other, jnp.arange(self.steps)
        (both, _), _ = loops.scan(step, (both, rule.init(models.parameters(both))), rows)
        return both["model"]


def _losses(
    both: dict[str, Model], x: Array, y: Array, target: Array | None, alpha: Array
) -> tuple[Array, dict[str, Model]]:
    """The loss of one step, and the model and discriminator after their training passes.

    ``alpha`` is the weight of the discriminator's reversed gradient; ``target`` None leaves it out.
    """
    features, moved = models.training_pass(models.features(both["model"]), x)
    logits = models.head(moved)(features)
    value = jnp.mean(losses.cross_entropy(logits, y))
    judge = both["judge"]
    if target is not None:
        others, moved = models.training_pass(moved, target)
        for seen, side in ((features, 0), (others, 1)):
            said, judge = models.training_pass(judge, reverse(seen, alpha))
            value += jnp.mean(losses.cross_entropy(said, jnp.full(len(seen), side)))
    return value, {"model": Model(both["model"].func, *moved.args), "judge": judge}


@jax.custom_vjp
def reverse(x: Array, alpha: Array | float) -> Array:
    """``x`` itself, but its gradient is multiplied by ``-alpha``.

    >>> float(jax.grad(lambda x: reverse(3 * x, 0.5))(1.0))
    -1.5
    """
    return x


def _reverse_forward(x: Array, alpha: Array) -> tuple[Array, Array]:
    """The forward pass of :func:`reverse`, which keeps ``alpha``."""
    return x, alpha


def _reverse_backward(alpha: Array, pull: Array) -> tuple[Array, None]:
    """The gradient of :func:`reverse`, with reversed sign."""
    return -alpha * pull, None


reverse.defvjp(_reverse_forward, _reverse_backward)
