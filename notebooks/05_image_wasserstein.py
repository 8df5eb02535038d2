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
# # Images that mass is moved in
#
# In the image-Wasserstein ball an adversary moves brightness between pixels: the mass stays what it
# was, pixels stay in [0, 1], and what counts is how much travels how far. A radius of k pixels is
# `eps = k / (height width)`. Whoever claims a cost hands over a transport plan that proves it.

# %%
import os

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import wdjax
from wdjax import data, ensembles, image, models, smoothing, training
from wdjax.core import Samples
from wdjax.image import plan_attack, sinkhorn
from wdjax.smoothing import noise

FAST = bool(os.environ.get("WDJAX_FAST"))  # For tests: fewer samples and epochs.
print(jax.devices()[0], "with JAX", jax.__version__)

train, test = data.digits()
x, y = test.take(20 if FAST else 100)
net = models.mlp((64, 32, 10), key=jax.random.key(0))
model = training.train(net, *train, key=jax.random.key(1), epochs=20).model
pixels = 64

# %% [markdown]
# ## How far must mass move?
#
# `NearestTransport` looks for the least radius of every image, `FrankWolfe` for a flip within a
# given one. Every iterate of either is a plan within budget and capacities, so that nothing is
# clipped. `image_wasserstein` and `minimum_radius` are unions of several.

# %%
ball = image.ImageWasserstein(window=5)
near = wdjax.search(image.NearestTransport(ball, steps=40 if FAST else 150), model, x, y)
radius = np.where(near.success, near.cost, np.inf)
print(f"median radius: k = {np.median(radius) * pixels:.2f} pixels")

# %% [markdown]
# What moved where: the digit, its nearest flip, and the flows of the plan that proves the distance.

# %%
shown = int(np.argsort(np.where(near.correct, radius, np.inf))[len(y) // 2])
plan = np.asarray(near.proof.mass[shown, :, :, 0])
figure, axes = plt.subplots(1, 3, figsize=(9, 3.2), layout="constrained")
axes[0].imshow(x[shown, ..., 0], cmap="gray", vmin=0, vmax=1)
axes[0].set_title(f"a {y[shown]}")
label = int(jnp.argmax(model(near.x_adv[shown : shown + 1])))
axes[1].imshow(near.x_adv[shown, ..., 0], cmap="gray", vmin=0, vmax=1)
axes[1].set_title(f"a {label}, k = {radius[shown] * pixels:.2f}")
axes[2].imshow(x[shown, ..., 0], cmap="gray", vmin=0, vmax=1, alpha=0.4)
for row, column, down, right in np.argwhere(plan > 0.02):
    step = np.array([right - 2, down - 2])
    if step.any():
        width = 8 * plan[row, column, down, right]
        axes[2].annotate(
            "", (column + step[0], row + step[1]), (column, row),
            arrowprops={"arrowstyle": "->", "lw": max(width, 0.4), "color": "tab:red"},
        )  # fmt: skip
axes[2].set_title("who sends how much where")
for axis in axes:
    axis.set(xticks=[], yticks=[])
plt.show()

# %% [markdown]
# ## A projection that leaves its ball
#
# Projected gradient ascent needs the nearest image in the ball. The Sinkhorn projection without the
# pixels' capacity gives pixels above 1; clipping them afterwards loses mass and leaves the ball.
# The constrained projection, repaired, does not. Both are judged by exact optimal transport.

# %%
eps = 5 / pixels
some = slice(0, 10 if FAST else 30)
samples = Samples(jnp.asarray(x[some]), jnp.asarray(y[some]), jnp.full(len(y[some]), eps), None)
task = plan_attack.task(ball, samples)
slope = jax.grad(lambda x: wdjax.losses.cross_entropy(model(x), samples.y).sum())(samples.x)
mass = jnp.sum(task.x, axis=(1, 2))[:, None, None]
w = task.x + 0.1 * mass * plan_attack.unit(task.space.stencil.flat(slope))
start = sinkhorn.no_duals(task)
ends = {}
for name, capped in (("clipped", False), ("constrained", True)):
    found = sinkhorn.project(task, w, 1e3, start, iterations=100, capped=capped)
    ends[name] = task.space.stencil.image(jnp.clip(found.z, 0, 1))
step = image.SinkhornPGD(ball, steps=5)
ends["constrained and repaired"] = wdjax.search(step, model, *samples[:2], eps=eps).x_adv
for name, z in ends.items():
    far = image.image_wasserstein_distance(samples.x, z) / eps
    lost = np.abs(np.asarray(z).sum(axis=(1, 2, 3)) / np.asarray(mass)[:, 0, 0] - 1)
    print(
        f"{name}: exact distance / eps up to {far.max():.2f}, mass wrong by up to {lost.max():.1e}"
    )
assert far.max() <= 1 + 1e-4
print("what is repaired stays in its ball")

# %% [markdown]
# ## Robust accuracy by radius

# %%
ks = np.linspace(0.5, 8, 4 if FAST else 16)
correct = np.asarray(near.correct)
kept = [float(np.mean(correct & (radius > k / pixels))) for k in ks]
figure, axis = plt.subplots(figsize=(5, 3.2), layout="constrained")
axis.plot(ks, kept, marker="o")
axis.set(xlabel="k, pixels", ylabel="accuracy under attack", ylim=(0, 1))
plt.show()

# %% [markdown]
# ## Certified against attacked
#
# Bounds say little about this ball, but noise on the flow of mass certifies the majority vote of
# noisy copies. The attack looks for flips of *that* classifier and confirms them by a test under
# fresh noise. Per image, no flip may lie within the certified radius.

# %%
own, some = noise.Flow(0.02), slice(0, 10 if FAST else 40)
how = {"noise": own, "key": jax.random.key(2)}
blurred = training.train(net, *train, key=jax.random.key(1), epochs=40, noise=own).model
votes = 1000 if FAST else 5000
certified = smoothing.certify(blurred, x[some], y[some], n=votes, **how).radius * pixels
attacked = np.full(len(certified), np.inf)
attack = image.FrankWolfe(ball, steps=10 if FAST else 30)
for k in (4, 16) if FAST else (2, 4, 8, 16, 32):
    moved = ensembles.smoothed(
        attack, blurred, x[some], y[some], eps=k / pixels, only=np.isinf(attacked), count=16, **how
    )
    attacked = np.where(moved.success, np.minimum(attacked, moved.cost * pixels), attacked)
assert np.all(certified <= attacked)

order, rank = np.argsort(attacked), np.arange(len(attacked))
figure, axis = plt.subplots(figsize=(6, 3.2), layout="constrained")
axis.vlines(rank, certified[order], np.minimum(attacked, 64)[order], color="0.85")
axis.plot(rank, attacked[order], ".", color="tab:red", label="attacked")
axis.plot(rank, certified[order], ".", color="tab:blue", label="certified")
axis.set(xlabel="image", ylabel="k, pixels", yscale="symlog")
axis.legend()
plt.show()
