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
# # Your own model
#
# A model is a pure function and its parameters: `wdjax.Model(apply, params)`, with
# `apply(params, x)` from images `[n, height, width, channels]` in [0, 1] to logits `[n, K]`. Any
# framework can be brought into this form in a few lines, and a PyTorch checkpoint is converted
# without PyTorch.

# %%
import contextlib
import importlib.util
import os
import tempfile

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import wdjax
from wdjax import attacks, convert, data, models, training

FAST = bool(os.environ.get("WDJAX_FAST"))  # For tests: fewer samples and epochs.
print(jax.devices()[0], "with JAX", jax.__version__)

train, test = data.digits()
x, y = test.take(20 if FAST else 100)
key = jax.random.key(0)
mine, absent = {}, []


def installed(package):
    if importlib.util.find_spec(package) is None:
        absent.append(package)
        print(f"{package} is not installed here: this section is left out")
        return False
    return True


# %% [markdown]
# ## A plain function


# %%
def apply(params, x):
    hidden = jnp.maximum(x.reshape(len(x), -1) @ params["in"], 0)
    return hidden @ params["out"]


params = {"in": jax.random.normal(key, (64, 32)) / 8, "out": jax.random.normal(key, (32, 10)) / 6}
mine["plain function"] = wdjax.Model(apply, params)

# %% [markdown]
# ## Flax NNX

# %%
from flax import nnx

rngs = nnx.Rngs(0)
layers = (lambda x: x.reshape(len(x), -1), nnx.Linear(64, 32, rngs=rngs), nnx.relu)
mine["NNX"] = models.functional(nnx.Sequential(*layers, nnx.Linear(32, 10, rngs=rngs)))

# %% [markdown]
# ## Flax Linen

# %%
from flax import linen as nn

module = nn.Sequential([lambda x: x.reshape(len(x), -1), nn.Dense(32), nn.relu, nn.Dense(10)])
mine["Linen"] = wdjax.Model(module.apply, module.init(key, x))

# %% [markdown]
# ## Equinox

# %%
if installed("equinox"):
    import equinox as eqx

    arrays, static = eqx.partition(eqx.nn.MLP(64, 10, 32, depth=1, key=key), eqx.is_array)

    def call(arrays, x):
        return jax.vmap(eqx.combine(arrays, static))(x.reshape(len(x), -1))

    mine["Equinox"] = wdjax.Model(call, arrays)

# %% [markdown]
# ## Haiku

# %%
if installed("haiku"):
    import haiku as hk

    forward = hk.transform(lambda x: hk.nets.MLP([32, 10])(x.reshape(len(x), -1)))
    forward = hk.without_apply_rng(forward)
    mine["Haiku"] = wdjax.Model(forward.apply, forward.init(key, x))

# %% [markdown]
# ## A PyTorch checkpoint, with parity
#
# The file is read without PyTorch, and nothing in it is run. Here PyTorch writes one, so that both
# can be asked the same: the logits must agree to rounding.

# %%
if installed("torch"):
    import torch

    torch.manual_seed(0)
    names = ("fc1", "relu", "fc2")
    modules = (torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    net = torch.nn.Sequential()
    for name, module in zip(names, modules):
        net.add_module(name, module)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        torch.save(net.state_dict(), "mlp.pth")
        mine["PyTorch"], report = convert.load("mlp.pth", "mlp")
    print(report)
    theirs = net(torch.from_numpy(x.reshape(len(x), -1))).detach().numpy()
    parity = float(np.abs(theirs - mine["PyTorch"](x)).max())
    print(f"largest difference of a logit: {parity:.1e}")
    assert parity < 1e-5

# %% [markdown]
# ## From here on they are all the same
#
# They are trained, attacked and compared by the same code: to `wdjax` they are pytrees.

# %%
budgets = np.array([0.0, 0.03, 0.09]) if FAST else np.linspace(0, 0.15, 7)
curves = {}
assert all(model(x).shape == (len(x), 10) for model in mine.values())
for name, model in list(mine.items())[-2 if FAST else 0 :]:
    epochs = 5 if FAST else 20
    model = training.train(model, *train, key=jax.random.key(1), epochs=epochs).model
    found = wdjax.search(attacks.WDAPlusPlus(), model, x, y)
    curves[name] = [float(wdjax.spend(found, eps=eps, order=1).accuracy) for eps in budgets]
    print(f"{name}: " + ", ".join(f"{accuracy:.2f}" for accuracy in curves[name]))

# %% [markdown]
# The figure: the accuracy that is left when an adversary may spend `eps` on average, for the same
# architecture from every framework. They differ by their first random weights only.

# %%
figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
for (name, curve), marker in zip(curves.items(), "os^DvP"):
    axis.plot(budgets, curve, marker=marker, label=name)
axis.set(xlabel="eps on average (linf)", ylabel="accuracy under WDA++", ylim=(0, 1))
axis.legend()
plt.show()
