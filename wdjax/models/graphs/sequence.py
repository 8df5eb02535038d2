"""Operators on sequences: attention, and recurrent layers by a loop of known length."""

import functools

import jax
import jax.numpy as jnp

from wdjax import loops
from wdjax.models.graphs.laid import reshaped, straight, transposed
from wdjax.models.graphs.signature import IGNORED, Operator


def _heads(x, count):
    """``[n, L, h d]`` as ``[n, h, L, d]``; four axes are that already."""
    if x.ndim == 4:
        return x
    if x.ndim != 3 or not count or x.shape[2] % count:
        raise ValueError(f"it has {count} heads for an array {list(x.shape)}")
    n, length, width = x.shape
    return transposed(reshaped(x, (n, length, count, width // count)), (0, 2, 1, 3))


def _attention(call, q, k, v, mask=None, past_k=None, past_v=None, lengths=None):
    """Multi-head attention of ONNX, for queries, keys and values of rank 3 or 4.

    ``[n, length, heads * size]`` or ``[n, heads, length, size]``; the result has the rank of ``q``.
    Fewer heads of keys than of queries are repeated.
    """
    if past_k is not None or past_v is not None or lengths is not None or call.outputs > 1:
        raise ValueError("it keeps keys and values of an earlier call, which is not supported")
    flat = q.ndim == 3
    n = q.shape[0]
    q = _heads(q, call["q_num_heads"])
    k, v = _heads(k, call["kv_num_heads"]), _heads(v, call["kv_num_heads"])
    heads, size, length = q.shape[1], q.shape[3], q.shape[2]
    if heads % k.shape[1] or k.shape[1] != v.shape[1]:
        raise ValueError(f"it has {heads} heads of queries, {k.shape[1]} of keys")
    scale = call["scale"] or size**-0.5
    queries, keys, values = (jnp.asarray(part.plain()) for part in (q, k, v))
    if heads > k.shape[1]:
        keys, values = (jnp.repeat(part, heads // k.shape[1], axis=1) for part in (keys, values))
    scores = jnp.einsum("nhqd,nhkd->nhqk", queries * scale, keys)
    if call["softcap"]:
        scores = call["softcap"] * jnp.tanh(scores / call["softcap"])
    if mask is not None:
        wide = jnp.asarray(mask.raised(4).plain())
        scores = jnp.where(wide, scores, -jnp.inf) if wide.dtype == jnp.bool_ else scores + wide
    if call["is_causal"]:
        seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        scores = jnp.where(seen[None, None], scores, -jnp.inf)
    out = jnp.einsum("nhqk,nhkd->nhqd", jax.nn.softmax(scores, axis=-1), values)
    if not flat:
        return straight(out)
    return reshaped(transposed(straight(out), (0, 2, 1, 3)), (n, length, heads * v.shape[3]))


_DEFAULTS = {"LSTM": ("Sigmoid", "Tanh", "Tanh"), "GRU": ("Sigmoid", "Tanh"), "RNN": ("Tanh",)}
_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


def _recurrent(call, x, w, r, bias=None, lengths=None, first_h=None, first_c=None, peep=None):
    """``x`` is ``[T, n, I]`` (``[n, T, I]`` in layout 1); ``w``, ``r`` and ``bias`` have one row
    for each direction. Returns all states ``[T, directions, n, H]``, and the last of each kind."""
    kind, hidden = call.operator, r.shape[2]
    directions = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}
    chosen = directions.get(call["direction"])
    usual = _DEFAULTS[kind] * (len(chosen) if chosen else 1)
    names = call["activations"] or usual
    if kind == "RNN" and set(names) <= {"Tanh", "Relu"}:
        usual = names
    if chosen is None or tuple(names) != tuple(usual) or len(chosen) != w.shape[0]:
        raise ValueError("its direction or its activations are not supported")
    if lengths is not None or peep is not None or call["clip"] or call["input_forget"]:
        raise ValueError("it has lengths, peepholes or limits, which are not supported")
    steps = jnp.asarray(transposed(x, (1, 0, 2)).plain() if call["layout"] else x.plain())
    n = steps.shape[1]
    outs, lasts = [], []
    for k, backwards in enumerate(chosen):
        weights, again = jnp.asarray(w.plain())[k].T, jnp.asarray(r.plain())[k].T
        both = (
            jnp.zeros(2 * _GATES[kind] * hidden) if bias is None else jnp.asarray(bias.plain())[k]
        )
        state = [_state(part, k, n, hidden, call["layout"]) for part in (first_h, first_c)]
        step = functools.partial(_STEPS[kind], call, names[k], again, hidden)
        carry = tuple(state) if kind == "LSTM" else state[0]
        inner, outer = jnp.split(both, 2)
        inputs = steps @ weights + inner[None, None]
        last, out = loops.scan(functools.partial(step, outer), carry, inputs, reverse=backwards)
        outs.append(out)
        lasts.append(last if kind == "LSTM" else (last,))
    every = jnp.stack(outs, axis=1)
    ends = [jnp.stack(parts) for parts in zip(*lasts)]
    if call["layout"]:
        every, ends = every.transpose(2, 0, 1, 3), [end.transpose(1, 0, 2) for end in ends]
    return tuple(map(straight, (every, *ends)))


def _state(given, k, n, hidden, layout):
    if given is None:
        return jnp.zeros((n, hidden), jnp.float32)
    array = jnp.asarray(given.plain())
    array = array[:, k] if layout else array[k]
    if array.shape not in ((n, hidden), (1, hidden)):
        raise ValueError(f"its first state has the shape {list(given.shape)}")
    return jnp.broadcast_to(array, (n, hidden))


def _lstm(call, name, again, hidden, bias, carry, row):
    """Gates in ONNX's order: input, output, forget, cell."""
    h, c = carry
    i, o, f, g = jnp.split(row + h @ again + bias[None], 4, axis=-1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return (h, c), h


def _gru(call, name, again, hidden, bias, h, row):
    """Gates in ONNX's order: update, reset, hidden."""
    split = functools.partial(jnp.split, indices_or_sections=3, axis=-1)
    (xz, xr, xh), (rz, rr, rh) = split(row), split(again)
    bz, br, bh = jnp.split(bias, 3)
    z = jax.nn.sigmoid(xz + h @ rz + bz[None])
    r = jax.nn.sigmoid(xr + h @ rr + br[None])
    if call["linear_before_reset"]:
        g = jnp.tanh(xh + r * (h @ rh + bh[None]))
    else:
        g = jnp.tanh(xh + (r * h) @ rh + bh[None])
    h = (1 - z) * g + z * h
    return h, h


def _rnn(call, name, again, hidden, bias, h, row):
    h = row + h @ again + bias[None]
    h = jax.nn.relu(h) if name == "Relu" else jnp.tanh(h)
    return h, h


_STEPS = {"LSTM": _lstm, "GRU": _gru, "RNN": _rnn}

_RECURRENT = {
    "hidden_size": IGNORED, "direction": "forward", "activations": None, "clip": 0.0, "layout": 0,
    "input_forget": 0, "linear_before_reset": 0, "activation_alpha": IGNORED,
    "activation_beta": IGNORED,
}  # fmt: skip
_ATTENTION = {
    "is_causal": 0, "q_num_heads": 0, "kv_num_heads": 0, "scale": 0.0, "softcap": 0.0,
    "qk_matmul_output_mode": IGNORED, "softmax_precision": IGNORED,
}  # fmt: skip

OPERATORS: dict[str, Operator] = {
    "Attention": Operator(run=_attention, inputs=(3, 7), attributes=_ATTENTION, since=23),
    **{
        name: Operator(run=_recurrent, inputs=(3, 8), attributes=_RECURRENT)
        for name in ("LSTM", "GRU", "RNN")
    },
}
