"""What training changes of a model: parameters by gradient, averages and random state by a pass.

A Flax NNX module says what each of its variables is, so it is trained as Flax trains it. Another
pytree does not: all its leaves are parameters, and what cannot be one is refused by name.
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
"""What Linen, Haiku, PyTorch and Keras call running averages."""
_MOMENTS = {"mean", "var"}
"""What Flax calls them, both in one dict."""

_ADVICE = (
    "Keep it as it is by moving it into the function, wdjax.Model(lambda params, x: apply(params, "
    "kept, x), params); or build the model by wdjax.models.functional of a Flax NNX module, which "
    "is trained as Flax trains it; or train it with its framework."
)


def parameters(model):
    """What an optimiser is to see: the model with None for every leaf that is no parameter.

    Of a module from :func:`wdjax.models.functional` the parameters are its ``nnx.Param``; of any
    other pytree they are all leaves.

    Args:
      model: a pytree callable, or a pytree of several.

    Returns:
      A pytree like the model; :func:`join` fills it up.

    Raises:
      ValueError: a parameter that is not an array of floats, or a leaf of another pytree that is a
        running average or a state by its type or its name. The message names it.

    >>> from wdjax import models
    >>> own = parameters(models.norm_mlp((2, 3, 2), key=jax.random.key(0)))
    >>> own.args[0]["bn1"]["mean"] is None, own.args[0]["bn1"]["scale"].shape
    (True, (3,))
    """
    _refuse_states(jax.tree_util.tree_flatten_with_path(model, is_leaf=_of_a_kind)[0])
    own = _own(model)
    for path, leaf in jax.tree_util.tree_leaves_with_path(own):
        _refuse_others(path, leaf)
    return own


def join(own, model):
    """A model with the parameters ``own``, and with the other leaves of ``model``.

    >>> from wdjax import models
    >>> model = models.norm_mlp((2, 3, 2), key=jax.random.key(0))
    >>> joined = join(parameters(model), model)
    >>> jax.tree.structure(joined) == jax.tree.structure(model)
    True
    """
    return jax.tree.map(
        lambda new, old: old if new is None else new, own, model, is_leaf=lambda leaf: leaf is None
    )


def descend(rule, loss, model, known):
    """One step of an optimiser on the parameters; the rest goes on from where the loss left it.

    Args:
      rule: from optax, begun by ``rule.init(parameters(model))``.
      loss: ``model -> (value, model after its training passes, *seen)``.
      model: a pytree callable, or a pytree of several.
      known: the rule's state.

    Returns:
      ``(model, known, value, *seen)``.
    """
    own = parameters(model)

    def of(own):
        value, *rest = loss(join(own, model))
        return value, rest

    (value, (moved, *seen)), gradient = jax.value_and_grad(of, has_aux=True)(own)
    with promoted():  # As optax wants it.
        updates, known = rule.update(gradient, known, own)
        own = optax.apply_updates(own, updates)
    return join(own, moved), known, value, *seen


def training_pass(model, x, momentum=0.1):
    """One pass in the training form of the model's module.

    BatchNorm normalises by the batch, whose statistics its averages follow; dropout is on, and
    draws from its own random state. A model of another kind has no such form and is called.

    Args:
      model: a ``Model``.
      x: ``[n, *shape]``, the batch.
      momentum: the share of the batch in the averages of this package's BatchNorm; a foreign layer
        has its own.

    Returns:
      ``(out, model)``: the outputs, and the model with its averages and random state moved.

    Raises:
      ValueError: averages or a dropout that stay as they are in the training form, dropout without
        a random state, or a module with averages or random state inside another function, which
        calls it in its inference form. The message names them.

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
    if apply.method is None:  # A part of a module need not pass through all its layers.
        _refuse_what_stayed(module, before, after)
    return out, Model(apply, after)


def _own(model):
    """A pytree with None for what is no ``nnx.Param`` in the models from ``functional``."""

    def of(node):
        if not is_module(node):
            return node
        state = nnx.state(nnx.merge(node.func.graph, node.args[0]))
        kept = nnx.to_pure_dict(state, extract_fn=lambda variable: isinstance(variable, nnx.Param))
        own = jax.tree.map(lambda keep, leaf: leaf if keep else None, kept, node.args[0])
        return Model(node.func, own)

    return jax.tree.map(of, model, is_leaf=is_module)


def _of_a_kind(node):
    """Whether a subtree says itself what it is: a module's model, a variable, Equinox's state."""
    return is_module(node) or isinstance(node, nnx.Variable) or _is_equinox_state(node)


def _is_equinox_state(node):
    kind = type(node)
    return kind.__name__ == "State" and kind.__module__.startswith("equinox.")


def _refuse_states(nodes):
    """Refuses leaves of a plain pytree that are states by their type or their name.

    Args:
      nodes: ``(path, node)`` of every leaf, and of subtrees that say themselves what they are.
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
    """Refuses a parameter that no gradient can train."""
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
    """Refuses modules with averages or random state that another function calls as they are."""
    for path, node in jax.tree_util.tree_flatten_with_path(model, is_leaf=is_module)[0]:
        if len(jax.tree.leaves(_own(node))) < len(jax.tree.leaves(node)):
            raise ValueError(
                f"{_place(path)} is {node.func!r} with averages or random state, and the function "
                "around it calls its inference form; make both one Flax NNX module, and the model "
                "of it by wdjax.models.functional."
            )


def _chances(module):
    """``{path: layer}`` of the layers that draw in the training form, as Flax's Dropout does."""
    return {
        path: node
        for path, node in nnx.iter_graph(module)
        if getattr(node, "deterministic", None) is False and getattr(node, "rate", 0) != 0
    }


def _refuse_chance_without_state(module):
    for path, layer in _chances(module).items():
        if getattr(layer, "rngs", None) is None:
            raise ValueError(
                f"{_dotted(path)} ({type(layer).__name__}) has no random state to train with: give "
                "it rngs=nnx.Rngs(seed) when it is made, or a rate of 0."
            )


def _refuse_what_stayed(module, before, after):
    """Refuses averages and random state that a training pass has not moved.

    Their layer takes its form from an argument of the call, or is always called in one form.
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
    """Of the state after a pass what there was before, in its types: passes may add to a state."""
    if isinstance(before, dict):
        return {name: _like(child, after[name]) for name, child in before.items()}
    return jax.tree.map(lambda old, new: new if new.dtype == old.dtype else new.astype(old.dtype),
                        before, after)  # fmt: skip


def _flat(params):
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {tuple(_name(key) for key in path): leaf for path, leaf in leaves}


def _name(key):
    """The word or number of one step of a path."""
    return str(next(v for k in ("key", "name", "idx") if (v := getattr(key, k, None)) is not None))


def _place(path):
    """Where in the model a leaf is; JAX has numbers for the parts of a ``Partial``."""
    words = jax.tree_util.keystr(path)
    return "the model's leaf " + words.replace("[<flat index 0>]", "args", 1)


def _dotted(path):
    return ".".join(map(str, path)) or "the module"
