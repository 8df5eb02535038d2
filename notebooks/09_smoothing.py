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
# # Smoothed classifiers
#
# Bounds sent through a net end at small nets. Smoothing certifies *any* model: the smoothed
# classifier returns the class that most noisy copies of a sample get, and if that class has the
# probability `p > 1/2`, it stays the winner within a radius that grows with `p`. Votes bound `p` at
# a stated level of confidence. This notebook certifies by votes, attacks what it certified, and
# draws both sides.

# %%
import os

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from wdjax import Lp, attacks, data, ensembles, models, smoothing, training
from wdjax.smoothing import noise

FAST = bool(os.environ.get("WDJAX_FAST"))  # For tests: fewer samples and epochs.
print(jax.devices()[0], "with JAX", jax.__version__)

train, test = data.digits()
x, y = test.take(20 if FAST else 100)
net = models.mlp((64, 32, 10) if FAST else (64, 64, 64, 10), key=jax.random.key(0))

# %% [markdown]
# ## Train under noise, certify by votes
#
# A net must be right on noisy samples before their majority can be: `training.train(noise=...)`
# sees every sample under fresh noise in every step. Then Cohen et al.'s protocol: some votes choose
# a class, up to `n` others bound its probability. More noise, larger radii, fewer samples that have
# one.

# %%
sigmas = (0.25,) if FAST else (0.12, 0.25, 0.5)
smooth, key = {}, jax.random.key(1)
for sigma in sigmas:
    own = noise.Gaussian(sigma)
    model = training.train(net, *train, key=key, noise=own, epochs=10 if FAST else 60).model
    found = smoothing.certify(model, x, y, noise=own, key=key, n=1000 if FAST else 10_000)
    smooth[sigma] = own, model, found
    print(
        f"sigma {sigma}: accuracy {found.correct.mean():.2f}, abstained "
        f"{found.abstained.mean():.2f}, average certified radius {found.average_radius:.3f}"
    )

# %% [markdown]
# ## As few votes as it takes
#
# Is the sample robust at *this* radius? A sequential test looks again and again, at a level that
# allows for it, and stops as soon as the answer is clear. The number of votes is an average; the
# samples whose probability is close to the threshold take most of them.

# %%
sigma = sigmas[-1]
own, model, fixed = smooth[sigma]
quick = smoothing.certify(model, x, y, noise=own, key=key, eps=0.1, n=1000 if FAST else 100_000)
held = np.mean(quick.radius >= 0.1)
print(f"{held:.2f} certified at 0.1 with {quick.votes.mean():.0f} votes a sample")

# %% [markdown]
# ## The other side
#
# Who attacks the base model attacks another classifier. `ensembles.smoothed` goes through the mean
# over noises that stay the same, and counts a point only if *fresh* votes say that another class is
# the most probable. So certificate and attack speak of one and the same classifier, and must not
# cross.

# %%
sides = {}
for sigma, (own, model, found) in smooth.items():
    moved = ensembles.smoothed(
        attacks.DDN(Lp(2), steps=20 if FAST else 50),
        model,
        x,
        y,
        noise=own,
        key=jax.random.key(2),
        votes=300 if FAST else 2000,
    )
    distance = np.where(moved.success, moved.cost, np.inf)
    assert np.all(distance >= found.radius)
    sides[sigma] = found.radius, distance
    print(
        f"sigma {sigma}: median radius {np.median(found.radius):.3f}, median flip "
        f"{np.median(distance):.3f}: certificate and attack do not cross"
    )

# %% [markdown]
# The figure: accuracy within an l2 distance, certified (solid) and attacked (dashed).

# %%
figure, axis = plt.subplots(figsize=(6, 3.6), layout="constrained")
budgets = np.linspace(0, 2, 201)
for (sigma, (radius, distance)), colour in zip(sides.items(), ("C0", "C1", "C2")):
    below = np.mean(radius[:, None] > budgets, axis=0)
    above = np.mean(distance[:, None] > budgets, axis=0)
    axis.plot(budgets, below, color=colour, label=f"sigma = {sigma}")
    axis.plot(budgets, above, color=colour, linestyle="--")
axis.set(xlabel="eps (l2)", ylabel="accuracy, from both sides", ylim=(0, 1))
axis.legend()
plt.show()

# %% [markdown]
# ## All samples at once
#
# Each radius is right at level `1 - alpha`, so of many some may be wrong. `accuracy` allows for as
# many as chance allows, and shares out a budget over the data set as the knapsack of `Omega_p`.

# %%
for order in (1, 2, jnp.inf):
    print(f"Omega_{order:g} at 0.1: accuracy at least {float(fixed.accuracy(0.1, order)):.2f}")

# %% [markdown]
# ## Images: noise on the flow of mass
#
# A shift of a digit by a pixel is far in l2 and near in the Wasserstein distance between images.
# Laplace noise on the flow of mass between neighbouring pixels certifies in that distance, for
# changes that keep the mass.

# %%
flow = noise.Flow(0.02)
moved = training.train(net, *train, key=key, noise=flow, epochs=10 if FAST else 60).model
found = smoothing.certify(moved, x, y, noise=flow, key=key, n=500 if FAST else 10_000)
print(
    f"accuracy {found.correct.mean():.2f}, median radius {np.median(found.radius):.4f} widths of a "
    "pixel, the whole mass moved"
)
