"""Runs the short form of the benches and writes what they print to ``docs/results.md``.

    .venv-bench/bin/python bench/results.py [NAME ...]    # or `make bench`, which makes .venv-bench

Without names every section is measured anew, else those that are named; the others stay. A section
holds its command, the machine, the versions, the day, and the output as it is: good rows and bad.
"""

import datetime
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

HOME = Path(__file__).parents[1]
PAGE = HOME / "docs" / "results.md"
VERSIONS = "wdjax", "jax", "torch", "adv-lib", "torchattacks", "foolbox", "pyautoattack", "POT"

HEAD = """# Results

What the benches print, good rows and bad, each on the machine and with the versions that are named
below it. `make bench` measures every section anew; `python bench/results.py NAME` one of them. What
the columns mean stands at the head of each script in `bench/`; without the options that are given
here the same scripts print longer tables. What the papers report beside what runs here is on
[The papers](papers.md); attacks and certificates are compared on one small net on
[Which attack](which_attack.md) and [Which certificate](which_certificate.md).
"""


class Section(NamedTuple):
    """A title, what is to be seen, and the arguments of the bench that shows it."""

    title: str
    about: str
    command: str


SECTIONS = {
    "peers": Section(
        "Attacks beside adv-lib, torchattacks, foolbox and AutoAttack",
        "The same attacks with equal settings, in turn, on 24 images of the MNIST net: process "
        "seconds of both (`x`: theirs over ours), passes, the share that is left robust, and the "
        "median distance, measured by one function.",
        "peers.py --nets mnist --images 24 --norms 2 inf --repeats 1 --attacks pgd apgd-ce fab "
        "square deepfool ddn fmn alma autoattack",
    ),
    "passes": Section(
        "Attacks beside their bare passes and plain PyTorch",
        "How much longer a search takes than the gradients that it needs (`/ bare`), and PyTorch's "
        "time over ours (`x torch`).",
        "attacks.py --nets mlp wong_mnist resnet2b",
    ),
    "optimality": Section(
        "How near the nearest flips are",
        "AttackBench's optimality: 1 is the nearest flip that anybody found, by forward plus "
        "backward passes an image.",
        "optimality.py --settings resnet2b-linf mnist-l2 --attacks wda-star walk fmn ddn wda++ "
        "--queries 200 1000",
    ),
    "attackbench": Section(
        "Nearest flips at equal passes, image by image",
        "`wda_star` against the minimum-norm attacks of adv-lib, foolbox and torchattacks on six "
        "nets and 100 images: optimality (1 is the nearest flip that anybody found), mean "
        "distance, passes an image, and how many of ours are farther than the nearest of all "
        "rivals' flips, each rival with the whole budget. `farther` lists them: image, factor, "
        "rival. An hour.",
        "attackbench.py --losses",
    ),
    "transport": Section(
        "Exact transport beside POT",
        "Process seconds of exact Wasserstein distances between distributions, and between images, "
        "and how far they are from those of POT's network simplex.",
        "transport.py",
    ),
    "certificates": Section(
        "CROWN: what is verified, and what it costs",
        "Samples verified of the first 100, seconds an image, seconds to compile, memory; the bars "
        "are the counts of auto_LiRPA 0.7.1 (on PyTorch 2.13; the version on PyPI, 0.3, does not "
        "import with a PyTorch of today) and earlier times.",
        "certificates.py cost",
    ),
    "properties": Section(
        "Properties of VNN-COMP 2021",
        "Verdicts of `python -m wdjax verify` on properties that at least three of the "
        "competition's tools decided, within its time limits, and the medians of the published "
        "seconds of VeriNet (on CPUs) and alpha-beta-CROWN (on a GPU), with the number that they "
        "decided. `unsat`: the property holds; `unsat?`: tools disagreed. Our seconds include "
        "compilation, but one process ran them all; theirs include the start of the program. An "
        "hour.",
        "vnncomp.py --tools 3",
    ),
    "training": Section(
        "Certified training",
        "Per cent of held-back digits: right, left by an attack, and verified, by way of training.",
        "certified_training.py digits",
    ),
    "image": Section(
        "Attacks that move mass between pixels",
        "Robust accuracy beside its bar, and the cost of the points by exact transport in float64.",
        "image_wasserstein.py --parts strength honest --samples 10 --k 50",
    ),
    "transductive": Section(
        "Games against defences that adapt",
        "Accuracies of each defence by attack on digits; transfer overstates them.",
        "transductive.py table",
    ),
}


def measured(section: Section) -> str:
    """The section in Markdown, measured now."""
    begun = time.perf_counter()
    script, *options = section.command.split()
    done = subprocess.run(
        [sys.executable, HOME / "bench" / script, *options],
        cwd=HOME, env=os.environ | {"PYTHONPATH": str(HOME)}, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode > 1:  # 1: a bar was missed, which is a result.
        raise RuntimeError(f"{section.command} ended with {done.returncode}:\n{done.stderr}")
    found = []
    for name in VERSIONS:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{name} is not installed")
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    spent = f"{time.perf_counter() - begun:.0f} s in all"
    setting = f"{datetime.date.today()}; {machine}; {', '.join(found)}; {spent}."
    return (
        f"{section.about}\n\n```console\n$ python bench/{section.command}\n{done.stdout.rstrip()}\n"
        f"```\n\n*{setting}*"
    )


def main() -> None:
    names = sys.argv[1:] or list(SECTIONS)
    if unknown := set(names) - SECTIONS.keys():
        sys.exit(f"there is no {', '.join(sorted(unknown))}; choose among {', '.join(SECTIONS)}")
    old = PAGE.read_text() if PAGE.exists() else ""
    kept = dict(re.findall(r"^## ([^\n]*)\n\n(.*?)\n*(?=^## |\Z)", old, re.DOTALL | re.MULTILINE))
    for name in names:
        print(f"{name} ...", flush=True)
        kept[SECTIONS[name].title] = measured(SECTIONS[name])
        parts = [f"## {s.title}\n\n{kept[s.title]}" for s in SECTIONS.values() if s.title in kept]
        PAGE.write_text("\n\n".join([HEAD.rstrip(), *parts]) + "\n")


if __name__ == "__main__":
    main()
