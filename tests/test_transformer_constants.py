"""Lipschitz constants of Transformers: above every sampled Jacobian, and meaningful locally."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from wdjax import lipschitz
from wdjax.models import functional
from wdjax.models.vit import ViT

SETTINGS = lipschitz.TransformerSettings(heads=2)
PATCHES = 14 * 14


@pytest.fixture(scope="module")
def vit():
    module = ViT(width=8, depth=2, heads=2, classes=3, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    # Biases of queries and scales of LayerNorm count; at first they are trivial.
    module.blocks["0"].norm1.scale[...] = jnp.asarray(rng.uniform(0.5, 1.5, 8), jnp.float32)
    module.blocks["0"].norm1.bias[...] = jnp.asarray(rng.normal(size=8), jnp.float32)
    module.patch_embed.proj.kernel[...] = module.patch_embed.proj.kernel[...] * 3
    return module


def tokens_of(module, x):
    patches = module.patch_embed.proj(x[None]).reshape(1, PATCHES, -1)
    cls = jnp.broadcast_to(module.cls_token[...], (1, 1, patches.shape[-1]))
    return np.asarray(jnp.concatenate([cls, patches], axis=1) + module.pos_embed[...])[0]


def test_no_sampled_jacobian_is_steeper(vit):
    model = functional(vit)
    params = model.args[0]
    whole = lipschitz.transformer_constant(params, SETTINGS, patches=PATCHES)
    pull = jax.jit(lambda t: jax.jacrev(lambda s: model(s[None])[0])(t))
    rng = np.random.default_rng(1)
    x = rng.uniform(size=(224, 224, 3)).astype(np.float32)
    found = {}
    for eps in (0.0, 1e-8):
        local = found[eps] = lipschitz.local_transformer_constant(
            params, SETTINGS, tokens_of(vit, x), patches=PATCHES, eps=eps
        )
        assert np.all(local <= whole)
        for _ in range(3):
            move = rng.normal(size=x.shape)
            point = x + eps * move / np.linalg.norm(move)
            rows = np.asarray(pull(point.astype(np.float32)), float).reshape(3, -1)
            steep = np.linalg.norm(rows[:, None] - rows[None], axis=-1)
            assert np.all(steep <= local * (1 + 1e-4))
    # Still vacuous, but by far less: tokens keep some variance near an image.
    assert whole.max() > 1e6 * found[0.0].max()
    inf = lipschitz.transformer_constant(params, SETTINGS, patches=PATCHES, norm=np.inf)
    np.testing.assert_allclose(inf, whole * np.sqrt(x.size))


@pytest.mark.parametrize("approximate", [False, True])
def test_no_form_of_gelu_is_steeper_than_the_default_slope(approximate):
    at = jnp.linspace(1.3, 1.5, 4001)
    steep = jax.vmap(jax.grad(lambda t: jax.nn.gelu(t, approximate=approximate)))(at)
    assert 1.1289 < float(steep.max()) <= SETTINGS.slope + 1e-6


@pytest.mark.parametrize("tokens", [2, 6])
def test_attention_stays_below_its_constant(tokens):
    rng = np.random.default_rng(2)
    width, heads = 6, 2
    block = {
        "norm1": {"scale": rng.uniform(0.5, 1.5, width), "bias": rng.normal(size=width)},
        "attn": {
            "qkv": {
                "kernel": rng.normal(size=(width, 3 * width)) / 2,
                "bias": rng.normal(size=3 * width),
            },
            "proj": {"kernel": rng.normal(size=(width, width)), "bias": np.zeros(width)},
        },
    }
    from wdjax.lipschitz import transformer

    settings = lipschitz.TransformerSettings(heads=heads)
    bound = transformer._attention(block, settings, tokens)

    def attend(u):
        x = u.reshape(tokens, width) * block["norm1"]["scale"] + block["norm1"]["bias"]
        weights = block["attn"]["qkv"]
        parts = (x @ weights["kernel"] + weights["bias"]).reshape(tokens, 3, heads, -1)
        query, key, value = jnp.moveaxis(parts, 1, 0)
        scores = jnp.einsum("qhk,jhk->hqj", query, key) / jnp.sqrt(query.shape[-1])
        out = jnp.einsum("hqj,jhk->qhk", jax.nn.softmax(scores), value)
        return out.reshape(tokens, -1) @ block["attn"]["proj"]["kernel"]

    pull = jax.jit(jax.jacfwd(attend))
    most = 0.0
    for _ in range(50):
        u = rng.normal(size=(tokens, width))
        u *= np.sqrt(width) / np.linalg.norm(u, axis=1, keepdims=True)
        jacobian = np.asarray(pull(u.reshape(-1))).reshape(-1, tokens * width)
        most = max(most, np.linalg.norm(jacobian, 2))
        mine = transformer._attend(
            block, settings, u * block["norm1"]["scale"] + block["norm1"]["bias"]
        )
        np.testing.assert_allclose(mine, attend(u.reshape(-1)), atol=1e-4)
    assert 0.02 * bound <= most <= bound


def test_bad_input_is_refused(vit):
    params = functional(vit).args[0]
    with pytest.raises(ValueError, match="eps"):
        lipschitz.local_transformer_constant(
            params, SETTINGS, np.zeros((PATCHES + 1, 8)), patches=PATCHES, eps=-1.0
        )
    with pytest.raises(ValueError, match="tokens"):
        lipschitz.local_transformer_constant(
            params, SETTINGS, np.zeros((5, 8)), patches=PATCHES, eps=0.0
        )
    with pytest.raises(ValueError, match="norm"):
        lipschitz.transformer_constant(params, SETTINGS, patches=PATCHES, norm=3)
