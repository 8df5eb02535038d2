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
# # Defences that adapt, attacks on the models they would have
#
# Some defences go on learning at test time: they see the inputs, without labels, and only then fix
# the model. Attacking the model that was there before says little about them. So an attack has to
# be a *game*: the attacker moves the inputs, the defender adapts under private randomness that is
# drawn after the move, and a referee looks. This notebook plays it on digits, and shows how an
# evaluation can fool itself.

# %%
import functools
import os

import jax
import matplotlib.pyplot as plt
import numpy as np

from wdjax import data, models, transductive
from wdjax.attacks import PGD

FAST = bool(os.environ.get("WDJAX_FAST"))  # For tests: fewer samples and steps.
print(jax.devices()[0], "with JAX", jax.__version__)

train, test = data.digits()
train = train.take(400) if FAST else train
x, y = test.take(60 if FAST else 300)
key, eps = jax.random.key(0), 0.15

# %% [markdown]
# ## A defence is five pure functions
#
# DANN trains a new net for every set of inputs, so that a discriminator cannot tell the features of
# the inputs from those of the training data. `prepare` makes what everybody knows: the data and the
# static base model. Any frozen dataclass with the methods of `transductive.Defense` will do.

# %%
defense = transductive.DANN(
    network=functools.partial(models.norm_mlp, (64, 32, 10) if FAST else (64, 96, 96, 10)),
    discriminator=functools.partial(models.mlp, (32, 16, 2) if FAST else (96, 96, 2)),
    steps=150 if FAST else 800,
    learning_rate=5e-3 if FAST else 1e-3,
)
memory = transductive.prepare(defense, *train, key=jax.random.key(1))

# %% [markdown]
# ## The same game, four attacks
#
# Transfer attacks the static model, once. FPA attacks the newest simulation of the defence, GMSA
# all simulations so far together: their mean, or the least of every sample. They are one attack
# with another reduction, over a bank of models that grows. Every number is a mean over private keys
# of the defender with an interval of 95 %, beside that on clean inputs under the same keys.

# %%
inner = PGD(steps=20 if FAST else 40, step_size=eps / 10)
count = 3 if FAST else 8
attacks = {
    "transfer": transductive.transfer(inner),
    "FPA": transductive.fpa(inner, count),
    "GMSA-AVG": transductive.gmsa_avg(inner, count),
    "GMSA-MIN": transductive.gmsa_min(inner, count, legs="one"),
}
if FAST:
    del attacks["FPA"], attacks["GMSA-MIN"]
how = {"memory": memory, "eps": eps, "key": key, "draws": 2 if FAST else 5}
found = {name: transductive.play(defense, attack, x, y, **how) for name, attack in attacks.items()}
for name, report in found.items():
    share, clean = report.one_shot, report.one_shot_clean
    print(
        f"{name:9} {share.value:.2f} [{share.low:.2f}, {share.high:.2f}], clean {clean.value:.2f}, "
        f"the static model {report.static_accuracy.value:.2f}"
    )
name, least = transductive.worst(found)
print(f"{name} leaves least; without an attack on the model space this would have looked safe")

# %% [markdown]
# ## Three ways to fool oneself
#
# **Points that barely fall.** AutoAttack keeps the first point that the static model misclassifies,
# and hands back the clean sample where there is none. Against a model that will be another one,
# such a set is weak, at the very same success on the static model.
#
# **Any of many draws.** A sample counts as broken if *any* private key fails on it: that grows with
# the number of keys, on clean inputs as well.
#
# **A seed that leaks.** Private randomness is part of the defence. Handing it to the attacker tells
# how large a part.

# %%
first = transductive.play(defense, transductive.transfer(inner, keep="first"), x, y, **how)
pair = found["transfer"], first
print("on the static model:", [round(one.static_accuracy.value, 2) for one in pair])
print("on the defence:     ", [round(one.one_shot.value, 2) for one in pair])

report = found["GMSA-AVG"]
print(
    f"right in every draw: {report.worst_of.value:.2f}, clean {report.worst_of_clean.value:.2f};"
    f" in most: {report.majority.value:.2f} and {report.majority_clean.value:.2f}"
)

leaked = transductive.play(
    defense, transductive.fpa(inner, 2), x, y, leak="seed", **(how | {"draws": 1})
)
print(f"with the seed: {leaked.one_shot.value:.2f}")

# %% [markdown]
# The figure: what each attack leaves, with its interval, beside clean inputs.

# %%
figure, axis = plt.subplots(figsize=(6, 3.4), layout="constrained")
rows = found | {"first fall": first}
for place, report in enumerate(rows.values()):
    share = report.one_shot
    ends = [[share.value - share.low], [share.high - share.value]]
    axis.bar(place, share.value, color="C0", width=0.6)
    axis.errorbar(place, share.value, ends, color="black", capsize=4)
    axis.plot(place, report.one_shot_clean.value, "o", color="C1")
    axis.plot(place, report.static_accuracy.value, "_", color="C3", markersize=24)
axis.set_xticks(range(len(rows)), list(rows))
axis.set(ylabel="accuracy", ylim=(0, 1.02))
axis.set_title("DANN attacked (bars), clean (dots), the static model (lines)", fontsize=10)
plt.show()

# %% [markdown]
# ## An order of one's own
#
# DENT adapts the affine parameters of every sample by a loss that wants predictions balanced over
# the batch. Who may choose the order of the inputs fills a batch with a few classes, and the
# balance becomes the attack. Without sorting, DENT is little more than its static model.

# %%
net = models.norm_mlp((64, 32, 10) if FAST else (64, 96, 96, 10), key=key)
opponent = transductive.Opponent(PGD(steps=5, random_start=True, iterate="last"), 0.1)
fit = jax.jit(functools.partial(transductive.train_classifier, steps=150 if FAST else 600))
net = fit(net, *train, key=key, opponent=opponent)
dent = transductive.DENT(net)
size = 30 if FAST else 75
moved = transductive.transfer(
    inner, loss=transductive.objectives.margin, judge=transductive.confidence, rivals=9
)
batches = {"memory": (), "eps": 0.1, "key": key, "size": size, "draws": 1}
for order in ("natural", "labels"):
    report = transductive.play(dent, moved, x, y, order=order, **batches)
    print(
        f"{order:8} {report.one_shot.value:.2f}, the static model "
        f"{report.static_accuracy.value:.2f}, clean {report.one_shot_clean.value:.2f}"
    )
assert np.all(report.cost <= 0.1 * (1 + 1e-6))

# %% [markdown]
# `python -m wdjax game` plays the whole table: RMC, DENT, DANN, TADV and URejectron.
