"""Programs that are traced to be analysed, in plain operations, and not to run fast."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import jax

_PLAIN: ContextVar[bool] = ContextVar("plain", default=False)


@contextlib.contextmanager
def plain() -> Iterator[None]:
    """A context in which traces contain plain convolutions, for functions that analyse programs.

    >>> import jax.numpy as jnp
    >>> from wdjax.models.conv import conv
    >>> with plain():
    ...     program = jax.make_jaxpr(conv)(jnp.ones((1, 5, 5, 2)), jnp.ones((3, 3, 2, 4)))
    >>> [eqn.primitive.name for eqn in program.eqns][-1]
    'conv_general_dilated'
    """
    # JAX keeps traces by its own settings, of which this is none; the other name of the highest
    # precision makes it take another trace than one that was made outside.
    config: Any = jax.config
    name = "highest" if config.jax_default_matmul_precision == "float32" else "float32"
    before = _PLAIN.set(True)
    try:
        with jax.default_matmul_precision(name):
            yield
    finally:
        _PLAIN.reset(before)


def analysed() -> bool:
    """Whether the trace is one of a function that analyses programs: inside :func:`plain`."""
    return _PLAIN.get()
