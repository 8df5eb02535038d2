"""TADV: adversarial training from scratch for every set of inputs, with private randomness."""

import dataclasses
from typing import Any, ClassVar

import jax
import optax

from wdjax import distinct
from wdjax.attacks import PGD
from wdjax.attacks.ascent import setting
from wdjax.checks import validate
from wdjax.core import Array, Attack, PyTree
from wdjax.transductive import fitting
from wdjax.transductive.defense import Retrained
from wdjax.transductive.fitting import Network, Opponent, Rule


@distinct.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TADV(Retrained):
    """Transductive adversarial training: the model is trained anew after the attacker's move.

    Half of the loss is that of clean samples and half that of attacked ones. The inputs are not
    used (``uses_inputs``): only the randomness changes, which the attacker cannot know.

    Args:
      network: ``network(key=key)``: a model with random parameters.
      attack: the attack used in training.
      eps: its radius.
      steps: Adam steps of a training, with a rate that falls to 0 along a cosine.
      size: samples in a step.
      learning_rate: Adam's, in the first step.
      rule: makes an optax transformation from the number of steps, in place of Adam.
      augment: crop and flip the images of every step by chance.

    Raises:
      ValueError: a count below 1.

    Cost: an adversarial training for every adaptation.

    Differs: the authors start the inner attack at zero or at noise, with equal probability; on
      MNIST their rate is constant.

    Source: Chen et al. [chen2022], section 6 and A.5.
    """

    uses_inputs: ClassVar[bool] = False

    network: Network = dataclasses.field(metadata={"static": True})
    attack: Attack = dataclasses.field(default_factory=lambda: PGD(steps=10, random_start=True))
    eps: float | Array = 0.3
    steps: int = setting(600)
    size: int = setting(128)
    learning_rate: Any = 3e-3
    rule: Rule | None = dataclasses.field(default=None, metadata={"static": True})
    augment: bool = setting(False)

    def __post_init__(self) -> None:
        for name in ("steps", "size"):
            object.__setattr__(self, name, validate.check_count(name, getattr(self, name)))

    def prepare(self, key: Array, x: Array, y: Array) -> PyTree:
        """The training data, and the static model, trained once in the same way."""
        return {"x": x, "y": y, "base": self._train(key, x, y)}

    def adapt(self, key: Array, memory: PyTree, state: PyTree, x: Array) -> tuple[PyTree, PyTree]:
        return self._train(key, memory["x"], memory["y"]), state

    def _train(self, key: Array, x: Array, y: Array) -> PyTree:
        """A model trained adversarially from scratch; ``key`` draws weights and batches."""
        first, second = jax.random.split(key)
        schedule = optax.cosine_decay_schedule(1.0, self.steps)
        rule = optax.chain(optax.adam(self.learning_rate), optax.scale_by_schedule(schedule))
        if self.rule is not None:
            rule = self.rule(self.steps)
        return fitting.train_classifier(
            self.network(key=first),
            x,
            y,
            key=second,
            steps=self.steps,
            size=self.size,
            rule=rule,
            opponent=Opponent(self.attack, self.eps),
            augment=self.augment,
        )
