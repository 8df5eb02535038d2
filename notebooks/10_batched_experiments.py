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
# # A thousand experiments in one program
#
# A robustness curve without a band says little: another seed gives another curve. Here 32 seeds, 8
# radii and 4 models are one `vmap`, 1024 attacks in one program. Then the same work is spread over
# devices, and over processes that know nothing of each other, with the same numbers.

# %%
import os
import time

# Eight virtual devices for the last part. This must be said before JAX begins.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import wdjax
from wdjax import attacks, data, metrics, models, norms, training

FAST = bool(os.environ.get("WDJAX_FAST"))  # For tests: fewer seeds, shorter training.
print(jax.devices()[0], "with JAX", jax.__version__)

# %% [markdown]
# ## Four models that are one
#
# Models of one architecture are one pytree with stacked leaves. The four are trained against
# attacks within growing radii.

# %%
train, test = data.digits()
x, y = test.take(16)
strengths = (0.0, 0.05, 0.1, 0.15)


def trained(eps):
    against = {"attack": attacks.PGD(steps=3, iterate="last"), "eps": eps} if eps else {}
    net = models.mlp((64, 16, 10), key=jax.random.key(0))
    return training.train(
        net, *train, key=jax.random.key(1), epochs=3 if FAST else 20, **against
    ).model


nets = [trained(eps) for eps in strengths]
bank = jax.tree.map(lambda *leaves: jnp.stack(leaves), *nets)
print([f"{metrics.accuracy(net(x), y):.2f}" for net in nets], "clean accuracies")

# %% [markdown]
# ## One program
#
# `wdjax.run` is a function of its arguments, so it may be mapped: over keys, over radii, over
# models. `attack` stays what it is for one experiment. PGD begins at a random point, so every seed
# is another attack.

# %%
seeds = 8 if FAST else 32
keys = jax.random.split(jax.random.key(2), seeds)
radii = jnp.linspace(0.01, 0.22, 8)
pgd = attacks.PGD(steps=5, random_start=True)


def one(key, eps, model):
    return wdjax.run(pgd, model, x, y, eps=eps, key=key).accuracy


every = jax.vmap(jax.vmap(jax.vmap(one, (None, None, 0)), (None, 0, None)), (0, None, None))
program = jax.jit(every)
began = time.perf_counter()
left = jax.block_until_ready(program(keys, radii, bank))
whole = time.perf_counter() - began
began = time.perf_counter()
left = jax.block_until_ready(program(keys, radii, bank))
mapped = time.perf_counter() - began
print(f"{left.size} attacks {left.shape}: {whole:.1f} s with compilation, then {mapped:.3f} s")

# %% [markdown]
# The loop that one would write first calls `wdjax.run` for every experiment. It is measured on a
# few of them, after its programs are compiled too.

# %%
few = [(s, r, m) for s in range(2) for r in range(2) for m in range(4)]


def looped():
    return [
        float(wdjax.run(pgd, nets[m], x, y, eps=float(radii[r]), key=keys[s]).accuracy)
        for s, r, m in few
    ]


looped()
began = time.perf_counter()
said = looped()
each = (time.perf_counter() - began) / len(few)
np.testing.assert_allclose(said, [left[at] for at in few], atol=1e-6)
speedup = each * left.size / mapped
print(f"a loop: {each * 1e3:.1f} ms each, so {speedup:.0f} times the time of one program")

# %% [markdown]
# ## Curves with bands
#
# The band runs over the seeds, from the strongest attack to the weakest. An attack that keeps the
# best of all seeds for every sample is stronger than its lower edge.

# %%
plt.figure(figsize=(6, 4))
for number, strength in enumerate(strengths):
    curve = np.asarray(left[:, :, number])
    (line,) = plt.plot(radii, np.median(curve, axis=0), label=f"trained within {strength:g}")
    plt.fill_between(radii, curve.min(axis=0), curve.max(axis=0), alpha=0.3, color=line.get_color())
plt.xlabel("eps")
plt.ylabel(f"accuracy on {len(y)} digits, of {seeds} seeds")
plt.legend()
plt.show()

# %% [markdown]
# ## More devices
#
# Arguments that are spread over a mesh make XLA spread the work. Here eight virtual devices of one
# CPU, which gain no time, stand for eight accelerators; the program is the same, and the numbers.

# %%
mesh = jax.make_mesh((8,), ("seeds",), axis_types=(jax.sharding.AxisType.Auto,))
by_seed = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("seeds"))
spread = jax.device_put(keys, by_seed)
over_devices = program(spread, radii, bank)
print(len(over_devices.sharding.device_set), "devices")
np.testing.assert_array_equal(over_devices, left)

# %% [markdown]
# ## Shards and merge
#
# Attacks on many samples are cut by samples. A process gets its part and says with `index=` which
# samples these are: a key depends on the global index alone, so the parts joined are the whole, bit
# for bit. The knapsack couples samples, so it is solved after the merge. Files, dead machines and
# `python -m wdjax merge` are the subject of [Many machines](https://wdjax.github.io/wdjax/scale/).

# %%
fab = attacks.FAB(wdjax.Lp(norms.NAMES["linf"]), steps=5)
parts = [
    wdjax.search(fab, nets[2], x[part], y[part], key=keys[0], index=part)
    for part in np.split(np.arange(len(y)), 4)
]
merged = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)
alone = wdjax.search(fab, nets[2], x, y, key=keys[0])
np.testing.assert_array_equal(merged.x_adv, alone.x_adv)
for order in (np.inf, 2, 1):
    bought = wdjax.spend(merged, eps=0.03, order=order)
    assert bought.accuracy == wdjax.spend(alone, eps=0.03, order=order).accuracy
    print(f"Omega_{order:g}: accuracy {bought.accuracy:.2f} at eps 0.03")
