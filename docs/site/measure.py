"""The measured tables of *Which attack* and *Which certificate*: ``python docs/site/measure.py``.

Every row is measured on one small net, that of the README, and written between the markers of the
pages. Seconds are process times on the machine that is named below the tables.
"""

import functools
import os
import platform
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault(
    "XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
)

import jax
import numpy as np

import wdjax
from wdjax import attacks, certify, data, ensembles, lipschitz, models, training

DOCS = Path(__file__).parents[1]
TIME = "milliseconds an image, seconds of the first call"
EPS, AVERAGE, KEY = 0.08, 0.03, jax.random.key(2)


def net() -> tuple[wdjax.Model, Any, Any]:
    """The README's net, and 100 test images with their labels."""
    train, test = data.digits()
    plain = models.mlp((64, 32, 10), key=jax.random.key(0))
    pgd = attacks.PGD(steps=5, iterate="last")
    model = training.train(plain, *train, key=jax.random.key(1), attack=pgd, eps=0.1).model
    return model, *test.take(100)


def timed(function: Callable[[], Any]) -> tuple[Any, float, float]:
    """The result, seconds of the first call, and of the second, which compiles nothing."""
    spent = []
    for _ in range(2):
        began = time.process_time()
        result = jax.block_until_ready(function())
        spent.append(time.process_time() - began)
    return result, *spent


def searches(model: wdjax.Model, x: Any, y: Any) -> dict[str, tuple[bool, Callable[[], Any]]]:
    """What to measure: whether it finds nearest flips, and the search."""
    search = functools.partial(wdjax.search, model=model, x=x, y=y)
    inside = functools.partial(search, eps=EPS)
    whole = {"model": model, "x": x, "y": y, "key": KEY}
    return {
        "`fgsm()`": (False, lambda: inside(attacks.fgsm())),
        "`PGD()`": (False, lambda: inside(attacks.PGD())),
        "`WDA()`": (False, lambda: inside(attacks.WDA())),
        "`APGD()`": (False, lambda: inside(attacks.APGD(), key=KEY)),
        "`Square(queries=1000)`": (False, lambda: inside(attacks.Square(queries=1000), key=KEY)),
        "`ensembles.fast`": (False, lambda: ensembles.fast(**whole, eps=EPS)[0]),
        "`ensembles.autoattack`": (False, lambda: ensembles.autoattack(**whole, eps=EPS)),
        "`DeepFool()`": (True, lambda: search(attacks.DeepFool())),
        "`FMN()`": (True, lambda: search(attacks.FMN())),
        "`FAB()`": (True, lambda: search(attacks.FAB(), key=KEY)),
        "`WDAPlusPlus()`": (True, lambda: search(attacks.WDAPlusPlus())),
        "`Walk()`": (True, lambda: search(attacks.Walk())),
        "`ensembles.wda_star`": (True, lambda: ensembles.wda_star(**whole)),
    }


def attack_rows(model: wdjax.Model, x: Any, y: Any) -> list[str]:
    rows = [
        f"| attack | finds | accuracy within {EPS:g} | average budget {AVERAGE:g} "
        f"| median distance | passes an image | {TIME} |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, (nearest, function) in searches(model, x, y).items():
        found, first, again = timed(function)
        print(name, flush=True)
        flipped = np.asarray(found.success)  # Measured within the ball, if the search had a radius.
        flipped = flipped & (np.asarray(found.cost) <= EPS) if nearest else flipped
        within = float(np.mean(np.asarray(found.correct) & ~flipped))
        cells = ["—", "—"]
        if nearest:
            distance = np.where(found.success, found.cost, np.inf)
            average = float(wdjax.spend(found, eps=AVERAGE, order=1).accuracy)
            cells = [f"{average:.3f}", f"{np.median(distance[found.correct]):.4f}"]
        passes = float(np.mean(np.asarray(found.passes)[np.asarray(found.correct)]))
        kind = "nearest flips" if nearest else "a point within eps"
        rows += [
            f"| {name} | {kind} | {within:.2f} | {cells[0]} | {cells[1]} | {passes:.0f} "
            f"| {10 * again:.1f}, {first:.0f} |"
        ]
    return rows


def certificate_rows(model: wdjax.Model, x: Any, y: Any) -> list[str]:
    rows = [
        f"| certificate | verified within {EPS:g} | {TIME} |",
        "|---|---|---|",
    ]
    calls: dict[str, Callable[[], Any]] = {}
    for method in ("interval", "crown", "auto", "alpha", "bab"):
        how = {"norm": np.inf, "eps": EPS, "steps": 0, "seconds": 10}
        prove = functools.partial(certify.verify, model, x, y, method=method, **how)
        calls[f'`certify.verify(method="{method}")`'] = prove
    for method in ("interval", "sdp"):
        prove = functools.partial(
            lipschitz.verify, model, x, y, norm=np.inf, eps=EPS, method=method
        )
        calls[f'`lipschitz.verify(method="{method}")`'] = prove
    for name, function in calls.items():
        proof, first, again = timed(function)
        print(name, flush=True)
        rows += [
            f"| {name} | {np.sum(proof.verified)} of {len(y)} | {10 * again:.1f}, {first:.0f} |"
        ]
    return rows


def write(page: str, mark: str, rows: list[str]) -> None:
    """Replaces what stands between ``<!-- mark -->`` and the next comment."""
    path = DOCS / page
    machine = f"{platform.machine()}, one thread, JAX {jax.__version__}, wdjax {wdjax.__version__}"
    text = "\n".join([*rows, "", f"*{machine}; `python docs/site/measure.py`.*"])
    pattern = rf"(<!-- {mark} -->\n).*?(\n<!-- end -->)"
    after, count = re.subn(
        pattern, lambda found: found[1] + text + found[2], path.read_text("utf-8"), flags=re.DOTALL
    )
    if count != 1:
        raise ValueError(f"{page} must have one table <!-- {mark} -->, has {count}.")
    path.write_text(after, "utf-8")


def main() -> int:
    model, x, y = net()
    write("which_attack.md", "attacks", attack_rows(model, x, y))
    write("which_certificate.md", "certificates", certificate_rows(model, x, y))
    return 0


if __name__ == "__main__":
    sys.exit(main())
