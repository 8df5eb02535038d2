r"""Lipschitz constants of Pre-LN Transformers from their weights, global and around a sample.

A block applies ``x + f(LN(x))`` twice, with the constant ``1 + L_LN L_f`` each time. All constants
are Euclidean, over all tokens together. LayerNorm's scale and bias are folded into the next layer:
then ``u = (x - mean) / sqrt(var + epsilon)`` has length at most ``R = sqrt d`` and the constant
``1 / sqrt(var + epsilon)``. The constant of an attention head on n such tokens is at most

    ||V|| ( sqrt n + ||A|| R^2 + sqrt n R (||A|| R + |w|) ),

with ``A = W_Q W_K^T / sqrt k`` and ``w`` the product of the key's matrix and the query's bias. The
terms bound the derivative of ``sum_j P_ij V u_j`` in the values, the query and the keys. It holds
for masked attention too.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from wdjax import norms
from wdjax.checks import arguments

Numbers = npt.NDArray[np.float64]

_GELU = 1.128994
_ROUNDING = 1 + 1e-9


class Settings(NamedTuple):
    """The settings of a Transformer that its weights do not show."""

    heads: int
    epsilon: float = 1e-6
    """LayerNorm's."""
    slope: float = _GELU
    """The largest magnitude of the activation's derivative; 1.128994 covers both forms of GELU."""
    scale: float = 1.0
    """The largest factor by which images are normalised, such as 1 / 0.225."""


def transformer_constant(
    params: Mapping[str, Any], settings: Settings, *, patches: int, norm: float = 2
) -> Numbers:
    r"""Constants of all margins of a Pre-LN Vision Transformer with a class token.

    ``Lambda = L_head L_LN L_emb prod (1 + L_LN L_MHA) (1 + L_LN L_FFN)``, for all of space.

    Args:
      params: nested weights in the layout of :class:`wdjax.models.vit.ViT`.
      settings: :class:`Settings`.
      patches: number of tokens besides the class token.
      norm: r of the input. For r = inf the result is the Euclidean constant times ``sqrt d`` for
        images of d numbers, for r = 1 the Euclidean constant.

    Returns:
      ``[K, K]`` constants of ``z_j - z_i``, 0 on the diagonal; finite but mostly vacuous, since
      every LayerNorm may divide by ``sqrt epsilon``.

    Raises:
      ValueError: another norm.

    Cost: spectral norms of the weights, on the host.

    Differs: the paper's product lacks the last LayerNorm. Its attention constant ignores the bias
      of queries; this one counts it and is smaller.

    Source: Le et al. [le2025], Corollary 3.4; own bound of attention.
    """
    norms.check_norm(norm)
    tree, tokens = _wide(params), patches + 1
    steep = 1 / math.sqrt(settings.epsilon)
    total, inputs = _embedding(tree, settings, patches)
    for block in _blocks(tree):
        total *= 1 + steep * _attention(block, settings, tokens)
        total *= 1 + steep * _feed_forward(block, settings)
    return _margins(tree, total * steep, inputs, norm)


def local_transformer_constant(
    params: Mapping[str, Any],
    settings: Settings,
    tokens: npt.ArrayLike,
    *,
    patches: int,
    eps: float,
) -> Numbers:
    r"""Constants as of :func:`transformer_constant` on the l2 ball of ``eps`` around one image.

    A token with standard deviation s at the image has a variance of at least
    ``(s - rho / sqrt d)^2`` after moving by at most ``rho``, which bounds LayerNorm's constant.

    Args:
      params: as in :func:`transformer_constant`.
      settings: :class:`Settings`.
      tokens: ``[patches + 1, d]``, the first block's input at the image.
      patches: number of tokens besides the class token.
      eps: radius, l2, in units of the image.

    Returns:
      ``[K, K]`` constants of ``z_j - z_i`` for l2, 0 on the diagonal.

    Raises:
      ValueError: a negative radius, or tokens of another shape.

    Cost: a forward pass and spectral norms of the weights, on the host.

    Source: Le et al. [le2025], Corollary 3.4, near one image; this library's own.
    """
    arguments.check(eps=eps)
    tree, x = _wide(params), np.asarray(tokens, float)
    if not (eps >= 0 and math.isfinite(eps)):
        raise ValueError(f"eps must be finite and at least 0, got {eps!r}.")
    if x.ndim != 2 or len(x) != patches + 1 or x.shape[1] != len(tree["norm"]["scale"]):
        raise ValueError(f"tokens must be [{patches + 1}, d] as in the weights, got {x.shape}.")
    total, inputs = _embedding(tree, settings, patches)
    for block in _blocks(tree):
        steep = _steepness(x, eps * total, settings)
        total *= 1 + steep * _attention(block, settings, len(x))
        x = x + _attend(block, settings, _normalised(x, block["norm1"], settings))
        steep = _steepness(x, eps * total, settings)
        total *= 1 + steep * _feed_forward(block, settings)
        x = x + _fed(block, _normalised(x, block["norm2"], settings))
    steep = _steepness(x[:1], eps * total, settings)
    return _margins(tree, total * steep, inputs, 2)


def _wide(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The weights, a nested dictionary, in float64."""
    return {
        name: _wide(value) if isinstance(value, Mapping) else np.asarray(value, float)
        for name, value in tree.items()
    }


def _blocks(tree: dict[str, Any]) -> list[dict[str, Any]]:
    """The Transformer's blocks in order."""
    return [tree["blocks"][str(i)] for i in range(len(tree["blocks"]))]


def _spectral(matrix: Numbers) -> float:
    """The spectral norm of a matrix, rounded up."""
    return float(np.linalg.norm(matrix, 2)) * _ROUNDING


def _embedding(tree: dict[str, Any], settings: Settings, patches: int) -> tuple[float, int]:
    """The constant of the embedding of disjoint patches, and the number of an image's entries."""
    kernel = tree["patch_embed"]["proj"]["kernel"]
    matrix = kernel.reshape(-1, kernel.shape[-1])
    return settings.scale * _spectral(matrix), patches * len(matrix)


def _attention(block: dict[str, Any], settings: Settings, tokens: int) -> float:
    """The constant of one block's attention, ``u -> MHA(scale u + bias)``, on normalised tokens.

    ``tokens`` is their number n in the module's formula, which is summed over the heads. ``scale``
    and ``bias`` are those of the LayerNorm before.
    """
    scale, bias = block["norm1"]["scale"], block["norm1"]["bias"]
    width, heads = len(scale), settings.heads
    kernel = block["attn"]["qkv"]["kernel"].reshape(width, 3, heads, -1)
    biases = block["attn"]["qkv"]["bias"].reshape(3, heads, -1)
    out = block["attn"]["proj"]["kernel"].reshape(heads, -1, width)
    reach, root, total = math.sqrt(width), math.sqrt(tokens), 0.0
    for head in range(heads):
        query, key, value = (kernel[:, part, head] for part in range(3))
        size = math.sqrt(query.shape[1])
        scores = _spectral((scale[:, None] * query) @ (scale[:, None] * key).T / size)
        shift = (scale[:, None] * key) @ (bias @ query + biases[0, head]) / size
        keys = root * reach * (scores * reach + float(np.linalg.norm(shift)) * _ROUNDING)
        values = _spectral((scale[:, None] * value) @ out[head])
        total += values * (root + scores * reach**2 + keys)
    return total


def _feed_forward(block: dict[str, Any], settings: Settings) -> float:
    """The constant of one block's feed-forward net, ``u -> FFN(scale u + bias)``."""
    first, second = block["mlp"]["fc1"]["kernel"], block["mlp"]["fc2"]["kernel"]
    scale = block["norm2"]["scale"]
    return settings.slope * _spectral(scale[:, None] * first) * _spectral(second)


def _margins(tree: dict[str, Any], total: float, inputs: int, norm: float) -> Numbers:
    """``[K, K]``: constants of all margins, if ``total`` is that of the normalised class token.

    ``inputs`` is the number of an image's entries, whose root is a factor for norm inf.
    """
    head = tree["norm"]["scale"][:, None] * tree["head"]["kernel"]
    apart = np.linalg.norm(head[:, :, None] - head[:, None], axis=0) * _ROUNDING
    factor = math.sqrt(inputs) if norm == math.inf else 1.0
    return np.asarray(apart * total * factor)


def _steepness(x: Numbers, rho: float, settings: Settings) -> float:
    """The constant of LayerNorm on tokens ``x`` ``[n, d]`` that moved by at most ``rho`` in l2."""
    deviation = np.std(x, axis=1).min() * (2 - _ROUNDING) - rho / math.sqrt(x.shape[1])
    return 1 / math.sqrt(max(deviation, 0.0) ** 2 + settings.epsilon)


def _normalised(x: Numbers, weights: dict[str, Any], settings: Settings) -> Numbers:
    """``[n, d]``: LayerNorm of the tokens ``x`` ``[n, d]``."""
    centered = x - x.mean(axis=1, keepdims=True)
    variance = np.mean(centered**2, axis=1, keepdims=True)
    unit = centered / np.sqrt(variance + settings.epsilon)
    return np.asarray(unit * weights["scale"] + weights["bias"])


def _attend(block: dict[str, Any], settings: Settings, x: Numbers) -> Numbers:
    """``[n, d]``: the output of a block's attention for normalised tokens ``x`` ``[n, d]``."""
    weights = block["attn"]
    parts = (x @ weights["qkv"]["kernel"] + weights["qkv"]["bias"]).reshape(
        len(x), 3, settings.heads, -1
    )
    query, key, value = np.moveaxis(parts, 1, 0)
    scores = np.einsum("qhk,jhk->hqj", query, key) / math.sqrt(query.shape[-1])
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    scores /= scores.sum(axis=-1, keepdims=True)
    out = np.einsum("hqj,jhk->qhk", scores, value).reshape(len(x), -1)
    return np.asarray(out @ weights["proj"]["kernel"] + weights["proj"]["bias"])


def _fed(block: dict[str, Any], x: Numbers) -> Numbers:
    """``[n, d]``: the output of a block's feed-forward net, with the exact GELU."""
    from scipy.special import erf

    hidden = x @ block["mlp"]["fc1"]["kernel"] + block["mlp"]["fc1"]["bias"]
    hidden = 0.5 * hidden * (1 + erf(hidden / math.sqrt(2)))
    return np.asarray(hidden @ block["mlp"]["fc2"]["kernel"] + block["mlp"]["fc2"]["bias"])
