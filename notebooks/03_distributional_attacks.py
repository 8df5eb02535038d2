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
# # Who gets the budget
#
# A point-wise attack moves every image by at most `eps`. A distributional one may spend `eps` *on
# average*: an image that is close to a mistake costs little, an image that is far from one is left
# alone, and what it saves buys others. The Wasserstein order p says how it is counted: `Omega_inf`
# is the point-wise ball, `Omega_2` and `Omega_1` are larger.

# %%
import os

import jax
import matplotlib.pyplot as plt
import numpy as np

import wdjax
from wdjax import Lp, attacks, convert, data, ensembles, metrics, models, training
from wdjax.report import plots

FAST = bool(os.environ.get("WDJAX_FAST"))  # For tests: fewer samples and steps.
WEIGHTS = os.environ.get("WDJAX_WEIGHTS", "")  # A checkpoint of `resnet2b`, and images for it.
IMAGES = os.environ.get("WDJAX_IMAGES", "")
print(jax.devices()[0], "with JAX", jax.__version__)

# %% [markdown]
# ## A net
#
# With a RobustBench checkpoint at hand, name it and its images above. Here a small net is trained
# on 1447 images of digits, 8 x 8 pixels with values in [0, 1], each of them attacked first.

# %%
count = 24 if FAST else 100
if WEIGHTS and IMAGES:
    model, eps = convert.load(WEIGHTS, "resnet2b").model, 2 / 255
    x, y = data.load_npz(IMAGES).take(count)
else:
    train, test = data.digits()
    x, y = test.take(count)
    net = models.mlp((64, 32, 10), key=jax.random.key(0))
    model = training.train(
        net,
        *train,
        key=jax.random.key(1),
        epochs=4 if FAST else 30,
        attack=attacks.PGD(steps=5, iterate="last"),
        eps=0.1,
    ).model
    eps = 0.1
ball = Lp(np.inf)
print(f"clean accuracy {np.mean(np.argmax(model(x), -1) == y):.1%}")

# %% [markdown]
# ## The nearest mistake of every image
#
# Everything follows from one list of numbers: how far away the nearest mistake is. `wda_star`
# searches it by walks along the decision boundary, from many starts. A misclassified image is a
# mistake already, at distance 0.

# %%
found = ensembles.wda_star(
    model, x, y, key=jax.random.key(2), ball=ball, passes=120 if FAST else 400
)
distance = np.asarray(metrics.flip_distance(found))
print(f"median distance {np.median(distance):.3f}, with {found.passes.mean():.0f} passes an image")

# %% [markdown]
# ## The knapsack
#
# `spend` buys the cheapest mistakes until `eps` is spent, and part of the last one. Its weight says
# how much of an image's mass goes to its mistake. Under `Omega_1` the price is the distance, under
# `Omega_2` its square, so that far images are dearer.

# %%
bought = {order: wdjax.spend(found, eps=eps, order=order) for order in (1, 2, np.inf)}
for order, result in bought.items():
    moved = int(np.sum(np.asarray(result.weight) > 0))
    print(f"Omega_{order}: {moved} of {len(y)} images move, accuracy {float(result.accuracy):.1%}")

# %%
ranked = np.argsort(distance)
figure, axis = plt.subplots(figsize=(7, 3.5))
axis.plot(np.arange(1, len(y) + 1), distance[ranked], color="black", label="nearest mistake")
axis.axhline(eps, color="gray", linestyle=":", label="eps")
for (order, result), mark in zip(bought.items(), "o^s"):
    last = int(np.sum(np.asarray(result.weight) > 0))
    if last:
        label = f"the last that $\\Omega_{{{order}}}$ buys".replace("inf", "\\infty")
        axis.plot(last, distance[ranked][last - 1], mark, markersize=9, label=label)
axis.set_xlabel("images, nearest mistake first")
axis.set_ylabel("distance")
axis.legend()
plt.show()

# %% [markdown]
# One search serves every radius: the curves are only the knapsack again.

# %%
radii = np.linspace(0, 2 * eps, 9)
curve = metrics.robustness_curve(distance, radii)
print("   eps  Omega_inf  Omega_2  Omega_1")
for radius, every in zip(radii, np.asarray(curve.accuracy)):
    mean = [float(wdjax.spend(found, eps=radius, order=order).accuracy) for order in (2, 1)]
    print(f"{radius:6.3f}  {every:9.1%}  {mean[0]:7.1%}  {mean[1]:7.1%}")

# %% [markdown]
# ## A row of the table
#
# What is left of the accuracy, attack by attack, under one `eps`. Point-wise attacks agree; the
# budget's freedom makes the difference. On the command line: `python -m wdjax attack ...
# --attacks table1`.

# %%
key, row = jax.random.key(3), {}
steps = 5 if FAST else 40
row["FGSM"] = wdjax.run(attacks.fgsm(ball), model, x, y, eps=eps).accuracy
row["PGD"] = wdjax.run(attacks.PGD(ball, steps=steps), model, x, y, eps=eps).accuracy
row["APGD"] = wdjax.run(attacks.APGD(ball, steps=steps), model, x, y, eps=eps, key=key).accuracy
row["W-PGD"] = wdjax.run(
    attacks.WPGD(ball, order=2, steps=steps), model, x, y, eps=eps, order=2
).accuracy
row["WDA++ 2"] = wdjax.run(attacks.WDAPlusPlus(ball), model, x, y, eps=eps, order=2).accuracy
row["WDA++ 1"] = wdjax.run(attacks.WDAPlusPlus(ball), model, x, y, eps=eps, order=1).accuracy
row["WDA* 2"], row["WDA* 1"] = bought[2].accuracy, bought[1].accuracy
clean = float(np.mean(np.argmax(model(x), -1) == y))
figure = plots.accuracies(clean, {name: float(value) for name, value in row.items()})
figure
