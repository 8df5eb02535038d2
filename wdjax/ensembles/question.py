"""The arguments that all searches of an ensemble share: everything but the attack."""

from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from wdjax.checks.forward_mode import SEARCH_TWIN, host_only
from wdjax.core import AnyArray, Array, Attack, Found, PyTree
from wdjax.engine.driver import looked_again, search


class Question(NamedTuple):
    """A model and samples that an ensemble searches repeatedly.

    Every search has a number, from which its random key and its place in the checkpoint are
    derived. A killed ensemble thus resumes bit for bit: searches that had ended are only measured
    again.
    """

    model: Callable[[Array], PyTree]
    x: AnyArray
    y: AnyArray
    key: Array | None
    checkpoint: Path | None
    options: dict[str, Any]
    """Options of :func:`wdjax.search`: ``criterion``, ``index``, ``batch_size``, ``mesh``,
    ``callback``."""

    def search(
        self,
        number: int,
        attack: Attack,
        *,
        eps: Any = None,
        start: AnyArray | None = None,
        only: np.ndarray | None = None,
    ) -> Found:
        """Search ``number`` of the ensemble; see :func:`wdjax.search`."""
        folder = None if self.checkpoint is None else self.checkpoint / f"{number:04d}.safetensors"
        return search(
            attack,
            self.model,
            self.x,
            self.y,
            eps=eps,
            key=None if self.key is None else jax.random.fold_in(self.key, number),
            start=start,
            only=only,
            diagnose=False,
            checkpoint=folder,
            **self.options,
        )

    def looked_again(self, name: str, found: Found, attack: Attack, eps: Any) -> Found:
        """What an ensemble of one attack found, with the second look of a search by it."""
        how = {name: value for name, value in self.options.items() if name != "callback"}
        given = attack, self.model, self.x, self.y
        return looked_again(found, *given, eps=eps, key=self.key, name=name, **how)


def question(
    name: str,
    model: Callable[[Array], PyTree],
    x: AnyArray,
    y: AnyArray,
    key: Array | None,
    checkpoint: str | PathLike[str] | None,
    options: dict[str, Any],
    random: bool = True,
) -> Question:
    """Checks an ensemble's arguments and collects them; raises inside a trace."""
    if random and key is None:
        raise ValueError(f"{name} is random: pass key=jax.random.key(seed).")
    host_only(name, SEARCH_TWIN, model, x, y, key, options)
    for option in ("only", "start", "eps", "history", "skip_misclassified"):
        if option in options:
            raise ValueError(f"{name} does not take {option}: its searches choose their own.")
    if "key" in options:
        raise ValueError(f"{name} does not take key: nothing in it is random.")
    folder = None if checkpoint is None else Path(checkpoint)
    return Question(model, jnp.asarray(x), np.asarray(y), key, folder, options)
