"""The identity of a checkpoint: a digest of traced programs and of every number that enters them.

Two functions are the same if they trace to the same program; their names and source code do not
matter. A lambda that calls another loss, a captured array or a changed default gives another
program.
"""

import functools
import hashlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

_NAMES = {"name", "debug_info", "jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd", "out_trees"}
"""Parameters of equations that do not affect the result: names, and derivative rules, which are
part of the trace wherever derivatives are taken."""


def program(function: Callable[..., Any], *args: Any) -> ClosedJaxpr:
    """Traces a function, for :func:`digest`.

    Args:
      function: traceable.
      *args: pytrees of arrays or ``jax.ShapeDtypeStruct``; only shapes and dtypes matter.
    """
    return jax.make_jaxpr(lambda *given: function(*given))(*args)  # See wdjax.distinct.


def digest(*trees: Any) -> bytes:
    """A digest, 32 bytes, of structures, programs, dtypes, shapes and every number in some pytrees.

    Args:
      *trees: pytrees whose leaves are arrays, numbers, strings, or programs from :func:`program`.

    Returns:
      SHA-256, the same in every process. A host callback enters by its name alone: what it computes
      is not seen.

    >>> digest(np.ones(2)) == digest(np.ones(2)), digest(np.ones(2)) == digest(np.zeros(2))
    (True, False)
    >>> one, same, other = (program(f, 1.0) for f in (jnp.sin, lambda t: jnp.sin(t), jnp.cos))
    >>> digest(one) == digest(same), digest(one) == digest(other)
    (True, False)
    """
    known, seen = hashlib.sha256(), dict[int, bytes]()
    for path, leaf in jax.tree_util.tree_leaves_with_path(trees):
        known.update(str(path).encode() + _bytes(leaf, seen))
    return known.digest()


def words(value: Any) -> str:
    """A setting's ``repr`` without memory addresses, so that it is the same in every process.

    >>> words(digest), words(0.5)
    ('<function digest>', '0.5')
    """
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _bytes(value: Any, seen: dict[int, bytes]) -> bytes:
    """A digest of a leaf of a tree, or of an equation's parameter.

    ``seen`` caches the digests of inner programs by ``id``. Numbers count bit for bit, functions by
    their qualified names, programs by :func:`_program_bytes`.
    """
    if type(value) in _WORDS:
        return _digest_of_word(value)
    known = hashlib.sha256(type(value).__name__.encode())
    if isinstance(value, ClosedJaxpr | Jaxpr):
        if id(value) not in seen:
            seen[id(value)] = _program_bytes(value, seen)
        return seen[id(value)]
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return _bytes((str(value.dtype), jax.random.key_data(value)), seen)
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        array = np.asarray(value)
        return hashlib.sha256(f"{array.dtype} {array.shape}".encode() + array.tobytes()).digest()
    if isinstance(value, tuple | list):
        parts = [_bytes(part, seen) for part in value]
    elif isinstance(value, Mapping):
        parts = [_bytes((key, value[key]), seen) for key in sorted(value, key=str)]
    elif isinstance(value, set | frozenset):
        parts = sorted(_bytes(part, seen) for part in value)
    elif callable(value) and hasattr(value, "__qualname__"):
        parts = [f"{value.__module__}.{value.__qualname__}".encode()]
    else:
        parts = [words(value).encode()]
    for part in parts:
        known.update(part)
    return known.digest()


_WORDS = {str, int, bool, type(None)}
"""Types of most parts of a program, whose equal values have equal digests; 0.0 and -0.0 do not."""


@functools.lru_cache(maxsize=2**14, typed=True)
def _digest_of_word(value: str | int | None) -> bytes:
    """A digest of such a part. Programs repeat them: the cache halves the time of a digest."""
    return hashlib.sha256(type(value).__name__.encode() + words(value).encode()).digest()


def _program_bytes(jaxpr: ClosedJaxpr | Jaxpr, seen: dict[int, bytes]) -> bytes:
    """A digest of a program: its constants and equations, with variables numbered in order.

    Names and derivative rules do not count. ``seen`` maps the ``id`` of an inner program to its
    digest.
    """
    consts, body = getattr(jaxpr, "consts", ()), getattr(jaxpr, "jaxpr", jaxpr)
    numbers: dict[Any, int] = {}
    known = hashlib.sha256()

    def note(*parts: Any) -> None:
        known.update(_bytes(parts, seen))

    def bind(variable: Any) -> None:
        numbers[variable] = len(numbers)
        note("value", str(variable.aval))

    def read(atom: Any) -> Any:
        if isinstance(atom, Literal):
            return "literal", str(atom.aval), np.asarray(atom.val)
        return numbers[atom]

    for variable in (*body.constvars, *body.invars):
        bind(variable)
    note("constants", *consts)
    for eqn in body.eqns:
        params = {key: value for key, value in eqn.params.items() if key not in _NAMES}
        note(eqn.primitive.name, params, *map(read, eqn.invars))
        for variable in eqn.outvars:
            bind(variable)
    note("results", *map(read, body.outvars))
    return known.digest()
