"""How a search scales: over devices, parts, samples and models; and whether its numbers stay.

    python bench/scale.py [devices] [parts] [samples] [models] [numbers] [--quick]

All five by default. CPU seconds of the process, since virtual devices share the machine's cores: an
efficiency of 1 means that splitting costs no work. ``numbers`` compares each method on one device
with eight, with two processes of four each, and a command with its five parts, merged.
"""

import argparse
import functools
import json
import os
import pickle
import resource
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + f" --xla_force_host_platform_device_count={4 if '--worker' in sys.argv else 8}"
)

import jax
import jax.numpy as jnp
import numpy as np

import wdjax
from wdjax import Lp, attacks, certify, ensembles, image, models, nppr, parallel, smoothing
from wdjax.cli import main as command
from wdjax.files import persist
from wdjax.nppr import distributions
from wdjax.smoothing import noise
from wdjax.transductive import Fixed, gmsa_avg, play

if "--worker" in sys.argv:  # Before any array is made.
    PORT, _, RANK = sys.argv[-3:]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{PORT}", 2, int(RANK))

KEY = jax.random.key(0)


def net(*sizes, key=KEY):
    return models.mlp(sizes, key=key)


def samples(model, n, size):
    x = np.asarray(jax.random.uniform(KEY, (n, size)))
    return x, np.asarray(jnp.argmax(jax.jit(model)(x), -1))


def taken(work):
    """CPU and wall seconds of the second of two runs: the first compiles."""
    work()
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - cpu, time.perf_counter() - wall


def devices(quick):
    """One search on 1 to 8 devices; and the time of a round whose model costs nothing."""
    print("devices   CPU s   efficiency   ms a round of a small model")
    wide, small = net(784, 256, 10), net(4, 2)
    x, y = samples(wide, 256 if quick else 4096, 784)
    a, b = samples(small, 64, 4)
    first, steps = None, 10 if quick else 40
    for count in (1, 2, 4, 8):
        mesh = None if count == 1 else parallel.data_mesh(jax.devices()[:count])
        pgd, how = attacks.PGD(steps=steps), {"mesh": mesh, "diagnose": False}
        cpu, _ = taken(lambda: wdjax.search(pgd, wide, x, y, eps=0.01, batch_size=1024, **how))
        long, rounds = attacks.WPGD(steps=steps), steps
        _, wall = taken(lambda: wdjax.search(long, small, a, b, eps=1e-6, **how))
        first = first or cpu
        print(f"{count:7}  {cpu:6.2f}   {first / cpu:10.2f}   {1e3 * wall / rounds:.2f}")


def parts(quick):
    """A command in 1 to 16 parts, each a process of its own, one after another."""
    print("parts   CPU s in all   a part   merge")
    with tempfile.TemporaryDirectory() as folder:
        x, y = samples(net(64, 32, 10), 64 if quick else 2048, 64)
        data, words = Path(folder, "data.npz"), [sys.executable, "-m", "wdjax"]
        np.savez(data, x=x.reshape(-1, 8, 8, 1), y=y)
        Path(folder, "own.py").write_text(
            "import jax\nfrom wdjax import models\n\n\ndef build():\n"
            "    return models.mlp((64, 32, 10), key=jax.random.key(0))\n"
        )
        # The machine's directory is not the model's.
        where = {"cwd": folder, "env": os.environ | {"PYTHONPATH": f"{Path.cwd()}:{folder}"}}

        def run(*said):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run([*words, *said], check=True, stdout=subprocess.DEVNULL, **where)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

        for count in (1, 2) if quick else (1, 2, 4, 8, 16):
            said = ["attack", "--model", "own:build", "--data", str(data), "--eps", "0.05"]
            said += ["--norm", "linf", "--attacks", "apgd-ce", "--json", f"{count}.json"]
            each = [run(*said, "--shard", f"{i + 1}/{count}") for i in range(count)]
            files = sorted(map(str, Path(folder).glob(f"{count}.json.*-of-{count}.safetensors")))
            merged = run("merge", *files, "--model", "own:build")
            print(f"{count:5}   {sum(each):12.1f}   {sum(each) / count:6.1f}   {merged:5.1f}")


def many_samples(quick):
    """Time and memory from 10^2 to 10^5 samples; a slope of 1 is linear."""
    print("samples   CPU s   peak MB")
    model, rows = net(784, 64, 10), []
    for n in (100, 1000) if quick else (100, 1000, 10_000, 100_000):
        x, y = samples(model, n, 784)
        how = {"eps": 0.01, "diagnose": False, "batch_size": 100}
        began = time.process_time()
        wdjax.search(attacks.PGD(steps=10), model, x, y, **how)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        rows.append((n, time.process_time() - began, peak))
        print(f"{n:7}  {rows[-1][1]:6.2f}   {peak / 2**20:7.0f}")
    (m, slow, low), (n, long, high) = rows[-2:]
    slope = np.log(long / slow) / np.log(n / m)
    each = (high - low) / (n - m)
    print(f"slope of the time {slope:.2f}; {each:.0f} bytes a sample, which itself has {4 * 784}")


def many_models(quick):
    """One search of 1 to 64 stacked models by vmap."""
    print("models   CPU s   CPU s a model")
    x, y = samples(net(64, 32, 10), 64, 64)

    def search(model):
        return wdjax.search(attacks.PGD(steps=10), model, x, y, eps=0.05).success

    for count in (1, 4) if quick else (1, 4, 16, 64):
        stacked = jax.vmap(lambda key: net(64, 32, 10, key=key))(jax.random.split(KEY, count))
        many = jax.jit(jax.vmap(search))
        cpu, _ = taken(lambda: jax.block_until_ready(many(stacked)))
        print(f"{count:6}  {cpu:6.3f}   {cpu / count:13.4f}")


def methods(quick):
    """By name, what is measured with a mesh, a tree of arrays; and the same as a command."""
    model = net(16, 12, 4)
    x, y = samples(model, 13, 16)
    moved = image.FrankWolfe(image.ImageWasserstein(window=3), steps=5)
    pixels = x.reshape(-1, 4, 4, 1)
    pgd, l2 = attacks.PGD(steps=5, random_start=True), Lp(2)
    family = nppr.Family(mode="label", components=2, upsample="none")
    schedule = nppr.Schedule(steps=5, batch=8, draws=8)
    votes = {"noise": noise.Gaussian(0.25), "n0": 10, "n": 200, "batch_size": 64}
    keyed = {"key": KEY, "eps": 0.1}
    balls, game = distributions.UniformBall(0.2), gmsa_avg(pgd, iterations=2)
    played = {"memory": (), "size": 8, "draws": 1, **keyed}

    def run(attack, **how):
        return lambda mesh: wdjax.run(attack, model, x, y, eps=0.1, key=KEY, mesh=mesh, **how)

    def proved(method):
        how = {"norm": jnp.inf, "eps": 0.03, "method": method}
        return lambda mesh: certify.certified(model, x, y, mesh=mesh, **how)

    def ensemble(name):
        def attack(mesh):
            found = getattr(ensembles, name)(model, x, y, ball=l2, eps=0.3, key=KEY, mesh=mesh)
            return getattr(found, "found", found)  # `fast` returns an account.

        return attack

    attack = "attack --norm l2 --eps 0.1 --points own.npz --batch-size 2 --attacks"
    proof = "certify --norm linf --eps 0.03 --radii own.npz --batch-size 2 --method"
    fit = "nppr --norm linf --eps 0.1 --mode label --components 2 --latent 4 --steps 5 --draws 64"
    found = {
        "wda": (run(attacks.WDA(l2, steps=5, probe=3), kappa=2.0), f"{attack} wda"),
        "wda++": (run(attacks.WDAPlusPlus(l2, steps=8)), f"{attack} wda++"),
        "wpgd": (run(attacks.WPGD(l2, steps=6)), f"{attack} wpgd"),
        "crown": (proved("crown"), f"{proof} crown"),
        "bab (verdicts)": (proved("bab"), f"{proof} bab"),
        "smoothing": (
            lambda mesh: smoothing.certify(model, x, y, key=KEY, mesh=mesh, **votes),
            "certify --norm l2 --eps 0.1 --method smoothing --sigma 0.25 --votes 200 --n0 10",
        ),
        "nppr fit": (
            lambda mesh: (
                nppr.fit(model, x, y, family=family, schedule=schedule, mesh=mesh, **keyed).history
            ),
            fit,
        ),
        "nppr estimate": (
            lambda mesh: nppr.estimate(model, balls, x, y, key=KEY, draws=100, mesh=mesh).survived,
            fit,
        ),
        "image attack": (
            lambda mesh: wdjax.search(moved, model, pixels, y, eps=0.05, mesh=mesh),
            "image-attack --k 0.5 --window 3 --attack frank-wolfe(steps=5) --points own.npz "
            "--batch-size 2",
        ),
        "game": (
            lambda mesh: vars(play(Fixed(model), game, x[:8], y[:8], mesh=mesh, **played)),
            "game --defense purify --eps 0.1 --samples 8 --iterations 2",
        ),
    }
    long = ("autoattack", "fast", "wda_star") if not quick else ()
    return found | {name: (ensemble(name), f"{attack} {name.replace('_', '-')}") for name in long}


def numbers(quick):
    """The largest difference from one device, of eight, of two processes of four, and of 5 parts.

    Times and what depends on them are not compared.
    """
    print("largest difference from one device; = if counts and decisions are equal")
    print("method                8 devices        2 x 4      5 parts")
    found = methods(quick)
    with tempfile.TemporaryDirectory() as folder:
        others = in_two_processes(folder, quick)
        merged = in_parts(folder, {name: line for name, (_, line) in found.items()})
        for name, (measure, _) in found.items():
            one, eight = (jax.tree.leaves(measure(m)) for m in (None, parallel.data_mesh()))
            two = [apart(one, other[name]) for other in others]
            shown = [
                apart(one, eight),
                max(two, key=lambda pair: (not pair[1], pair[0])),
                apart(*merged[name]),
            ]
            cells = (f"{far:9.1e} {'=' if same else 'DIFFER'}" for far, same in shown)
            print(f"{name:18}", *cells, sep="  ", flush=True)


def apart(one, other):
    """The largest difference of two lists of leaves, and whether all that is no float is equal."""
    far, same = 0.0, len(one) == len(other)
    for a, b in zip(one, other):
        a, b = np.asarray(a), np.asarray(b)
        if a.dtype.kind == "f":
            finite = np.isfinite(a)
            same &= np.array_equal(finite, np.isfinite(b))
            far = max(far, float(np.abs(a[finite] - b[finite]).max(initial=0)))
        else:
            same &= np.array_equal(a, b)
    return far, bool(same)


def in_two_processes(folder, quick):
    """For each of two processes of four devices: by name, the leaves of what it measured."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    words = [sys.executable, __file__, *["--quick"] * quick, "--worker", port, folder]
    started = [subprocess.Popen([*words, str(rank)]) for rank in range(2)]
    for process in started:
        assert process.wait() == 0
    return [pickle.loads(Path(folder, f"{rank}.pickle").read_bytes()) for rank in range(2)]


def worker(folder, rank, quick):
    """One of two processes."""
    mesh = parallel.data_mesh()
    found = {
        name: [*map(np.asarray, jax.tree.leaves(measure(mesh)))]
        for name, (measure, _) in methods(quick).items()
    }
    Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(found))


def in_parts(folder, lines):
    """By name, the leaves of what a command wrote as a whole, and as five parts merged."""
    model = net(16, 12, 4)
    x, y = samples(model, 13, 16)
    os.chdir(folder)
    architecture = {"family": "mlp", "options": {"sizes": [16, 12, 4]}, "normalize": ""}
    persist.save_model("own.safetensors", model, architecture)
    np.savez("data.npz", x=x.reshape(-1, 4, 4, 1), y=y)

    @functools.cache
    def whole_and_merged(line):
        words = [*shlex.split(line), "--model", "own.safetensors", "--data", "data.npz", "--quiet"]
        assert command([*words, "--json", "whole.json"]) == 0
        whole = written("whole.json")
        for number in range(1, 6):
            assert command([*words, "--json", "part.json", "--shard", f"{number}/5"]) == 0
        assert command(["merge", *map(str, Path().glob("part.json.*")), "--quiet"]) == 0
        return whole, written("part.json")

    return {name: whole_and_merged(line) for name, line in lines.items()}


def written(path):
    """The leaves of a command's JSON, but times, and of the arrays beside it."""
    kept, own = json.loads(Path(path).read_text()), Path("own.npz")
    arrays = dict(np.load(own)) if own.exists() else {}
    own.unlink(missing_ok=True)
    leaves = jax.tree_util.tree_leaves_with_path((kept, arrays))
    times = ("seconds", "cost_multiple")
    return [leaf for place, leaf in leaves if not str(place[-1]).strip("[]'").endswith(times)]


WHAT = {
    "devices": devices,
    "parts": parts,
    "samples": many_samples,
    "models": many_models,
    "numbers": numbers,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="*", choices=[*WHAT, []], help="all by default")
    parser.add_argument("--quick", action="store_true", help="the smallest sizes: does it run?")
    parser.add_argument("--worker", nargs=3, metavar=("PORT", "FOLDER", "RANK"), help="for itself")
    parsed = parser.parse_args()
    if parsed.worker:
        return worker(*parsed.worker[1:], parsed.quick)
    for name in parsed.what or WHAT:
        WHAT[name](parsed.quick)
        print()


if __name__ == "__main__":
    main()
