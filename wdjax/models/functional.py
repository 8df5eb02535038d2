"""Turns a Flax module into :data:`wdjax.Model`: a pure function and a plain nested dict."""

import functools

import jax
from flax import nnx

from wdjax.core import Model
from wdjax.models.layers import BatchNorm


class _Apply:
    """``apply(params, x)`` of a graph definition; equal for equal graphs, so that jit reuses it."""

    def __init__(self, graph, method):
        self.graph, self.method = graph, method
        self._hash = hash((graph, method))

    def __call__(self, params, x):
        module = nnx.merge(self.graph, params)
        return module(x) if self.method is None else getattr(module, self.method)(x)

    def __eq__(self, other):
        return self is other or (
            isinstance(other, _Apply)
            and self._hash == other._hash
            and self.method == other.method
            and self.graph == other.graph
        )

    def __hash__(self):
        return self._hash

    def __repr__(self):
        return f"apply[{self.kind.__name__}]"

    @property
    def kind(self):
        """The module's class."""
        return self.graph.nodes[0].type

    def variant(self, method):
        return _apply(self.graph, method)


@functools.lru_cache(maxsize=1024)
def _apply(graph, method=None):
    """The one :class:`_Apply` of a graph and method; equal ones are the same object."""
    return _Apply(graph, method)


def functional(module: nnx.Module) -> Model:
    """Turns an NNX module into a model: ``model(x)`` is ``module(x)``.

    Args:
      module: an NNX module without lists, ``[n, *shape]`` -> logits ``[n, K]``. BatchNorm and
        dropout must be in inference mode: call ``module.eval()`` first.

    Returns:
      A ``Model`` whose params are a nested dict of arrays (of ``ShapeDtypeStruct`` for an abstract
      module). Modules that differ only in parameters give the same function.

    Raises:
      ValueError: a layer whose output depends on the batch or on chance (BatchNorm that uses the
        batch's statistics, active dropout).

    >>> from wdjax.models import MLP
    >>> model = functional(MLP((4, 8, 3), rngs=nnx.Rngs(0)))
    >>> sorted(model.args[0]), model.args[0]["fc1"]["kernel"].shape
    (['fc1', 'fc2'], (4, 8))
    """
    _refuse_training_form(module)
    graph, state = nnx.split(module)
    return Model(_apply(graph), nnx.to_pure_dict(state))


def _refuse_training_form(module):
    """Raises if a layer is in training mode, where outputs depend on the batch or on chance."""
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
      model: from :func:`functional` or a function that uses it; its module needs a ``features``
        method.

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
    return _part(model, "features")


def head(model: Model) -> Model:
    """The last layer of a model from this package, with the same parameters.

    ``head(model)(features(model)(x))`` is ``model(x)``.

    Args:
      model: from :func:`functional` or a function that uses it; its module needs a ``classify``
        method.

    Returns:
      A ``Model`` from features ``[n, width]`` to logits ``[n, K]``.

    Raises:
      ValueError: the model does not come from a module of this package.

    >>> import jax, jax.numpy as jnp
    >>> from wdjax import models
    >>> model = models.mlp((4, 8, 3), key=jax.random.key(0))
    >>> models.head(model)(jnp.ones((2, 8))).shape
    (2, 3)
    """
    return _part(model, "classify")


_ASKED = {"features": "features", "classify": "head"}


def _part(model, method):
    """A model that calls another method of the same module; raises if the module lacks it."""
    apply = _ours(model, f"{_ASKED[method]} needs")
    if not hasattr(apply.kind, method):
        raise ValueError(
            f"{apply.kind.__name__} has no method {method!r}; give it one, or write your own "
            "function of the parameters."
        )
    return Model(apply.variant(method), *model.args)


def is_module(model):
    """Whether a model comes from :func:`functional`."""
    return isinstance(getattr(model, "func", None), _Apply)


def _ours(model, who):
    """The :class:`_Apply` inside a model from this package.

    Raises for any other function; ``who`` begins the message.
    """
    if not is_module(model):
        raise ValueError(
            f"{who} a model from wdjax.models or wdjax.convert, got {type(model).__name__}; "
            "write your own function for other models."
        )
    return model.func


def batch_statistics(model: Model) -> Model:
    """The same model with BatchNorm by the batch's statistics, for test-time adaptation.

    Every BatchNorm normalises by the mean and the biased variance of its batch, as PyTorch does in
    training; the stored statistics stay in the parameters, unused. A sample's output then depends
    on its batch, so :func:`wdjax.run` refuses such a model; an adaptive defence chooses the batch
    itself.

    Args:
      model: from :func:`functional` or a function that uses it, with this package's BatchNorm.

    Returns:
      A ``Model`` with the same parameters.

    Raises:
      ValueError: the model does not come from a module of this package, or has no BatchNorm.

    Source: Schneider et al. (2020), Improving robustness against common corruptions by covariate
    shift adaptation.

    >>> from wdjax.models import zoo
    >>> import jax, jax.numpy as jnp
    >>> net = zoo.build("wide_resnet", {"depth": 10, "width": 1}, rngs=nnx.Rngs(0))
    >>> adapted = batch_statistics(functional(net))
    >>> adapted(jnp.ones((2, 32, 32, 3))).shape
    (2, 10)
    """
    apply = _ours(model, "batch_statistics needs")
    module = nnx.merge(apply.graph, jax.tree.map(_abstract, model.args[0]))
    found = [node for _, node in nnx.iter_graph(module) if isinstance(node, BatchNorm)]
    if not found:
        raise ValueError(f"{apply.kind.__name__} has no BatchNorm; there is nothing to adapt.")
    for layer in found:
        layer.of_batch = True
    return Model(_apply(nnx.split(module)[0], apply.method), *model.args)


def _abstract(leaf):
    """The shape and dtype of a leaf, without its values."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


_AFFINE = {"scale", "bias"}
_NORMS = (_AFFINE, _AFFINE | {"mean", "var"})


def split_affine(params):
    """Separates the scales and biases of BatchNorm and LayerNorm from all other parameters.

    Args:
      params: the nested dict of a model with such layers.

    Returns:
      ``(affine, rest)``: a dict of layer path -> ``{"scale", "bias"}``, and the nested dict without
      them. :func:`join_affine` is the inverse.

    Raises:
      ValueError: no such layer.

    >>> affine, rest = split_affine({"bn1": {"scale": 1.0, "bias": 0.0, "mean": 2.0, "var": 3.0}})
    >>> affine, rest
    ({'bn1': {'bias': 0.0, 'scale': 1.0}}, {'bn1': {'mean': 2.0, 'var': 3.0}})
    """
    affine = {}

    def walk(node, path):
        if not isinstance(node, dict):
            return node
        if set(node) in _NORMS:
            affine["/".join(path)] = {"bias": node["bias"], "scale": node["scale"]}
            return {name: leaf for name, leaf in node.items() if name not in _AFFINE}
        return {name: walk(child, (*path, name)) for name, child in node.items()}

    rest = walk(params, ())
    if not affine:
        raise ValueError("these parameters have no BatchNorm or LayerNorm with scale and bias.")
    return affine, rest


def join_affine(affine, rest):
    """The inverse of :func:`split_affine`.

    Args:
      affine: the first part of :func:`split_affine`.
      rest: the second.

    Raises:
      ValueError: ``rest`` lacks a layer of ``affine``.

    >>> join_affine({"a/b": {"bias": 0.0, "scale": 1.0}}, {"a": {"b": {"mean": 2.0, "var": 3.0}}})
    {'a': {'b': {'mean': 2.0, 'var': 3.0, 'bias': 0.0, 'scale': 1.0}}}
    """
    left = dict(affine)

    def walk(node, path):
        if not isinstance(node, dict):
            return node
        joined = {name: walk(child, (*path, name)) for name, child in node.items()}
        return joined | left.pop("/".join(path), {})

    joined = walk(rest, ())
    if left:
        raise ValueError(f"there is no layer {', '.join(sorted(left))} to join these to.")
    return joined
