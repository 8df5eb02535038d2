# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Certificates
#
# An attack that fails proves nothing. A certificate bounds what *every* attack can do: here linear
# bounds sent backwards through a net (CROWN), branch and bound over its neurons, and nets that are
# trained to be certified. What lies between a certificate and an attack is not known: the net may
# be more robust than is proved, or less than was found.

# %%
import os

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import wdjax
from wdjax import attacks, certify, data, models, training

FAST = bool(os.environ.get("WDJAX_FAST"))  # For tests: fewer samples and epochs.
print(jax.devices()[0], "with JAX", jax.__version__)

train, test = data.digits()
x, y = test.take(30 if FAST else 100)
sizes = (64, 32, 10) if FAST else (64, 200, 200, 10)
net = models.mlp(sizes, key=jax.random.key(0))

# %% [markdown]
# ## Two nets
#
# One is trained against PGD, the other through bounds: the loss of the worst logits that intervals
# allow within `eps`, which grows as training goes on.

# %%
key, eps, scale = jax.random.key(1), 0.1, 4 if FAST else 1
pgd = attacks.PGD(steps=5, iterate="last")
proof = certify.CertifiedTraining()
against = training.train(net, *train, key=key, attack=pgd, eps=eps, epochs=40 // scale)
towards = training.train(
    net, *train, key=key, certificate=proof, eps=1.2 * eps, epochs=160 // scale
)
nets = {"adversarial training": against.model, "certified training": towards.model}

# %% [markdown]
# ## From both sides
#
# `certify.radius` proves a radius of every sample, the attack finds a flip at some distance. The
# true distance lies between. Over `Omega_p`, where an adversary spends `eps` on average, both sides
# are the same knapsack: the cheapest samples go first.

# %%
budgets = np.linspace(0, 0.2, 5 if FAST else 21)
orders = (1, 2, jnp.inf)
curves = {}
for name, model in nets.items():
    radius = np.asarray(certify.radius(model, x, y, norm=jnp.inf, method="crown"))
    found = wdjax.search(attacks.WDAPlusPlus(), model, x, y)
    flipped = np.asarray(found.success)
    assert np.all(np.asarray(found.cost)[flipped] >= radius[flipped])
    for order in orders:
        below = certify.certified_accuracy(radius, budgets, order)
        above = [float(wdjax.spend(found, eps=e, order=order).accuracy) for e in budgets]
        curves[name, order] = below, np.array(above)
        assert np.all(below <= np.array(above) + 1e-6)
    held = int(np.sum(radius >= eps))
    print(f"{name}: {held} of {len(y)} proved robust at {eps}; no proof crosses an attack")

# %% [markdown]
# The figure: certified accuracy (solid) and accuracy under WDA++ (dashed). The gap of the
# adversarially trained net is wide; the certified one gives up little and is known almost exactly.

# %%
figure, axes = plt.subplots(1, 3, figsize=(10, 3.4), sharey=True, layout="constrained")
for axis, order in zip(axes, orders):
    for name, colour in zip(nets, ("tab:blue", "tab:orange")):
        below, above = curves[name, order]
        axis.plot(budgets, below, color=colour, label=name)
        axis.plot(budgets, above, color=colour, linestyle="--")
    axis.set(title=f"Omega_{order:g}", xlabel="eps (linf)", ylim=(0, 1))
axes[0].set_ylabel("accuracy, from both sides")
axes[0].legend()
plt.show()

# %% [markdown]
# ## Closing the gap
#
# Where bounds leave a sample open and no attack flips it, branch and bound splits the neurons whose
# sign is open until every part is verified, or time is over. Each method is tighter than the last.

# %%
model, few = nets["adversarial training"], slice(0, 30 if FAST else 40)
counts = {}
for method in ("interval", "crown") if FAST else ("interval", "crown", "auto", "bab"):
    how = {"norm": jnp.inf, "eps": eps, "steps": 0, "seconds": 2}
    found = certify.verify(model, x[few], y[few], method=method, **how)
    counts[method] = int(found.verified.sum())
attacked = wdjax.run(attacks.PGD(steps=40), model, x[few], y[few], eps=eps)
left = int(np.sum(np.asarray(attacked.correct & ~attacked.success)))
print(f"verified at {eps}: {counts}; not flipped by PGD: {left}")

# %% [markdown]
# ## The expected loss
#
# `wdro_bound` is the paper's `E_N + L eps`. `growth_bound` knows how far each sample's loss can
# rise within a distance, and is never above it.

# %%
how = {"norm": jnp.inf, "eps": 0.02, "order": 1}
for name, model in nets.items():
    straight = float(certify.wdro_bound(model, x, y, **how))
    grown = float(certify.growth_bound(model, x, y, **how))
    assert grown <= straight
    print(f"{name}: expected loss at most {grown:.2f}; E_N + L eps = {straight:.2f}")

# %% [markdown]
# ## Training through the default certificate
#
# `radius` and `margin_bounds` can be differentiated: the gradient is that of the proved number
# itself, in the model, the samples and the radius. Here a few steps raise the proved radii of a few
# training samples. `certify.trainable_bounds` is the cheaper way for whole trainings.

# %%
chosen = tuple(part[:16] for part in train)


@jax.jit
@jax.value_and_grad
def proved(model):
    return jnp.mean(certify.radius(model, *chosen, norm=jnp.inf, steps=5))


def step(model, slope, length=0.1):
    size = jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(slope)))
    return jax.tree.map(lambda leaf, own: leaf + length / size * own, model, slope)


model, radii = nets["adversarial training"], []
for _ in range(3 if FAST else 10):
    value, slope = proved(model)
    radii.append(float(value))
    model = step(model, slope)
assert radii[-1] > radii[0]
print(f"mean proved radius: {radii[0]:.4f}, after {len(radii) - 1} steps {radii[-1]:.4f}")
