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
# # Verify a property
#
# Robustness is one property among many. Here a small net advises an aircraft, as ACAS Xu does, and
# is asked other questions: does it keep quiet when nobody is near, does its advice change in the
# right direction, does it say the same after its weights were rounded to eight bits? Each is proved
# for *every* input of a box, or refuted by one.

# %%
import os

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

from wdjax import Model, certify

FAST = bool(os.environ.get("WDJAX_FAST"))  # For tests: shorter training, fewer questions.
print(jax.devices()[0], "with JAX", jax.__version__)

# %% [markdown]
# ## A net that advises
#
# Five inputs: the intruder's distance from 0 to 1, its bearing from -1 (left) to 1 (right), its
# heading, and both speeds. Five scores, the largest of which is the advice. The rule below is ours;
# ACAS Xu's tables are larger, and its 45 nets are read from ONNX by
# `python -m wdjax verify NET.onnx PROPERTY.vnnlib`.

# %%
ADVICE = ("clear", "weak left", "weak right", "strong left", "strong right")


def rule(x):
    distance, bearing, heading, _, speed = x.T
    danger = jnp.exp(-3 * distance) * (0.7 + 0.3 * speed) * (1 - 0.2 * heading**2)
    side = jnp.tanh(3 * bearing)  # An intruder at the right is avoided to the left.
    weak, strong = 0.5 - jnp.abs(danger - 0.5), 2 * danger - 1
    return jnp.stack(
        [1 - 2 * danger, weak + side / 3, weak - side / 3, strong + side / 2, strong - side / 2], 1
    )


def apply(params, x):
    for w, b in params[:-1]:
        x = jax.nn.relu(x @ w + b)
    return x @ params[-1][0] + params[-1][1]


sizes = (5, 12, 12, 5)
keys = jax.random.split(jax.random.key(0), 4)
params = [
    (jax.random.normal(k, (m, n)) / np.sqrt(m / 2), jnp.zeros(n))
    for k, m, n in zip(keys, sizes[:-1], sizes[1:])
]
low, high = np.array([0.0, -1, -1, 0, 0]), np.ones(5)
x = jax.random.uniform(keys[-1], (2048, 5), minval=low, maxval=high)
steps = 600 if FAST else 3000
adam = optax.adam(optax.cosine_decay_schedule(0.01, steps))


def error(params):
    return jnp.mean((apply(params, x) - rule(x)) ** 2)


@jax.jit
def fit(params):
    def step(carry, _):
        params, state = carry
        value, slope = jax.value_and_grad(error)(params)
        change, state = adam.update(slope, state)
        return (optax.apply_updates(params, change), state), value

    (params, _), values = jax.lax.scan(step, (params, adam.init(params)), length=steps)
    return params, values[-1]


params, left = fit(params)
net = Model(apply, params)
print(f"root of the mean squared error {left**0.5:.3f}")

# %% [markdown]
# ## Does it hold?
#
# A specification says which outputs are forbidden. `label_wins` is one for a class; any union of
# polyhedra can be written down. A verdict is a proof for all real inputs of the box and for the
# float program, or a point that you can check.

# %%
clear_wins = certify.label_wins(0, 5)
others = np.eye(5)[1:] - np.eye(5)[:1]
not_clear = certify.Specification([(others, np.zeros(4))])  # Forbidden: no score above clear's.
questions = {
    "far away: clear": ([0.8, -1, -1, 0, 0], [1, 1, 1, 1, 1], clear_wins),
    "near, at the right: not clear": ([0, 0.3, -1, 0, 0.5], [0.1, 1, 1, 1, 1], not_clear),
    "half way: clear": ([0.2, -1, -1, 0, 0], [0.5, 1, 1, 1, 1], clear_wins),
}
verdicts = {
    name: certify.property(net, np.float32(lower), np.float32(upper), spec, seconds=200)
    for name, (lower, upper, spec) in questions.items()
}
for name, verdict in verdicts.items():
    print(f"{name:<30}{verdict.status:<10}by {verdict.by}, {verdict.leaves} parts")
found = verdicts["half way: clear"].witness
print("refuted at", found, "where it says", ADVICE[int(net(found[None]).argmax())])

# %%
side = np.linspace(0, 1, 200)
plane = np.stack(np.meshgrid(side, 2 * side - 1), -1).reshape(-1, 2)
rest = np.broadcast_to(found[2:], (len(plane), 3))
said = np.asarray(net(jnp.asarray(np.hstack([plane, rest]), jnp.float32)).argmax(1))
figure, axis = plt.subplots(figsize=(5.5, 4))
colours = plt.get_cmap("Set2", 5)
axis.imshow(
    said.reshape(200, 200), extent=(0, 1, -1, 1), origin="lower", aspect="auto", cmap=colours,
    vmin=-0.5, vmax=4.5,
)  # fmt: skip
for (lower, upper, _), verdict in zip(questions.values(), verdicts.values()):
    line = {"holds": "-", "violated": ":"}.get(verdict.status, "--")
    corner, size = lower[:2], np.subtract(upper, lower)[:2]
    axis.add_patch(plt.Rectangle(corner, *size, fill=False, lw=2, ls=line))
axis.plot(*found[:2], "k*", ms=12)
for number, name in enumerate(ADVICE):
    axis.plot([], [], "s", color=colours(number), label=name)
axis.set(xlabel="distance", ylabel="bearing", title="holds: solid; violated: dotted, at the star")
axis.legend(fontsize=8, loc="lower right")
plt.show()

# %% [markdown]
# ## Monotone?
#
# The farther the intruder, the higher the score of *clear* should be. `monotone` turns this into a
# property of the derivative, kinks included. The rule has it everywhere; whether the net has it
# depends on where one looks.

# %%
slope, never_falls = certify.monotone(net, (0,), output=0)
corridor = np.float32([0.1, -0.5, -0.5, 0.4, 0.4]), np.float32([0.5, 0.5, 0.5, 0.6, 0.6])
everywhere = np.float32(low), np.float32(high)
grows = {}
for name, (lower, upper), seconds in (("corridor", corridor, 200), ("everywhere", everywhere, 20)):
    grows[name] = certify.property(slope, lower, upper, never_falls, seconds=seconds)
    points = jax.random.uniform(jax.random.key(1), (4000, 5), minval=lower, maxval=upper)
    print(f"{name}: {grows[name].status} by {grows[name].by}, {grows[name].leaves} parts")
    print(f"  least slope at 4000 random points {float(slope(points).min()):.3f}")
    if grows[name].status == "violated":
        print(f"  slope {float(grows[name].output[0]):.3f} at {grows[name].witness}")

# %% [markdown]
# ## The same after quantisation?
#
# Weights are rounded to a few bits. `agree` is the property that two functions differ by less than
# `delta`; bisection finds the smallest `delta` that is proved, and random points say how much of it
# is real. Between them lies the truth.

# %%
lower, upper = np.float32([0.4, -0.3, -0.3, 0.4, 0.4]), np.float32([0.6, 0.3, 0.3, 0.6, 0.6])
points = jax.random.uniform(jax.random.key(2), (20_000, 5), minval=lower, maxval=upper)


def quantised(bits):
    def rounded(w):
        unit = jnp.abs(w).max() / (2 ** (bits - 1) - 1)
        return jnp.round(w / unit) * unit

    return Model(apply, [(rounded(w), b) for w, b in params])


def proved(other, least):
    """The smallest delta of a few, from the easiest on, for which agreement is proved."""
    best = np.inf
    for delta in least * np.geomspace(6, 1.1, 3 if FAST else 6):
        function, spec = certify.agree(net, other, float(delta), outputs=5)
        seconds = 200 if best == np.inf else 3  # The first also compiles.
        if certify.property(function, lower, upper, spec, seconds=seconds).status != "holds":
            break
        best = float(delta)
    return best


differences = {}
for bits in (4, 8) if FAST else (4, 5, 6, 7, 8):
    other = quantised(bits)
    least = float(jnp.abs(net(points) - other(points)).max())
    differences[bits] = least, proved(other, least)
    print(f"{bits} bits: differs by {least:.4f} somewhere, nowhere by {differences[bits][1]:.4f}")

# %%
seen, bound = np.transpose([*differences.values()])
plt.figure(figsize=(5, 3.5))
plt.fill_between(list(differences), seen, bound, alpha=0.3, label="unknown")
plt.plot(list(differences), seen, "o-", label="largest difference seen")
plt.plot(list(differences), bound, "k^-", label="proved")
plt.yscale("log")
plt.xticks(list(differences))
plt.xlabel("bits of a weight")
plt.ylabel("difference of the scores")
plt.legend()
plt.show()
