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
        and dropout must be in their inference form: call ``module.eval()`` first.

    Returns:
      A ``Model`` whose params are a nested dict of arrays (of ``ShapeDtypeStruct`` for an abstract
      module). Modules that differ only in their parameters give the same function.

    Raises:
      ValueError: a layer that treats a batch as a whole or at random (BatchNorm with the statistics
        of the batch, dropout that is on).

    >>> from wdjax.models import MLP
    >>> model = functional(MLP((4, 8, 3), rngs=nnx.Rngs(0)))
    >>> sorted(model.args[0]), model.args[0]["fc1"]["kernel"].shape
    (['fc1', 'fc2'], (4, 8))
    """
    _refuse_training_form(module)
    graph, state = nnx.split(module)
    return Model(_apply(graph), nnx.to_pure_dict(state))


def _refuse_training_form(module):
    for path, node in nnx.iter_graph(module):
        batch = getattr(node, "use_running_average", None) is False
        chance = getattr(node, "deterministic", None) is False and getattr(node, "rate", 0) != 0
        if batch or chance:
            where = ".".join(map(str, path)) or "the module"
            raise ValueError(
                f"{where} ({type(node).__name__}) is in its training form, in which a sample's "
                "output depends on its batch or on chance; call module.eval() first."
            )


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


_NORM = {"scale", "bias", "mean", "var"}


def split_affine(params):
    """Separates the scales and biases of BatchNorm from all other parameters.

    Args:
      params: the nested dict of a model with BatchNorm layers.

    Returns:
      ``(affine, rest)``: a dict of layer path -> ``{"scale", "bias"}``, and the nested dict without
      them. :func:`join_affine` puts them together.

    >>> affine, rest = split_affine({"bn1": {"scale": 1.0, "bias": 0.0, "mean": 2.0, "var": 3.0}})
    >>> affine, rest
    ({'bn1': {'bias': 0.0, 'scale': 1.0}}, {'bn1': {'mean': 2.0, 'var': 3.0}})
    """
    affine = {}

    def walk(node, path):
        if not isinstance(node, dict):
            return node
        if set(node) == _NORM:
            affine["/".join(path)] = {"bias": node["bias"], "scale": node["scale"]}
            return {"mean": node["mean"], "var": node["var"]}
        return {name: walk(child, (*path, name)) for name, child in node.items()}

    rest = walk(params, ())
    return affine, rest


def join_affine(affine, rest):
    """The inverse of :func:`split_affine`.

    >>> join_affine({"a/b": {"bias": 0.0, "scale": 1.0}}, {"a": {"b": {"mean": 2.0, "var": 3.0}}})
    {'a': {'b': {'mean': 2.0, 'var': 3.0, 'bias': 0.0, 'scale': 1.0}}}
    """

    def walk(node, path):
        if not isinstance(node, dict):
            return node
        joined = {name: walk(child, (*path, name)) for name, child in node.items()}
        return joined | affine.get("/".join(path), {})

    return walk(rest, ())
