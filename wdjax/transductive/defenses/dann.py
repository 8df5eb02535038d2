"""DANN: a new model for every set of inputs, whose features cannot be told from the training's."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax

from wdjax import losses, models
from wdjax.attacks.ascent import setting
from wdjax.checks import validate
from wdjax.core import Array, Model, PyTree
from wdjax.transductive import fitting
from wdjax.transductive.defense import check_memory
from wdjax.transductive.fitting import Network


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DANN:
    r"""Domain-adversarial training from scratch on the labelled data and the unlabelled inputs.

    The loss of a step is the cross-entropy on the training data and that of a discriminator which
    tells the features of the training data (0) from those of the inputs (1). Its gradient reaches
    the features reversed and times ``alpha = peak (2 / (1 + exp(-10 p)) - 1)``, with p the share of
    the steps that is done; the discriminator itself gets all of it. The two domains pass BatchNorm
    one after the other. Stateless.

    Args:
      network: ``network(key=key)``: the architecture, with random parameters.
      discriminator: the same for the discriminator, from features to two logits.
      steps: of Adam, per training.
      size: samples of each domain a step.
      learning_rate: Adam's.
      peak: of alpha.

    Raises:
      ValueError: a count below 1; when it is used, a network without features.

    Cost: two forward and backward passes a step; a training for every adaptation.

    Differs: the authors' encoder ends earlier in the net, and dropout is left out. Their "epoch" is
      as many steps as the smaller of the two sets has batches. On CIFAR-10 they use SGD.

    Source: Ganin et al. [ganin2016]; as a defence, Chen et al. [chen2022].
    """

    per_sample: ClassVar[bool] = False
    uses_inputs: ClassVar[bool] = True
    rejects: ClassVar[bool] = False

    network: Network = dataclasses.field(metadata={"static": True})
    discriminator: Network = dataclasses.field(metadata={"static": True})
    steps: int = setting(800)
    size: int = setting(128)
    learning_rate: float | Array = 1e-3
    peak: float | Array = 0.1

    def __post_init__(self) -> None:
        for name in ("steps", "size"):
            object.__setattr__(self, name, validate.check_count(name, getattr(self, name)))

    def prepare(self, key: Array, x: Array, y: Array) -> PyTree:
        """The training data, and the base model: the same training without the inputs."""
        return {"x": x, "y": y, "base": self._train(key, x, y, None)}

    def begin(self, memory: PyTree) -> PyTree:
        check_memory(memory, "x", "y", "base")
        return ()

    def base(self, memory: PyTree, state: PyTree, n: int) -> PyTree:
        return memory["base"]

    def adapt(self, key: Array, memory: PyTree, state: PyTree, x: Array) -> tuple[PyTree, PyTree]:
        return self._train(key, memory["x"], memory["y"], x), state

    def between(self, key: Array, memory: PyTree, state: PyTree) -> PyTree:
        return state

    def predict(self, memory: PyTree, adapted: PyTree, x: Array) -> Array:
        return adapted(x)

    def _train(self, key: Array, x: Array, y: Array, target: Array | None) -> Model:
        first, second, third, fourth = jax.random.split(key, 4)
        both = {"model": self.network(key=first), "judge": self.discriminator(key=second)}
        rule = optax.adam(self.learning_rate)
        own = fitting.batches(third, len(y), self.size, self.steps)
        if target is None:
            other = jnp.zeros((self.steps, 1), jnp.int32)
        else:
            other = fitting.batches(fourth, len(target), self.size, self.steps)

        def step(carried: PyTree, row: tuple[Array, Array, Array]) -> tuple[PyTree, None]:
            (both, known), (source, rest, number) = carried, row
            alpha = self.peak * (2 / (1 + jnp.exp(-10 * number / self.steps)) - 1)

            def loss(both: dict[str, Model]) -> tuple[Array, Any]:
                inputs = None if target is None else target[rest]
                return _losses(both, x[source], y[source], inputs, alpha)

            both, known, _ = models.descend(rule, loss, both, known)
            return (both, known), None

        rows = own, other, jnp.arange(self.steps)
        (both, _), _ = jax.lax.scan(step, (both, rule.init(models.parameters(both))), rows)
        return both["model"]


def _losses(
    both: dict[str, Model], x: Array, y: Array, target: Array | None, alpha: Array
) -> tuple[Array, dict[str, Model]]:
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
    """``x``, whose gradient is reversed and scaled by ``alpha``.

    >>> float(jax.grad(lambda x: reverse(3 * x, 0.5))(1.0))
    -1.5
    """
    return x


def _reverse_forward(x: Array, alpha: Array) -> tuple[Array, Array]:
    return x, alpha


def _reverse_backward(alpha: Array, pull: Array) -> tuple[Array, None]:
    return -alpha * pull, None


reverse.defvjp(_reverse_forward, _reverse_backward)
