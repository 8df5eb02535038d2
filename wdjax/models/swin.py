"""Swin Transformer: Microsoft's code (MIMIR) and timm's, which also carries MeanSparse."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from wdjax.models.layers import (
    Conv,
    Group,
    LayerNorm,
    Linear,
    MeanSparse,
    Net,
    beside,
    check_side,
    classes_of,
    common,
    extent,
    gelu,
    identity,
    numbered,
    parameter,
)


@functools.lru_cache(maxsize=64)
def relative_position_index(window):
    """``[w*w, w*w]``: the row of the bias table for each pair of positions in a window."""
    rows, cols = np.divmod(np.arange(window * window), window)
    down = rows[:, None] - rows + window - 1
    right = cols[:, None] - cols + window - 1
    return down * (2 * window - 1) + right


@functools.lru_cache(maxsize=64)
def attention_mask(grid, window, shift):
    """``[windows, w*w, w*w]``: -100 between tokens that are neighbours by the cyclic shift only."""
    edges = np.searchsorted([grid - window, grid - shift], np.arange(grid), side="right")
    region = 3 * edges[:, None] + edges
    tiles = region.reshape(grid // window, window, grid // window, window)
    tiles = tiles.transpose(0, 2, 1, 3).reshape(-1, window * window)
    return np.where(tiles[:, :, None] != tiles[:, None, :], -100.0, 0.0).astype(np.float32)


def _cut(x, window):
    """``[n, windows, window^2, features]``: tokens ``[n, height, width, features]`` by windows."""
    n, height, width, features = x.shape
    x = x.reshape(n, height // window, window, width // window, window, features)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(n, -1, window * window, features)


def _join(x, window, grid):
    """``[n, grid, grid, features]``: the inverse of :func:`_cut`."""
    n, _, _, features = x.shape
    x = x.reshape(n, grid // window, grid // window, window, window, features)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(n, grid, grid, features)


class _Attention(nnx.Module):
    """Attention within windows, with a learnt bias for each relative position."""

    def __init__(self, width, heads, window, *, rngs):
        self.heads, self.window = heads, window
        self.relative_position_bias_table = parameter(rngs, ((2 * window - 1) ** 2, heads))
        self.qkv = Linear(width, 3 * width, rngs=rngs)
        self.proj = Linear(width, width, rngs=rngs)

    def __call__(self, x, mask):
        n, windows, tokens, width = x.shape
        size = width // self.heads
        qkv = self.qkv(x).reshape(n, windows, tokens, 3, self.heads, size)
        q, k, v = jnp.moveaxis(qkv, 3, 0)
        index = relative_position_index(self.window).reshape(-1)
        bias = self.relative_position_bias_table[...][index].reshape(tokens, tokens, self.heads)
        scores = jnp.einsum("nwqhd,nwkhd->nwhqk", q * size**-0.5, k)
        scores = scores + beside(bias.transpose(2, 0, 1), scores)
        if mask is not None:
            scores = scores + mask[None, :, None]
        out = jnp.einsum("nwhqk,nwkhd->nwqhd", jax.nn.softmax(scores, axis=-1), v)
        return self.proj(out.reshape(n, windows, tokens, width))


class _Mlp(nnx.Module):
    """Two linear layers with GELU between them, with MeanSparse layers if ``sparse``."""

    def __init__(self, width, sparse, *, rngs):
        self.fc1 = Linear(width, 4 * width, rngs=rngs)
        self.fc2 = Linear(4 * width, width, rngs=rngs)
        if sparse:
            self.meansparse1 = MeanSparse(4 * width, rngs=rngs)
            self.meansparse2 = MeanSparse(width, rngs=rngs)

    def __call__(self, x):
        x = self.fc1(x)
        if hasattr(self, "meansparse1"):
            return self.meansparse2(self.fc2(gelu(self.meansparse1(x))))
        return self.fc2(gelu(x))


class _Block(nnx.Module):
    """Attention in shifted windows, then an MLP, each after LayerNorm and with a shortcut."""

    def __init__(self, width, heads, grid, window, shift, epsilon, sparse, *, rngs):
        self.grid, self.window, self.shift = grid, window, shift
        self.norm1 = LayerNorm(width, epsilon, rngs=rngs)
        self.attn = _Attention(width, heads, window, rngs=rngs)
        self.norm2 = LayerNorm(width, epsilon, rngs=rngs)
        self.mlp = _Mlp(width, sparse, rngs=rngs)
        if sparse:
            self.meansparse1 = MeanSparse(width, rngs=rngs)
            self.meansparse2 = MeanSparse(width, rngs=rngs)

    def __call__(self, x):
        sparse = hasattr(self, "meansparse1")
        grid, window, shift = self.grid, self.window, self.shift
        moved = self.norm1(x)
        if shift:
            moved = jnp.roll(moved, (-shift, -shift), (1, 2))
        mask = attention_mask(grid, window, shift) if shift else None
        moved = _join(self.attn(_cut(moved, window), mask), window, grid)
        if shift:
            moved = jnp.roll(moved, (shift, shift), (1, 2))
        x = x + moved
        x = self.meansparse1(x) if sparse else x
        x = x + self.mlp(self.norm2(x))
        return self.meansparse2(x) if sparse else x

    def buffers(self):
        """Constants that Microsoft's code stores with the parameters."""
        found = {"attn.relative_position_index": relative_position_index(self.window)}
        if self.shift:
            found["attn_mask"] = attention_mask(self.grid, self.window, self.shift)
        return found


class _Downsample(nnx.Module):
    """Joins squares of 2x2 tokens to one, of twice the features."""

    def __init__(self, width, epsilon, *, rngs):
        self.reduction = Linear(4 * width, 2 * width, bias=False, rngs=rngs)
        self.norm = LayerNorm(4 * width, epsilon, rngs=rngs)

    def __call__(self, x):
        corners = [x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)]
        return self.reduction(self.norm(jnp.concatenate(corners, axis=-1)))


class Swin(Net):
    """Swin Transformer on 224x224 images.

    Args:
      width: features of a token in the first stage; doubled in each further stage.
      depths: blocks a stage, four numbers.
      heads: attention heads a stage, four numbers.
      window: side of the attention windows, at most the stage's grid (56, 28, 14, 7).
      classes: number of logits.
      layout: "timm" (epsilon 1e-5, downsampling at the start of stages, ``head.fc``) or
        "microsoft" (epsilon 1e-6, downsampling at the end of stages, ``head``).
      normalize: a function applied to the images first.
      sparse: whether to add MeanSparse layers.
      rngs: random keys for the parameters; None for an abstract module.
    """

    def __init__(
        self,
        width=128,
        depths=(2, 2, 18, 2),
        heads=(4, 8, 16, 32),
        window=7,
        classes=1000,
        layout="timm",
        normalize=identity,
        sparse=False,
        *,
        rngs=None,
    ):
        if layout not in ("timm", "microsoft"):
            raise ValueError(f"layout must be 'timm' or 'microsoft', got {layout!r}.")
        if any(width * 2**i % head for i, head in enumerate(heads) if head) or not all(heads):
            raise ValueError(f"stage widths {width} * 2^i must be multiples of the heads {heads}.")
        if window > 28 or any(grid % min(window, grid) for grid in (56, 28, 14, 7)):
            raise ValueError(f"windows must tile grids of 56, 28, 14 and 7, got window {window}.")
        self.normalize = normalize
        epsilon = 1e-5 if layout == "timm" else 1e-6
        self.patch_embed = Group(
            proj=Conv(3, width, 4, 4, bias=True, rngs=rngs),
            norm=LayerNorm(width, epsilon, rngs=rngs),
        )
        stages, grid = [], 56
        for stage, (depth, head) in enumerate(zip(depths, heads)):
            size = min(window, grid)
            features = width * 2**stage
            blocks = [
                _Block(
                    features,
                    head,
                    grid,
                    size,
                    size // 2 if i % 2 and size < grid else 0,
                    epsilon,
                    sparse,
                    rngs=rngs,
                )
                for i in range(depth)
            ]
            layers = {"blocks": Group.numbered(blocks)}
            if layout == "timm" and stage:
                layers["downsample"] = _Downsample(features // 2, epsilon, rngs=rngs)
            if layout == "microsoft" and stage < len(depths) - 1:
                layers["downsample"] = _Downsample(features, epsilon, rngs=rngs)
            stages.append(Group(**layers))
            grid //= 2
        self.layers = Group.numbered(stages)
        self.norm = LayerNorm(features, epsilon, rngs=rngs)
        head = Linear(features, classes, rngs=rngs)
        self.head = Group(fc=head) if layout == "timm" else head
        self.layout = layout
        self.stores_buffers = layout == "microsoft"

    def features(self, x):
        check_side(x, 224)
        x = self.patch_embed.norm(self.patch_embed.proj(self.normalize(x)))
        for stage in self.layers:
            if self.layout == "timm" and hasattr(stage, "downsample"):
                x = stage.downsample(x)
            x = stage.blocks(x)
            if self.layout == "microsoft" and hasattr(stage, "downsample"):
                x = stage.downsample(x)
        return jnp.mean(self.norm(x), axis=(1, 2))

    def classify(self, features):
        last = self.head.fc if self.layout == "timm" else self.head
        return last(features)

    @staticmethod
    def sizes(shapes):
        """The size arguments, read off the shapes of a state dict."""
        depths = tuple(numbered(shapes, f"layers.{s}.blocks.") for s in range(4))
        tables = [
            [f"layers.{s}.blocks.{i}.attn.relative_position_bias_table" for i in range(depths[s])]
            for s in range(4)
        ]
        widths = [
            extent(shapes, [f"layers.{s}.blocks.{i}.norm1.bias"]) // 2**s
            for s in range(4)
            for i in range(depths[s])
        ]
        return {
            "width": common(widths),
            "depths": depths,
            "heads": tuple(extent(shapes, stage, axis=1) for stage in tables),
            "window": (math.isqrt(extent(shapes, tables[0])) + 1) // 2,
            "classes": classes_of(shapes, "head.fc") or classes_of(shapes, "head"),
        }
