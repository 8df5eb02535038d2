"""Vision Transformer in timm's layout, with its patch embedding or a convolutional stem."""

import jax
import jax.numpy as jnp
from flax import nnx

from wdjax.models.convnext import ConvStem, Mlp
from wdjax.models.layers import (
    Conv,
    Group,
    LayerNorm,
    Linear,
    Net,
    check_side,
    classes_of,
    extent,
    identity,
    numbered,
    parameter,
)


class _Attention(nnx.Module):
    """Self-attention over all tokens."""

    def __init__(self, width, heads, *, rngs):
        self.heads = heads
        self.qkv = Linear(width, 3 * width, rngs=rngs)
        self.proj = Linear(width, width, rngs=rngs)

    def __call__(self, x):
        n, tokens, width = x.shape
        size = width // self.heads
        q, k, v = jnp.moveaxis(self.qkv(x).reshape(n, tokens, 3, self.heads, size), 2, 0)
        scores = jnp.einsum("nqhd,nkhd->nhqk", q * size**-0.5, k)
        out = jnp.einsum("nhqk,nkhd->nqhd", jax.nn.softmax(scores, axis=-1), v)
        return self.proj(out.reshape(n, tokens, width))


class _Block(nnx.Module):
    """Attention, then an MLP, each after LayerNorm and with a shortcut."""

    def __init__(self, width, heads, epsilon, *, rngs):
        self.norm1 = LayerNorm(width, epsilon, rngs=rngs)
        self.attn = _Attention(width, heads, rngs=rngs)
        self.norm2 = LayerNorm(width, epsilon, rngs=rngs)
        self.mlp = Mlp(width, 4 * width, rngs=rngs)

    def __call__(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(Net):
    """Vision Transformer with a class token.

    Args:
      width: features of a token.
      depth: number of blocks.
      heads: attention heads; a state dict does not determine their number.
      classes: number of logits.
      planes: channels of the first convolution of the stem (doubled three times, then projected),
        or None for the plain patch embedding.
      side: of the images.
      patch: side of a patch; 16 with a convolutional stem.
      epsilon: of LayerNorm.
      normalize: a function applied to the images first.
      rngs: random keys for the parameters; None for an abstract module.
    """

    def __init__(
        self,
        width=768,
        depth=12,
        heads=12,
        classes=1000,
        planes=None,
        side=224,
        patch=16,
        epsilon=1e-6,
        normalize=identity,
        *,
        rngs=None,
    ):
        if width % heads:
            raise ValueError(
                f"width {width} is no multiple of {heads} heads; a state dict does not tell the "
                "number of heads, so pass heads=..."
            )
        if side % patch or (planes is not None and patch != 16):
            raise ValueError(f"patches of {patch} x {patch} do not tile images of {side} x {side}.")
        self.normalize, self.side = normalize, side
        self.cls_token = parameter(rngs, (1, 1, width))
        self.pos_embed = parameter(
            rngs, (1, (side // patch) ** 2 + 1, width), jax.nn.initializers.normal(0.02)
        )
        if planes is None:
            embed = Conv(3, width, patch, patch, bias=True, rngs=rngs)
        else:
            embed = ConvStem(
                (planes, 2 * planes, 4 * planes, 8 * planes), (2,) * 4, width, rngs=rngs
            )
        self.patch_embed = Group(proj=embed)
        self.blocks = Group.numbered(
            [_Block(width, heads, epsilon, rngs=rngs) for _ in range(depth)]
        )
        self.norm = LayerNorm(width, epsilon, rngs=rngs)
        self.head = Linear(width, classes, rngs=rngs)

    def features(self, x):
        check_side(x, self.side)
        x = self.patch_embed.proj(self.normalize(x))
        x = x.reshape(len(x), -1, x.shape[-1])
        cls = jnp.broadcast_to(self.cls_token[...], (len(x), 1, x.shape[-1]))
        x = jnp.concatenate([cls, x], axis=1) + self.pos_embed[...]
        return self.norm(self.blocks(x)[:, 0])

    def classify(self, features):
        return self.head(features)

    @staticmethod
    def sizes(shapes):
        """The size arguments except heads, read off the shapes of a state dict."""
        depth = numbered(shapes, "blocks.")
        stem = "patch_embed.proj.stem.0"
        return {
            "width": extent(shapes, [f"blocks.{i}.norm1.bias" for i in range(depth)]),
            "depth": depth,
            "classes": classes_of(shapes, "head"),
            "planes": classes_of(shapes, stem) or None,
        }
