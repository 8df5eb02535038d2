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
# # The first sandwich
#
# How robust is a classifier? Every budget `eps` has two answers. No attack can push the accuracy
# below what a **certificate** proves, and the **attacks** that were made did push it down to
# something. The truth lies between. This notebook measures both for a small net on digits, in about
# two minutes on a CPU, and draws the one figure that `wdjax` is about.

# %%
import os

import jax
import numpy as np

from wdjax import Lp, attacks, audit, data, models, training
from wdjax.report import plots

FAST = bool(os.environ.get("WDJAX_FAST"))  # For tests: fewer samples and budgets.
print(jax.devices()[0], "with JAX", jax.__version__)

# %% [markdown]
# ## A net that has seen attacks
#
# 1447 images of 8 x 8 pixels, with values in [0, 1]. In training every batch is attacked first, so
# that the net learns to be right nearby as well.

# %%
train, test = data.digits()
x, y = test.take(20 if FAST else 200)
net = models.mlp((64, 32, 10), key=jax.random.key(0))
model = training.train(
    net,
    *train,
    key=jax.random.key(1),
    epochs=10 if FAST else 30,
    attack=attacks.PGD(steps=5, iterate="last"),
    eps=0.1,
).model
print(f"clean accuracy {np.mean(np.argmax(model(x), -1) == y):.1%}")

# %% [markdown]
# ## Both sides at once
#
# `audit.sandwich` attacks, certifies, and checks that the two sides never cross. Besides the usual
# ball, in which every image moves by at most `eps` (`Omega_inf`), there are two larger ones, in
# which `eps` is spent *on average*: a lot on images that are close to a mistake, nothing on the
# others. WDA++ finds the nearest mistake of every image and buys the cheapest.

# %%
ball = Lp(np.inf)
found = audit.sandwich(
    model,
    x,
    y,
    eps_list=[0.0, 0.03, 0.09] if FAST else [0.0, 0.01, 0.02, 0.03, 0.045, 0.06, 0.09, 0.12],
    ball=ball,
    attacks={
        "pgd": attacks.PGD(ball, steps=10 if FAST else 40),
        "wda++": attacks.WDAPlusPlus(ball, step_size=0.03),
    },
    loss_bounds={},
    key=jax.random.key(2),
)
print("the sides never cross" if found.passed else found.invariants)

# %% [markdown]
# ## The figure
#
# Above the shade somebody has already broken the net; below it nobody can. In the shade nobody
# knows: better attacks lower its upper edge, better certificates raise the lower one.

# %%
figure = plots.accuracy(found)
figure

# %%
for name, order in (("every image", np.inf), ("on average", 1)):
    low, high = found.certified(order)[1], found.attacked(order)[1]
    print(f"eps {found.eps_list[1]:g}, {name}: between {low:.1%} and {high:.1%}")
