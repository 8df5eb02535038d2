"""URejectron: rejects inputs that a discriminator can tell from the training data."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import optax

from wdjax import distinct, loops, losses, models
from wdjax.attacks.ascent import setting
from wdjax.checks import validate
from wdjax.core import Array, Model, PyTree
from wdjax.transductive import fitting
from wdjax.transductive.defense import Stateless
from wdjax.transductive.fitting import Network


@distinct.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class URejectron(Stateless):
    r"""A classifier with a discriminator that is trained on the inputs it then judges.

    The discriminator separates training data (0) from inputs (1), equally many in a batch; an input
    is rejected if its probability of 1 is above a threshold. This is one iteration of Goldwasser et
    al.'s algorithm. ``predict`` returns ``(logits, score)``, where score is the log-odds of 1.

    Args:
      model: the classifier, which is fixed.
      discriminator: ``network(key=key)``, a model with two logits.
      steps: Adam steps.
      size: samples of each kind in a step.
      learning_rate: Adam's.

    Raises:
      ValueError: a count below 1.

    Cost: one training of the discriminator for every adaptation.

    Source: Goldwasser et al. [goldwasser2020]; Chen et al. [chen2022], A.6.
    """

    uses_inputs: ClassVar[bool] = True
    rejects: ClassVar[bool] = True
    parts: ClassVar[tuple[str, ...]] = ("x",)

    model: Model
    discriminator: Network = dataclasses.field(metadata={"static": True})
    steps: int = setting(300)
    size: int = setting(128)
    learning_rate: float | Array = 1e-3

    def __post_init__(self) -> None:
        for name in ("steps", "size"):
            object.__setattr__(self, name, validate.check_count(name, getattr(self, name)))

    def prepare(self, key: Array, x: Array, y: Array) -> PyTree:
        """The training data, without labels, which are not needed."""
        return {"x": x}

    def base(self, memory: PyTree, state: PyTree, n: int) -> PyTree:
        """A discriminator that accepts everything: all parameters are 0."""
        judge = self.discriminator(key=jax.random.key(0))
        return models.join(jax.tree.map(jnp.zeros_like, models.parameters(judge)), judge)

    def adapt(self, key: Array, memory: PyTree, state: PyTree, x: Array) -> tuple[PyTree, PyTree]:
        """Trains a discriminator between the memory's ``x [m, *shape]`` and the inputs ``x``."""
        first, second, third = jax.random.split(key, 3)
        rule, train = optax.adam(self.learning_rate), memory["x"]
        rows = (
            fitting.batches(second, len(train), self.size, self.steps),
            fitting.batches(third, len(x), self.size, self.steps),
        )

        def step(carried: PyTree, row: tuple[Array, Array]) -> tuple[PyTree, None]:
            (judge, known), (ours, theirs) = carried, row
            seen = jnp.concatenate([train[ours], x[theirs]])
            side = jnp.concatenate([jnp.zeros(len(ours), int), jnp.ones(len(theirs), int)])
            weight = jnp.where(side == 0, 0.5 / len(ours), 0.5 / len(theirs))

            def loss(judge: Model) -> tuple[Array, Model]:
                said, moved = models.training_pass(judge, seen)
                return jnp.sum(weight * losses.cross_entropy(said, side)), moved

            judge, known, _ = models.descend(rule, loss, judge, known)
            return (judge, known), None

        judge = self.discriminator(key=first)
        (judge, _), _ = loops.scan(step, (judge, rule.init(models.parameters(judge))), rows)
        return judge, state

    def predict(self, memory: PyTree, adapted: PyTree, x: Array) -> tuple[Array, Array]:
        said = adapted(x)
        return self.model(x), said[:, 1] - said[:, 0]
