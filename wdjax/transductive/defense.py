"""The protocol of defences that learn at test time, and who may see which part of them."""

from typing import Any, ClassVar, Protocol

from wdjax.core import Array, PyTree


class Defense(Protocol):
    """A transductive learner: a frozen pytree dataclass of pure functions.

    Its data are split by who may see them. The ``memory`` is public: training data and models
    trained on them. The ``state`` is what the defender keeps from round to round; an attacker sees
    it only if it leaks. The *adapted* parameters, returned by ``adapt``, are the model of a round:
    only the parameters that adaptation changes, so that a bank is small.

    All methods run inside ``jit``.
    """

    per_sample: ClassVar[bool]
    """Whether the leaves of the adapted parameters have a leading axis of samples."""
    uses_inputs: ClassVar[bool]
    """Whether adaptation depends on the inputs; if not, only on private randomness."""
    rejects: ClassVar[bool]
    """Whether :meth:`predict` returns ``(logits, score)``; inputs of large score are rejected."""

    def prepare(self, key: Array, x: Array, y: Array) -> PyTree:
        """The memory, from training data ``[n, *shape]`` and labels ``[n]``."""
        ...

    def begin(self, memory: PyTree) -> PyTree:
        """The state before the first round."""
        ...

    def base(self, memory: PyTree, state: PyTree, n: int) -> PyTree:
        """Adapted parameters for n samples before any adaptation: the attacker's F_0."""
        ...

    def adapt(self, key: Array, memory: PyTree, state: PyTree, x: Array) -> tuple[PyTree, PyTree]:
        """``(adapted, state)`` after a round with inputs ``[n, *shape]``, without labels."""
        ...

    def between(self, key: Array, memory: PyTree, state: PyTree) -> PyTree:
        """The state at the start of the next round."""
        ...

    def predict(self, memory: PyTree, adapted: PyTree, x: Array) -> Any:
        """Logits ``[n, K]``, or ``(logits, score [n])`` for a defence that rejects."""
        ...


class Stateless:
    """What defences share that keep nothing from round to round and whose model is ``adapted``."""

    per_sample: ClassVar[bool] = False
    rejects: ClassVar[bool] = False
    parts: ClassVar[tuple[str, ...]] = ()
    """The names of the memory's parts."""

    def begin(self, memory: PyTree) -> PyTree:
        if self.parts:
            check_memory(memory, *self.parts)
        return ()

    def between(self, key: Array, memory: PyTree, state: PyTree) -> PyTree:
        return state

    def predict(self, memory: PyTree, adapted: Any, x: Array) -> Any:
        return adapted(x)


class Retrained(Stateless):
    """What defences share that train a new model for every round, beside a ``"base"`` model."""

    parts: ClassVar[tuple[str, ...]] = ("x", "y", "base")

    def base(self, memory: PyTree, state: PyTree, n: int) -> PyTree:
        return memory["base"]


def check_memory(memory: PyTree, *names: str) -> None:
    """Raises unless the memory is what :meth:`Defense.prepare` returned."""
    if not (isinstance(memory, dict) and set(names) == set(memory)):
        held = sorted(memory) if isinstance(memory, dict) else type(memory).__name__
        raise ValueError(
            "memory must be what transductive.prepare returns for this defence, with "
            f"{', '.join(names)}; got {held}."
        )
