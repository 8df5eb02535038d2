"""What tests measure on one device, on eight, and in two processes of four; and such a process.

``python many_devices.py RANK PORT FOLDER`` is one of two processes.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import wdjax
from wdjax import Lp, Model, attacks, certify, nppr, parallel, smoothing
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
    radii = {"norm": 2, "mesh": mesh, "batch_size": 8}
    how = {"key": KEY, "mesh": mesh, "draws": 40}
    pgd = attacks.PGD(Lp(2), steps=3, random_start=True)
    found = {
        "search": wdjax.search(
            pgd, MODEL, x, y, eps=0.3, key=KEY, mesh=mesh, batch_size=8, only=np.arange(11) != 4
        ),
        "wpgd": wdjax.run(attacks.WPGD(steps=3), MODEL, x, y, eps=0.1, mesh=mesh, history=True),
        "crown": certify.verify(MODEL, x, y, eps=0.1, steps=2, **radii),
        "smoothing": smoothing.certify(
            MODEL, x, noise=noise.Gaussian(0.25), key=KEY, n0=10, n=100, batch_size=64, mesh=mesh
        ),
        "estimate": nppr.estimate(MODEL, distributions.UniformBall(0.6), x, y, **how),
    }
    return {name: jax.tree.map(np.asarray, tree) for name, tree in found.items()}


def main(rank, folder):
    """Reads samples of its own, and writes what it measured of those of both."""
    x, y = parallel.joined((X[5 * rank : 5 + 6 * rank], Y[5 * rank : 5 + 6 * rank]))
    mesh = parallel.data_mesh()
    assert (mesh.size, jax.local_device_count()) == (8, 4)
    np.savez(folder / f"{rank}.npz", *jax.tree.leaves(measured(x, y, mesh)))


if __name__ == "__main__":
    main(RANK, FOLDER)
