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
# # The theory, where it can be counted
#
# A ReLU net is affine on each of finitely many cells. For small nets all of them can be listed, and
# with them the constants of the theory: `L`, above the growth of the expected loss with the budget,
# and `l`, below it. Here both are computed exactly, next to the worst case itself and to what an
# attack finds; and where the theory promises too much, that is shown.

# %%
import os

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from wdjax import Lp, Model, attacks, data, lipschitz, losses, models, run, training

FAST = bool(os.environ.get("WDJAX_FAST"))  # For tests: a smaller net and fewer budgets.
print(jax.devices()[0], "with JAX", jax.__version__)

# %% [markdown]
# ## A small classifier and its cells
#
# Two inputs, two classes, one hidden layer: small enough that a linear program finds the worst
# distribution in the whole Wasserstein ball.

# %%
rng = np.random.default_rng(3)
hidden, count = (5, 4) if FAST else (8, 12)
weights = [rng.normal(size=(hidden, 2)), rng.normal(size=(2, hidden)) / np.sqrt(hidden)]
biases = [rng.normal(size=hidden), np.zeros(2)]
net = lipschitz.relu_chain(weights, biases)


def apply(params, x):
    (w, b), (v, c) = params
    return jax.nn.relu(x @ w.T + b) @ v.T + c


params = [(jnp.float32(w), jnp.float32(b)) for w, b in zip(weights, biases)]
model = Model(apply, params)
x = rng.normal(size=(count, 2)).astype(np.float32)
y = np.array(jnp.argmax(model(x), axis=1))

cells = lipschitz.activation_cells(net)
print(len(cells.masks), "cells")
side = np.linspace(-3, 3, 200)
plane = np.stack(np.meshgrid(side, side), -1).reshape(-1, 2)
codes = lipschitz.masks_at(net, plane) @ (2 ** np.arange(hidden))
plt.figure(figsize=(4, 4))
plt.imshow(codes.reshape(200, 200) % 17, extent=(-3, 3, -3, 3), origin="lower", cmap="Pastel1")
plt.scatter(*x.T, c=y, cmap="coolwarm", edgecolor="k")
plt.title("activation cells and samples")
plt.show()

# %% [markdown]
# ## The bounds of equation 8
#
# From below, `l` grows as more masks are considered: any set of directions proves a bound, and all
# cells of the net without offsets give the best. From above stand the paper's `L` and `L_margin`,
# which is never larger. Between them lie the worst case, by a linear program, and what an attack
# with the same budget reaches.

# %%
norm = np.inf
found = lipschitz.theory(net, x, y, norm, cells)
print(found)
assert found.lower_samples <= found.lower + 1e-9 <= found.upper_margin + 2e-9
cones = lipschitz.directions(net)
growth = lipschitz.direction_bound(net, cones.witnesses, norm)[:, np.unique(y)].max(axis=1)
cumulative = np.maximum.accumulate(growth)
budgets = np.linspace(0.0, 2.0, 3 if FAST else 9)
worst = [lipschitz.worst_margin(net, x, y, norm=norm, eps=float(e), found=cells) for e in budgets]
clean = worst[0]


def attacked(eps):
    if eps == 0:
        return clean
    pgd = attacks.PGD(Lp(norm, box=(-10.0, 10.0)), steps=40, loss=losses.margin)
    result = run(pgd, model, x, y, eps=float(eps), skip_misclassified=False)
    return float(jnp.mean(losses.margin(model(result.x_adv), jnp.asarray(y))))


reached = [attacked(eps) for eps in budgets]
figure = plt.figure(figsize=(6, 4))
plt.plot(budgets, clean + found.upper * budgets, "k--", label="$E_N + L\\epsilon$, the paper's")
plt.plot(budgets, clean + found.upper_margin * budgets, "k-", label="$E_N + L_{margin}\\epsilon$")
plt.plot(budgets, worst, "o-", label="worst case, exact")
for share in (0.25, 0.5, 1.0):
    slope = cumulative[max(int(share * len(cumulative)) - 1, 0)]
    plt.plot(budgets, clean + slope * budgets, ":", label=f"lower, {share:.0%} of the masks")
plt.plot(budgets, clean + found.lower * budgets, "-", label="$E_N + l\\epsilon$")
plt.plot(budgets, reached, "x-", label="PGD, every sample by $\\epsilon$")
plt.xlabel("budget")
plt.ylabel("expected margin loss")
plt.legend(fontsize=8)
plt.show()
for value, eps, attack in zip(worst, budgets, reached):
    assert clean + found.lower * eps <= value + 1e-6 <= clean + found.upper_margin * eps + 2e-6
    assert attack <= value + 1e-4

# %% [markdown]
# ## Where the theory promises too much
#
# `l` of equation 7 is a maximum over all labels, but mass can only leave where there is a sample.
# With one label in the data, the paper's `l` may exceed the true slope: then it bounds nothing.

# %%
for label in np.unique(y):
    own = y == label
    base = lipschitz.worst_margin(net, x[own], y[own], norm=norm, eps=0.0, found=cells)
    far = lipschitz.worst_margin(net, x[own], y[own], norm=norm, eps=50.0, found=cells)
    restricted = lipschitz.lower_constant(net, norm, y[own]).value
    print(
        f"samples of label {label}: slope of the worst case {(far - base) / 50:.3f}, "
        f"l of all labels {found.lower_all:.3f}, l of this one {restricted:.3f}"
    )
    assert restricted <= (far - base) / 50 + 1e-6

# %% [markdown]
# For smooth nets the paper's lower bound (theorem 3.3) is false: with `theta(x) = (0, tanh x)`,
# label 0 and one sample at 0, `l` is 1, but the cross-entropy never exceeds `log(1 + e)`.

# %%
grid = np.linspace(-20, 20, 8001)
loss = np.logaddexp(0, np.tanh(grid))
lams = np.linspace(0, 1.2, 1201)[:, None]
for eps in (0.1, 1.0, 10.0):
    exact = np.min(lams[:, 0] * eps + np.max(loss - lams * np.abs(grid), axis=1))
    print(f"eps {eps:>4}: worst case {exact:.4f}, claimed at least {np.log(2) + eps:.4f}")
    assert exact < np.log(2) + eps

# %% [markdown]
# ## Nets that cannot be counted
#
# On a ball the same constants are bounded by intervals, zonotopes, quadratic constraints (LipSDP)
# and branch and bound, each no looser than the one before; samples bound them from below.

# %%
at, label, radius = x[:1], y[:1], 0.3
how = {"norm": norm, "eps": radius, "box": None}
below = lipschitz.sampled_lipschitz(model, at, label, key=jax.random.key(0), **how).max()
print(f"sampled   {float(below):.4f}")
for method in lipschitz.METHODS:
    above = lipschitz.local_lipschitz(model, at, label, method=method, **how).max()
    print(f"{method:<9} {above:.4f}")
    assert below <= above * (1 + 1e-5)

# %% [markdown]
# ## Training for small constants
#
# `trainable_lipschitz` can be differentiated in the model. Trained so that margins outweigh `eps`
# times their constants, nets are verified in l2 where plain ones are not.

# %%
train, test = data.digits()
fresh = models.mlp((64, 64, 10), key=jax.random.key(0))
towards = {"certificate": lipschitz.LipschitzTraining(norm=2), "eps": 0.5}
verified = {}
for name, more in (("plain", {}), ("through constants", towards)):
    fit = training.train(fresh, *train, key=jax.random.key(1), epochs=10 if FAST else 40, **more)
    proof = lipschitz.verify(fit.model, *test.take(100), norm=2, eps=0.5, method="zonotope")
    verified[name] = float(proof.verified.mean())
    print(f"trained {name}: clean {proof.correct.mean():.2f}, verified {verified[name]:.2f}")
assert verified["through constants"] > verified["plain"]
