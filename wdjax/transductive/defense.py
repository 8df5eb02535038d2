"""What a defence is that goes on learning at test time, and who knows what of it."""

from typing import Any, ClassVar, Protocol

from wdjax.core import Array, PyTree


class Defense(Protocol):
    """A transductive learner: a frozen pytree dataclass of pure functions.

    What it works with is split by who knows it. The ``memory`` is public: training data and models
    that were trained on them. The ``state`` is what the defender carries from round to round, which
    an attacker sees only if it leaks. What ``adapt`` returns, the *adapted* parameters, is the
    model of a round: those parameters only that adaptation changes, so that a bank is small.

    All methods run inside ``jit``.
    """

    per_sample: ClassVar[bool]
    """Whether the adapted leaves have the axis of the samples that they belong to."""
    uses_inputs: ClassVar[bool]
    """Whether adaptation looks at the inputs at all; if not, it is private randomness only."""
    rejects: ClassVar[bool]
    """Whether :meth:`predict` returns ``(logits, score)``, and large scores are refused."""

    def prepare(self, key: Array, x: Array, y: Array) -> PyTree:
        """The memory, from the training data ``[n, *shape]`` and ``[n]``."""
        ...

    def begin(self, memory: PyTree) -> PyTree:
        """The state before the first round."""
        ...

    def base(self, memory: PyTree, state: PyTree, n: int) -> PyTree:
        """Adapted parameters for n samples before any adaptation to them: the attacker's F_0."""
        ...

    def adapt(self, key: Array, memory: PyTree, state: PyTree, x: Array) -> tuple[PyTree, PyTree]:
        """``(adapted, state)`` after a round with inputs ``[n, *shape]``; labels are unknown."""
        ...

    def between(self, key: Array, memory: PyTree, state: PyTree) -> PyTree:
        """The state in which the next round begins."""
        ...

    def predict(self, memory: PyTree, adapted: PyTree, x: Array) -> Any:
        """Logits ``[n, K]``, or ``(logits, score [n])`` for a defence that rejects."""
        ...


def check_memory(memory: PyTree, *names: str) -> None:
    """Refuses what :meth:`Defense.prepare` did not return."""
    if not (isinstance(memory, dict) and set(names) == set(memory)):
        held = sorted(memory) if isinstance(memory, dict) else type(memory).__name__
        raise ValueError(
            "memory must be what transductive.prepare returns for this defence, with "
            f"{', '.join(names)}; got {held}."
        )
