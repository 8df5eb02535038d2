"""What tests measure on one device, on eight, and in two processes of four; and such a process.

``python many_devices.py RANK PORT FOLDER`` is one of two processes.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import wdjax
from wdjax import Lp, Model, attacks, certify, nppr, parallel, smoothing, training
from wdjax.files import persist
from wdjax.nppr import distributions
from wdjax.smoothing import noise

if __name__ == "__main__":  # Before any array is made.
    RANK, PORT, FOLDER = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{PORT}", 2, RANK)

KEY = jax.random.key(0)


def apply(params, x):
    return jax.nn.relu(x @ params[0]) @ params[1]


MODEL = Model(apply, [jax.random.normal(jax.random.key(i), (6, 6))[:, : 6 - 3 * i] for i in (0, 1)])
X = np.asarray(jax.random.uniform(jax.random.key(2), (11, 6)))
Y = np.asarray(jnp.argmax(MODEL(X), -1))


def measured(x, y, mesh):
    """By name what each method says of samples ``[11, 6]``: trees of NumPy arrays."""
    how = {"eps": 0.3, "key": KEY, "mesh": mesh}
    pgd = attacks.PGD(Lp(2), steps=3, random_start=True)
    blur, balls = noise.Gaussian(0.25), distributions.UniformBall(0.6)
    votes = {"noise": blur, "n0": 10, "n": 100, "batch_size": 64}
    family = nppr.Family(mode="label", components=2, upsample="none")
    schedule = nppr.Schedule(steps=3, batch=8, draws=8)
    once = {"epochs": 1, "batch_size": 8, "attack": pgd, "optimizer": optax.sgd(0.1)}
    found = {
        "search": wdjax.search(pgd, MODEL, x, y, batch_size=8, only=np.arange(11) != 4, **how),
        "wpgd": wdjax.run(attacks.WPGD(steps=3), MODEL, x, y, eps=0.1, mesh=mesh, history=True),
        "crown": certify.margin_bounds(MODEL, x, y, norm=2, eps=0.1, batch_size=8, mesh=mesh),
        "smoothing": smoothing.certify(MODEL, x, y, key=KEY, mesh=mesh, **votes),
        "estimate": nppr.estimate(MODEL, balls, x, y, key=KEY, draws=40, mesh=mesh).survived,
        "fit": nppr.fit(MODEL, x, y, family=family, schedule=schedule, **how).history,
        "train": training.train(MODEL, x, y, **once, **how),
    }
    return {name: jax.tree.map(np.asarray, tree) for name, tree in found.items()}


def kept(x, y, mesh, rank, path):
    """A search that one process ends after a round, and that both resume; process 0 writes."""
    if rank:
        persist.save = None
    how = {"eps": 0.1, "mesh": mesh, "checkpoint": path, "every": 0.0}
    attack, told = attacks.WPGD(steps=3), []
    wdjax.search(attack, MODEL, x, y, callback=lambda seen: rank, **how)
    found = wdjax.search(attack, MODEL, x, y, callback=told.append, **how)
    assert len(told) == 3  # Of four rounds.
    with pytest.raises(ValueError, match="one file"):
        wdjax.search(attack, MODEL, x, y, **how | {"checkpoint": path.parent})
    with pytest.raises(ValueError, match="given different arguments"):
        wdjax.search(attack, MODEL, x, y, **how | {"eps": 0.1 + rank})
    return jax.tree.map(np.asarray, found)


def main(rank, folder):
    """Reads samples of its own, and writes what it measured of those of both."""
    x, y = parallel.joined((X[5 * rank : 5 + 6 * rank], Y[5 * rank : 5 + 6 * rank]))
    mesh = parallel.data_mesh()
    assert (mesh.size, jax.local_device_count()) == (8, 4)
    found = measured(x, y, mesh)
    found["kept"] = kept(x, y, mesh, rank, folder / "state.safetensors")
    odd = parallel.each(lambda device: lambda item: np.arange(item), 3, mesh)
    assert [len(one) for one in odd] == [0, 1, 2]
    np.savez(folder / f"{rank}.npz", *jax.tree.leaves(found))


if __name__ == "__main__":
    main(RANK, FOLDER)
