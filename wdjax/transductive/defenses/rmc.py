"""RMC: before every prediction the model is trained on the input's neighbours."""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from wdjax import distinct, loops, losses, models
from wdjax.attacks import PGD
from wdjax.attacks.ascent import setting
from wdjax.checks import validate
from wdjax.core import Array, Attack, Model, PyTree
from wdjax.engine import driver
from wdjax.transductive import fitting
from wdjax.transductive.defense import check_memory

_NEAR = 0.2
"""Share of the neighbours, the nearest, from which validation samples are drawn."""
_HELD = 0.25
"""Share of these that is held out for validation."""
_CALIBRATION_HELD = 0.125
"""Share held out for validation in the calibration."""
_LOSS = 0.01
"""Training goes on while its loss is above this."""


class State(NamedTuple):
    model: Model
    known: PyTree
    """Adam's state."""


@distinct.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RMC:
    r"""Runtime masking and cleansing: the model is trained further for every single input.

    The augmented data are the training samples and attacked copies of them. An input's neighbours
    are its nearest augmented samples in the base model's features. A random quarter of the nearest
    fifth is held out; on the rest Adam trains the model of the *previous* round further, until an
    epoch's mean loss is below 0.01 and the held-out loss has not fallen for ``patience`` epochs, or
    for ``epochs``. After the prediction it is calibrated in the same way on random clean samples.
    The defender is stateful: model and Adam's moments are kept from round to round.

    Args:
      model: the base model, of this package.
      attack: makes the attacked copies of the training data, against the base model.
      eps: its radius.
      copies: attacked copies of every training sample.
      neighbours: K.
      epochs: maximum number of epochs.
      patience: epochs without a lower held-out loss after which training may stop.
      size: samples in a step.
      learning_rate: Adam's.
      calibrate: train on clean samples between the rounds.

    Raises:
      ValueError: a count below its least; rounds of more than one input; a model without features,
        or fewer augmented samples than neighbours.

    Cost: up to ``epochs`` passes over K samples for every input, twice that with calibration.

    Differs: an epoch drops its last, incomplete batch; random crops and flips are left out. The
      paper's stopping rule lacks the training loss, and it does not mention the calibration: both
      are in the code.

    Source: Wu et al. [rmc2020]; Chen et al. [chen2022], A.2.
    """

    per_sample: ClassVar[bool] = False
    uses_inputs: ClassVar[bool] = True
    rejects: ClassVar[bool] = False

    model: Model
    attack: Attack = dataclasses.field(default_factory=lambda: PGD(random_start=True))
    eps: float | Array = 8 / 255
    copies: int = setting(1)
    neighbours: int = setting(1024)
    epochs: int = setting(100)
    patience: int = setting(5)
    size: int = setting(128)
    learning_rate: float | Array = 2e-4
    calibrate: bool = setting(True)

    def __post_init__(self) -> None:
        counts = {"copies": 0, "neighbours": 40, "epochs": 1, "patience": 1, "size": 1}
        for name, least in counts.items():
            object.__setattr__(self, name, validate.check_count(name, getattr(self, name), least))

    def prepare(self, key: Array, x: Array, y: Array) -> PyTree:
        """Augmented data, clean samples first, and their features under the base model."""
        if len(y) * (1 + self.copies) < self.neighbours:
            raise ValueError(
                f"{self.neighbours} neighbours need as many augmented samples, got {len(y)} "
                f"training samples and {self.copies} copies of each; pass more "
                "training samples or set neighbours."
            )

        def attacked(number: Array) -> Array:
            epoch_key = jax.random.fold_in(key, number)

            def some(rows: Any) -> Array:
                points, labels, index = rows
                found = driver.search(
                    self.attack,
                    self.model,
                    points,
                    labels,
                    eps=jnp.asarray(self.eps, x.dtype),
                    key=epoch_key,
                    index=index,
                    skip_misclassified=False,
                )
                return found.x_adv

            return fitting.chunked(some, (x, y, jnp.arange(len(y))))

        rows = [x]
        if self.copies:
            moved = jax.lax.map(attacked, jnp.arange(self.copies))
            rows.append(moved.reshape(-1, *x.shape[1:]))
        whole = jnp.concatenate(rows)
        features = fitting.chunked(models.features(self.model), whole)
        return {"x": whole, "y": jnp.tile(y, 1 + self.copies), "features": features}

    def begin(self, memory: PyTree) -> State:
        check_memory(memory, "x", "y", "features")
        return State(self.model, self._rule.init(models.parameters(self.model)))

    def base(self, memory: PyTree, state: State, n: int) -> PyTree:
        return state.model

    @property
    def _rule(self) -> optax.GradientTransformation:
        """The optimiser, Adam."""
        return optax.adam(self.learning_rate)

    def adapt(self, key: Array, memory: PyTree, state: State, x: Array) -> tuple[PyTree, State]:
        if len(x) != 1:
            raise ValueError(f"RMC adapts to one input at a time: play rounds of 1, got {len(x)}.")
        split, train = jax.random.split(key)
        near, held = self._parted(split, self.nearest(memory, x))
        state = self._train(train, memory, state, near, held)
        return state.model, state

    def nearest(self, memory: PyTree, x: Array) -> Array:
        """``[neighbours]``: indices of augmented samples near ``x [1, *shape]``, nearest first."""
        mapped, known = models.features(self.model)(x)[0], memory["features"]
        distance = jnp.sum(known**2, axis=1) - 2 * known @ mapped
        return jax.lax.top_k(-distance, self.neighbours)[1]

    def _parted(self, key: Array, nearest: Array) -> tuple[Array, Array]:
        """The neighbours' indices, split into those to train on and those held out."""
        near = int(_NEAR * self.neighbours)
        held = int(_HELD * near)
        order = jax.random.permutation(key, nearest[:near])
        return jnp.concatenate([order[held:], nearest[near:]]), order[:held]

    def between(self, key: Array, memory: PyTree, state: State) -> State:
        if not self.calibrate:
            return state
        draw, train = jax.random.split(key)
        clean = len(memory["y"]) // (1 + self.copies)
        chosen = jax.random.randint(draw, (self.neighbours,), 0, clean)
        held = int(_CALIBRATION_HELD * self.neighbours)
        return self._train(train, memory, state, chosen[held:], chosen[:held])

    def predict(self, memory: PyTree, adapted: PyTree, x: Array) -> Array:
        return adapted(x)

    def _train(self, key: Array, memory: PyTree, state: State, near: Array, held: Array) -> State:
        """Trains on samples ``near`` ``[m]`` until the stopping rule holds on ``held`` ``[h]``.

        Both are indices of the memory's samples; the length of the loop is known at run time only,
        since the rule ends it.
        """
        x, y = memory["x"], memory["y"]
        steps = -(-len(near) // self.size)
        size = len(near) // steps  # Equal batches, which drop fewer samples than one batch has.

        def step(carried: State, batch: Array) -> tuple[State, Array]:
            def loss(model: Model) -> tuple[Array, Model]:
                logits, moved = models.training_pass(model, x[batch])
                return jnp.mean(losses.cross_entropy(logits, y[batch])), moved

            model, known, value = models.descend(self._rule, loss, *carried)
            return State(model, known), value

        def epoch(carried: Any) -> Any:
            state, number, least, waited, _ = carried
            rows = near[fitting.batches(jax.random.fold_in(key, number), len(near), size, steps)]
            state, values = loops.scan(step, state, rows)
            value = jnp.mean(losses.cross_entropy(state.model(x[held]), y[held]))
            waited = jnp.where(value < least, 0, waited + 1)
            return state, number + 1, jnp.minimum(value, least), waited, jnp.mean(values)

        def goes_on(carried: Any) -> Array:
            _, number, _, waited, loss = carried
            settled = (loss < _LOSS) & (waited >= self.patience)
            return (number < self.epochs) & ~settled & ~jnp.isnan(loss)

        infinite = jnp.asarray(jnp.inf, x.dtype)
        begun = state, jnp.zeros((), int), infinite, jnp.zeros((), int), infinite
        return loops.while_loop(goes_on, epoch, begun)[0]
