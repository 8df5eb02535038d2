"""What training changes in a model: parameters, by gradients; averages and random state, by passes.

A Flax NNX module declares the kind of each variable, so it is trained as Flax trains it. For any
other pytree all leaves are parameters, and leaves that cannot be are refused, by name.
"""

import collections

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from wdjax.core import Model
from wdjax.models.functional import is_module
from wdjax.models.layers import BatchNorm
from wdjax.precision import promoted

_AVERAGES = {"batch_stats", "mean_ema", "var_ema"} | {
    f"{kind}_{moment}" for kind in ("running", "moving") for moment in ("mean", "var", "variance")
}
"""Names of running averages in Linen, Haiku, PyTorch and Keras."""
_MOMENTS = {"mean", "var"}
"""Their names in Flax, where both are in one dict."""

_ADVICE = (
    "Keep it as it is by moving it into the function, wdjax.Model(lambda params, x: apply(params, "
    "kept, x), params); or build the model by wdjax.models.functional of a Flax NNX module, which "
    "is trained as Flax trains it; or train it with its framework."
)


def parameters(model):
    """The model's parameters: the model with None in place of every other leaf.

    For a module from :func:`wdjax.models.functional` the parameters are its ``nnx.Param``; for any
    other pytree they are all leaves.

    Args:
      model: a pytree callable, or a pytree of several.

    Returns:
      A pytree like the model; :func:`join` adds the other leaves.

    Raises:
      ValueError: a parameter that is not an array of floats; or a leaf of another pytree that is a
        running average or a state by its type or its name. The message names it.

    >>> from wdjax import models
    >>> own = parameters(models.norm_mlp((2, 3, 2), key=jax.random.key(0)))
    >>> own.args[0]["bn1"]["mean"] is None, own.args[0]["bn1"]["scale"].shape
    (True, (3,))
    """
    _refuse_states(jax.tree_util.tree_flatten_with_path(model, is_leaf=_of_a_kind)[0])
    params = _own(model)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        _refuse_others(path, leaf)
    return params


def join(params, model):
    """The parameters ``params`` with the other leaves of ``model``.

    Args:
      params: as of :func:`parameters`.
      model: the model that they were taken from.

    >>> from wdjax import models
    >>> model = models.norm_mlp((2, 3, 2), key=jax.random.key(0))
    >>> joined = join(parameters(model), model)
    >>> jax.tree.structure(joined) == jax.tree.structure(model)
    True
    """
    return jax.tree.map(
        lambda new, old: old if new is None else new,
        params,
        model,
        is_leaf=lambda leaf: leaf is None,
    )


def descend(rule, loss, model, known):
    """One optimiser step on the parameters; other leaves are those after the training passes.

    Args:
      rule: from optax, initialised by ``rule.init(parameters(model))``.
      loss: ``model -> (value, model after its training passes, *seen)``.
      model: a pytree callable, or a pytree of several.
      known: the rule's state.

    Returns:
      ``(model, known, value, *seen)``.
    """
    params = parameters(model)

    def of(params):
        value, *rest = loss(join(params, model))
        return value, rest

    (value, (moved, *seen)), gradient = jax.value_and_grad(of, has_aux=True)(params)
    with promoted():  # Optax mixes dtypes.
        updates, known = rule.update(gradient, known, params)
        params = optax.apply_updates(params, updates)
    return join(params, moved), known, value, *seen


def training_pass(model, x, momentum=0.1):
    """One forward pass in training mode.

    BatchNorm normalises by the batch, and its averages are updated; dropout is active, and draws
    from its own random state. A model without an NNX module has no training mode and is just
    called.

    Args:
      model: a ``Model``.
      x: ``[n, *shape]``, the batch.
      momentum: weight of the batch in the averages of this package's BatchNorm; other layers have
        their own.

    Returns:
      ``(out, model)``: the outputs, and the model with updated averages and random state.

    Raises:
      ValueError: averages or a dropout that do not change in training mode, dropout without a
        random state, or a module with averages or random state inside another function, which calls
        it in inference mode. The message names them.

    Cost: one forward pass.

    >>> from wdjax import models
    >>> model = models.norm_mlp((2, 3, 2), key=jax.random.key(0))
    >>> _, moved = training_pass(model, jnp.ones((4, 2)))
    >>> moved.func == model.func, bool(jnp.allclose(moved.args[0]["bn1"]["var"], 0.9))
    (True, True)
    """
    if not is_module(model):
        _refuse_modules_inside(model)
        return model(x), model
    apply, before = model.func, model.args[0]
    module = nnx.merge(apply.graph, before)
    module.train()
    for _, node in nnx.iter_graph(module):
        if isinstance(node, BatchNorm):
            node.of_batch, node.momentum = True, momentum
    _refuse_chance_without_state(module)
    out = module(x) if apply.method is None else getattr(module, apply.method)(x)
    after = _like(before, nnx.to_pure_dict(nnx.state(module)))
    if apply.method is None:  # A part of a module need not use all its layers.
        _refuse_what_stayed(module, before, after)
    return out, Model(apply, after)


def _own(model):
    """The model with None in place of every leaf of a module that is not an ``nnx.Param``."""

    def of(node):
        if not is_module(node):
            return node
        state = nnx.state(nnx.merge(node.func.graph, node.args[0]))
        kept = nnx.to_pure_dict(state, extract_fn=lambda variable: isinstance(variable, nnx.Param))
        params = jax.tree.map(lambda keep, leaf: leaf if keep else None, kept, node.args[0])
        return Model(node.func, params)

    return jax.tree.map(of, model, is_leaf=is_module)


def _of_a_kind(node):
    """Whether a subtree declares its kind: a module, an NNX variable, or Equinox's state."""
    return is_module(node) or isinstance(node, nnx.Variable) or _is_equinox_state(node)


def _is_equinox_state(node):
    """Whether a node is a state of Equinox, found by its name, so that Equinox is not imported."""
    kind = type(node)
    return kind.__name__ == "State" and kind.__module__.startswith("equinox.")


def _refuse_states(nodes):
    """Raises for leaves of a plain pytree that are running averages or states, by type or name.

    Args:
      nodes: ``(path, node)`` of every leaf, and of subtrees that declare their kind.
    """
    beside = collections.defaultdict(set)
    for path, _ in nodes:
        beside[path[:-1]].add(_name(path[-1]) if path else "")
    for path, node in nodes:
        if is_module(node):
            continue
        names = [_name(key) for key in path]
        known = _AVERAGES.intersection(part for name in names for part in name.split("/"))
        kind = None
        if _is_equinox_state(node):
            kind = "a state of Equinox"
        elif isinstance(node, nnx.Variable) and not isinstance(node, nnx.Param):
            kind = f"an nnx.{type(node).__name__}"
        elif known:
            kind = f"a running average, by the name {min(known)!r}"
        elif beside[path[:-1]] >= _MOMENTS and names[-1] in _MOMENTS:
            kind = "a running average, by the names 'mean' and 'var' side by side"
        if kind:
            raise ValueError(f"{_place(path)} is {kind}, and no parameter. {_ADVICE}")


def _refuse_others(path, leaf):
    """Raises for a leaf that gradients cannot train: anything but an array of floats."""
    if isinstance(leaf, bool | int | float | complex):
        kind = f"the Python number {leaf!r}"
    elif jnp.issubdtype(leaf.dtype, jnp.floating):
        return
    elif jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        kind = "a random key"
    else:
        kind = f"{leaf.dtype}{list(leaf.shape)}"
    raise ValueError(
        f"{_place(path)} is {kind}, but the parameters that training changes are arrays of floats. "
        f"{_ADVICE}"
    )


def _refuse_modules_inside(model):
    """Raises for Flax modules with averages or random state inside a function of another kind.

    Such a function calls their inference form, so that training passes could not update the state.
    """
    for path, node in jax.tree_util.tree_flatten_with_path(model, is_leaf=is_module)[0]:
        if len(jax.tree.leaves(_own(node))) < len(jax.tree.leaves(node)):
            raise ValueError(
                f"{_place(path)} is {node.func!r} with averages or random state, and the function "
                "around it calls its inference form; make both one Flax NNX module, and the model "
                "of it by wdjax.models.functional."
            )


def _chances(module):
    """``{path: layer}`` of the layers in training form that draw random numbers (Dropout)."""
    return {
        path: node
        for path, node in nnx.iter_graph(module)
        if getattr(node, "deterministic", None) is False and getattr(node, "rate", 0) != 0
    }


def _refuse_chance_without_state(module):
    """Raises for a layer that would draw random numbers in training, but has no ``rngs``."""
    for path, layer in _chances(module).items():
        if getattr(layer, "rngs", None) is None:
            raise ValueError(
                f"{_dotted(path)} ({type(layer).__name__}) has no random state to train with: give "
                "it rngs=nnx.Rngs(seed) when it is made, or a rate of 0."
            )


def _refuse_what_stayed(module, before, after):
    """Raises for averages and random state that a training pass did not change.

    ``before`` and ``after`` are the module's nested dicts around the pass. An unchanged state means
    that an argument of a call decides the layer's mode, instead of ``module.train()``.
    """
    draws, before, after = _chances(module), _flat(before), _flat(after)
    for path, variable in nnx.to_flat_state(nnx.state(module)):
        drawn = isinstance(variable, nnx.RngCount) and any(path[: len(at)] == at for at in draws)
        path = tuple(map(str, path))
        moves = drawn or isinstance(variable, nnx.BatchStat)
        if moves and path in before and before[path] is after[path]:
            raise ValueError(
                f"{_dotted(path)} ({type(variable).__name__}) stays as it is in the module's "
                "training form: let module.train() and eval() alone decide the form of its layer, "
                "and no argument of a call; a constant is to be an nnx.Variable."
            )


def _like(before, after):
    """The leaves of ``after`` that ``before`` has, in the dtypes of ``before``.

    A pass may add to the state; what it adds is dropped.
    """
    if isinstance(before, dict):
        return {name: _like(child, after[name]) for name, child in before.items()}
    return jax.tree.map(lambda old, new: new if new.dtype == old.dtype else new.astype(old.dtype),
                        before, after)  # fmt: skip


def _flat(params):
    """The leaves of a nested dict by their paths, tuples of strings."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {tuple(_name(key) for key in path): leaf for path, leaf in leaves}


def _name(key):
    """One step of a path, as a string."""
    return str(next(v for k in ("key", "name", "idx") if (v := getattr(key, k, None)) is not None))


def _place(path):
    """The path of a leaf as words of an error message: "the model's leaf ..." with its keys.

    JAX numbers the parts of a ``Partial``; its arguments are called ``args`` here.
    """
    words = jax.tree_util.keystr(path)
    return "the model's leaf " + words.replace("[<flat index 0>]", "args", 1)


def _dotted(path):
    """A module's path with dots, or "the module" for the empty path."""
    return ".".join(map(str, path)) or "the module"
