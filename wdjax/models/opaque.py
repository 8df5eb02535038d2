"""Models that JAX cannot trace: functions of NumPy arrays with their gradients, called on the host.

Attacks need values and gradients only. Nothing else can be known of such a model.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from wdjax.core import Model

HostFunction = Callable[[np.ndarray], Any]
"""``x -> out``."""
HostGradient = Callable[[np.ndarray, np.ndarray], Any]
"""``(x, change) -> slope``."""


def opaque(function: HostFunction, gradient: HostGradient) -> Model:
    """A model of a function that JAX cannot trace, for attacks: it is called on the host.

    Attacks, smoothing and what else only calls a model work as for others. Certificates and
    Lipschitz bounds cannot look into it, and refuse it. Its gradient is believed, so that one of
    another function (as for a rounding defence) is possible.

    Args:
      function: ``x -> out``, NumPy floats ``[n, *shape]`` -> floats ``[n, K]``, for any n. It must
        treat each sample alone and stay the same: numbers that it uses are no leaves of the model.
      gradient: ``(x, change) -> slope``, the gradient ``[n, *shape]`` of ``sum(change * out)`` by
        ``x``, with ``change [n, K]``.

    Returns:
      A ``Model`` without leaves, for ``jit``, ``vmap`` and reverse mode. When it is traced, both
      functions are called with two samples, to learn K and to check them.

    Raises:
      ValueError: an argument is no function. When the model is called: what either function returns
        is no array of floats, or has another shape. Inside a compiled program JAX raises its own
        error, with that text.

    Cost: the function's, and two copies of what goes in and out.

    Differs: a checkpoint of a search knows the function by its name and its outputs for two
    samples, not by all its numbers.

    >>> model = opaque(lambda x: np.tanh(x), lambda x, change: change * (1 - np.tanh(x) ** 2))
    >>> jax.grad(lambda x: model(x).sum())(jnp.zeros((1, 2))).tolist()
    [[1.0, 1.0]]
    """
    for name, value in (("function", function), ("gradient", gradient)):
        if not callable(value):
            raise ValueError(f"{name} must be a function of NumPy arrays, got {value!r}.")
    return Model(_Opaque(function, gradient), {})


def opaque_torch(module: Any) -> Model:
    """:func:`opaque` of a PyTorch module, which runs in place, on its own device.

    Images ``[n, H, W, C]`` of the model are ``[n, C, H, W]`` for the module. Where
    :func:`wdjax.convert.from_torch` accepts the module, it is faster and can be certified.

    Args:
      module: a ``torch.nn.Module`` in inference form (``module.eval()``) that returns logits.

    Raises:
      ValueError: the module is in its training form, now or when it is called.

    >>> model = opaque_torch(net.eval())  # doctest: +SKIP
    """
    import torch

    refuse_training(module)
    some = next(module.parameters(), torch.zeros(()))

    def tensor(array: np.ndarray) -> Any:
        turned = array.transpose(0, 3, 1, 2) if array.ndim == 4 else array
        return torch.as_tensor(np.ascontiguousarray(turned)).to(some.device, some.dtype)

    def logits(x: np.ndarray) -> np.ndarray:
        refuse_training(module)
        with torch.no_grad():
            return module(tensor(x)).float().cpu().numpy()

    def slopes(x: np.ndarray, change: np.ndarray) -> np.ndarray:
        refuse_training(module)
        images = tensor(x).requires_grad_()
        with torch.enable_grad():
            out = module(images)
        weights = torch.as_tensor(change).to(out.device, out.dtype)
        slope = torch.autograd.grad(out, images, weights)[0].float().cpu().numpy()
        return slope.transpose(0, 2, 3, 1) if slope.ndim == 4 else slope

    logits.__qualname__ = slopes.__qualname__ = type(module).__qualname__
    return opaque(logits, slopes)


def refuse_training(module: Any) -> None:
    """Raises for a PyTorch module in its training form."""
    modules = module.named_modules()
    training = [name or type(part).__name__ for name, part in modules if part.training]
    if training:
        raise ValueError(
            f"the module is in its training form ({', '.join(training[:4])}), in which a sample's "
            "output depends on its batch or on chance; call module.eval() first."
        )


@dataclasses.dataclass(frozen=True)
class _Opaque:
    """``apply(params, x)`` of a host function."""

    function: HostFunction
    gradient: HostGradient

    def __call__(self, params: Any, x: jax.Array) -> jax.Array:
        del params
        x = jnp.asarray(x)
        return _called(_Host(self, *_learnt(self, x.shape[1:], x.dtype)), x)

    def __repr__(self) -> str:
        return f"opaque[{getattr(self.function, '__qualname__', type(self.function).__name__)}]"


@functools.lru_cache(maxsize=64)
def _learnt(opaque: _Opaque, shape: tuple[int, ...], dtype: Any) -> tuple[Any, ...]:
    """One sample's shape and that of its outputs, and a digest of outputs, from two samples."""
    x = np.random.default_rng(0).uniform(size=(2, *shape)).astype(dtype)
    with jax.ensure_compile_time_eval():
        out = _floats(opaque.function(x.copy()), "function")
        if out.ndim < 1 or len(out) != 2:
            raise ValueError(
                f"the opaque function must return [n, K] for n samples, got {list(out.shape)} for "
                "2."
            )
        slope = _floats(opaque.gradient(x.copy(), np.ones_like(out)), "gradient")
    if slope.shape != x.shape:
        raise ValueError(
            f"the opaque gradient must return the shape of x, {list(x.shape)}, got "
            f"{list(slope.shape)}."
        )
    mark = hashlib.sha256(out.astype(np.float16).tobytes()).hexdigest()[:16]
    return shape, out.shape[1:], mark


def _floats(found: Any, what: str) -> np.ndarray:
    array = np.asarray(found)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(f"the opaque {what} must return floats, got {array.dtype}.")
    return array


@dataclasses.dataclass(frozen=True)
class _Host:
    """What programs call. Axes that ``vmap`` adds in front are further samples."""

    opaque: _Opaque
    shape: tuple[int, ...]
    row: tuple[int, ...]
    """The shape of one sample's outputs."""
    mark: str

    def outputs(self, x: Any) -> np.ndarray:
        x = np.array(x)  # A copy, which may be written to.
        rows = x.reshape(-1, *self.shape)
        return self._checked(self.opaque.function(rows), "function", x, self.row, len(rows))

    def slopes(self, x: Any, change: Any) -> np.ndarray:
        x, change = np.array(x), np.array(change)
        rows, changes = x.reshape(-1, *self.shape), change.reshape(-1, *self.row)
        found = self.opaque.gradient(rows, changes)
        return self._checked(found, "gradient", x, self.shape, len(rows))

    def _checked(
        self, found: Any, what: str, x: np.ndarray, row: tuple[int, ...], n: int
    ) -> np.ndarray:
        array = _floats(found, what)
        if array.shape != (n, *row):
            raise ValueError(
                f"the opaque {what} returned {list(array.shape)} for {n} samples, expected "
                f"{[n, *row]}."
            )
        return array.astype(x.dtype).reshape(*x.shape[: x.ndim - len(self.shape)], *row)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _called(host: _Host, x: jax.Array) -> jax.Array:
    out = jax.ShapeDtypeStruct((x.shape[0], *host.row), x.dtype)
    return jax.pure_callback(host.outputs, out, x, vmap_method="broadcast_all")


def _forward(host: _Host, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _called(host, x), x


def _backward(host: _Host, x: jax.Array, change: jax.Array) -> tuple[jax.Array]:
    slope = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return (jax.pure_callback(host.slopes, slope, x, change, vmap_method="broadcast_all"),)


_called.defvjp(_forward, _backward)
