"""How a search scales: over devices, parts, samples and models; and whether its numbers stay.

    python bench/scale.py [devices] [parts] [samples] [models] [numbers] [--quick]

All five by default. CPU seconds of the process, since virtual devices share the machine's cores: an
efficiency of 1 means that splitting costs no work. ``numbers`` compares each method on one device
and on eight.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import jax
import jax.numpy as jnp
import numpy as np

import wdjax
from wdjax import Lp, attacks, certify, ensembles, image, models, nppr, parallel, smoothing
from wdjax.nppr import distributions
from wdjax.smoothing import noise
from wdjax.transductive import Fixed, gmsa_avg, play

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
    """By name, what is measured with a mesh: a tree of arrays."""
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

    found = {
        "wda": run(attacks.WDA(l2, steps=5, probe=3), kappa=2.0),
        "wda++": run(attacks.WDAPlusPlus(l2, steps=8)),
        "wpgd": run(attacks.WPGD(l2, steps=6)),
        "crown": proved("crown"),
        "bab (verdicts)": proved("bab"),
        "smoothing": lambda mesh: smoothing.certify(model, x, y, key=KEY, mesh=mesh, **votes),
        "nppr fit": lambda mesh: (
            nppr.fit(model, x, y, family=family, schedule=schedule, mesh=mesh, **keyed).history
        ),
        "nppr estimate": lambda mesh: (
            nppr.estimate(model, balls, x, y, key=KEY, draws=100, mesh=mesh).survived
        ),
        "image attack": lambda mesh: wdjax.search(moved, model, pixels, y, eps=0.05, mesh=mesh),
        "game": lambda mesh: vars(play(Fixed(model), game, x[:8], y[:8], mesh=mesh, **played)),
    }
    if quick:
        return found
    for name in ("autoattack", "fast", "wda_star"):
        whole = getattr(ensembles, name)

        def ensemble(mesh, whole=whole):
            found = whole(model, x, y, ball=l2, eps=0.3, key=KEY, mesh=mesh)
            return getattr(found, "found", found)  # `fast` returns an account.

        found[name] = ensemble
    return found


def numbers(quick):
    """The largest difference between one device and eight, and whether all decisions agree."""
    print("method           largest difference   counts and decisions")
    for name, measure in methods(quick).items():
        one, eight = (jax.tree.leaves(measure(m)) for m in (None, parallel.data_mesh()))
        apart, same = 0.0, True
        for a, b in zip(one, eight, strict=True):
            a, b = np.asarray(a), np.asarray(b)
            if a.dtype.kind == "f":
                finite = np.isfinite(a)
                same &= np.array_equal(finite, np.isfinite(b))
                apart = max(apart, float(np.abs(a[finite] - b[finite]).max(initial=0)))
            else:
                same &= np.array_equal(a, b)
        print(f"{name:15}  {apart:18.1e}   {'equal' if same else 'DIFFER'}", flush=True)


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
    parsed = parser.parse_args()
    for name in parsed.what or WHAT:
        WHAT[name](parsed.quick)
        print()


if __name__ == "__main__":
    main()
