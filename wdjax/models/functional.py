"""From a Flax module to :data:`wdjax.Model`: a pure function and a plain nested dict."""

import functools

from flax import nnx

from wdjax.core import Model


class _Apply:
    """``apply(params, x)`` of a graph definition; equal for equal graphs, so jit never retraces."""

    def __init__(self, graph, method):
        self._graph, self._method = graph, method
        self._hash = hash((graph, method))

    def __call__(self, params, x):
        module = nnx.merge(self._graph, params)
        return module(x) if self._method is None else getattr(module, self._method)(x)

    def __eq__(self, other):
        return self is other or (
            isinstance(other, _Apply)
            and self._hash == other._hash
            and self._method == other._method
            and self._graph == other._graph
        )

    def __hash__(self):
        return self._hash

    def __repr__(self):
        return f"apply[{self._graph.nodes[0].type.__name__}]"

    def variant(self, method):
        return _apply(self._graph, method)


@functools.lru_cache(maxsize=1024)
def _apply(graph, method=None):
    return _Apply(graph, method)


def functional(module: nnx.Module) -> Model:
    """Turns an NNX module into a model: ``model(x)`` is ``module(x)``.

    Args:
      module: an NNX module without lists, mapping ``[n, *shape]`` to logits ``[n, K]``. BatchNorm
        and dropout must be in their inference form.

    Returns:
      A ``Model`` whose params are a nested dict of arrays (of ``ShapeDtypeStruct`` for an abstract
      module). Modules that differ only in their parameters give the same function.

    >>> from wdjax.models import MLP
    >>> model = functional(MLP((4, 8, 3), rngs=nnx.Rngs(0)))
    >>> sorted(model.args[0]), model.args[0]["fc1"]["kernel"].shape
    (['fc1', 'fc2'], (4, 8))
    """
    graph, state = nnx.split(module)
    return Model(_apply(graph), nnx.to_pure_dict(state))


def features(model: Model) -> Model:
    """The penultimate features of a model from this package, with the same parameters.

    Args:
      model: from :func:`functional` or one of its users; its module needs a ``features`` method.

    Returns:
      A ``Model`` from ``[n, *shape]`` to the last layer's inputs ``[n, width]``.

    Raises:
      ValueError: the model does not come from a module of this package.

    >>> import jax, jax.numpy as jnp
    >>> from wdjax import models
    >>> model = models.mlp((4, 8, 3), key=jax.random.key(0))
    >>> models.features(model)(jnp.ones((2, 4))).shape
    (2, 8)
    """
    apply = getattr(model, "func", None)
    if not isinstance(apply, _Apply):
        raise ValueError(
            f"features needs a model from wdjax.models or wdjax.convert, got {model!r}; "
            "write your own function for other models."
        )
    return Model(apply.variant("features"), *model.args)
