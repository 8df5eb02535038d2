"""The same numbers on one device, on eight, and in two processes of four devices each."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import many_devices
import numpy as np
import pytest
from many_devices import KEY, MODEL, X, Y

import wdjax
from wdjax import attacks, certify, lipschitz, nppr, parallel, transductive

TWO = parallel.data_mesh(jax.devices()[:2])


@pytest.fixture(scope="module")
def alone():
    return many_devices.measured(X, Y, None)


@pytest.fixture(scope="module")
def eight():
    return many_devices.measured(X, Y, parallel.data_mesh())


def same(one, other):
    """Counts and decisions are equal, and numbers up to the rounding of another batch, relative to
    the largest of an array: margins are differences of logits."""
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if np.issubdtype(a.dtype, np.floating):
            size = np.max(np.abs(a), initial=1.0, where=np.isfinite(a))
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6 * size)
        else:
            np.testing.assert_array_equal(a, b)


def test_one_device_and_eight(alone, eight):
    for name, found in alone.items():
        same(found, eight[name])


def ended(folder, *fatal):
    """Two processes of four devices: how they ended, and what they said."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=4")
    command = [sys.executable, many_devices.__file__]
    started = [
        subprocess.Popen(
            [*command, str(rank), port, str(folder), *fatal],
            env=os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": str(Path(__file__).parents[1])},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=300)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    return [process.returncode for process in started], said


def test_two_processes_of_four_devices(eight, tmp_path):
    """Each has read its own samples; both get the results of all; process 0 alone writes.

    Before, one is told to end, and one dies; both begin again, and the search goes on.
    """
    assert ended(tmp_path, "SIGTERM")[0] == [143, 143]
    codes, said = ended(tmp_path, "SIGKILL")
    assert codes[1] == -signal.SIGKILL
    assert codes[0] not in (0, None)
    assert "another process of this mesh has ended" in said[0]
    codes, said = ended(tmp_path)
    assert codes == [0, 0], said
    wanted = eight | {"kept": wdjax.search(many_devices.LONG, MODEL, X, Y, eps=0.1)}
    for rank in range(2):
        with np.load(tmp_path / f"{rank}.npz") as found:
            same(jax.tree.leaves(jax.device_get(wanted)), [*found.values()])


def test_samples_of_what_the_host_directs_are_shared_out_to_devices():
    """Every item runs on one device, by the program of one device."""
    seen = parallel.each(lambda device: lambda item: (device.id, jnp.zeros(1).device), 9, TWO)
    assert all(place.id == own for own, place in seen)
    x, y = X[:4], Y[:4]
    for method, measure in (("bab", certify.margin_bounds), ("sdp", lipschitz.local_lipschitz)):
        how = {"norm": jnp.inf, "eps": 0.1, "method": method, "batch_size": 2}
        one, two = (measure(MODEL, x, y, mesh=mesh, **how) for mesh in (None, TWO))
        same(one, two)
    with pytest.raises(ZeroDivisionError):
        parallel.each(lambda device: lambda item: 1 / item, 3, TWO)


@pytest.mark.usefixtures("eight_devices")
def test_rounds_of_a_game_that_do_not_divide_are_refused():
    attack, how = transductive.transfer(attacks.PGD()), {"memory": (), "eps": 0.2, "key": KEY}
    with pytest.raises(ValueError, match="multiple of the 2 devices"):
        transductive.play(many_devices.DEFENSE, attack, X[:9], Y[:9], mesh=TWO, size=3, **how)


@pytest.mark.usefixtures("eight_devices")
@pytest.mark.parametrize(
    ("batch", "named"),
    [(64, "correctly classified inputs .* got 3"), (3, "schedule's batch .* got 3")],
)
def test_a_fit_names_what_does_not_divide(batch, named):
    x, y = X[:4], np.where(np.arange(4) < 3, Y[:4], (Y[:4] + 1) % 3)
    how = {"family": nppr.Family(mode="label"), "schedule": nppr.Schedule(batch=batch)}
    with pytest.raises(ValueError, match=named):
        nppr.fit(MODEL, x, y, eps=0.1, key=KEY, mesh=TWO, **how)
