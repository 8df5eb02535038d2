"""Process seconds to convert a full WRN-28-10, here and in another checkout, by turns.

    python bench/convert.py OTHER_CHECKOUT

Both packages live in one process, so that a busy machine is equally busy for both. The file is
written once with PyTorch, in RobustBench's layout: zip, or legacy with ``--legacy``.
"""

import argparse
import importlib
import statistics
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

ENTRY = "Carmon2019Unlabeled", "cifar10", "Linf"


def package(checkout):
    """``wdjax.convert`` of a checkout, with modules of its own."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "wdjax"]:
        del sys.modules[name]
    sys.path.insert(0, str(checkout))
    try:
        return importlib.import_module("wdjax.convert")
    finally:
        sys.path.remove(str(checkout))


def write(convert, path, zipped):
    """A random WRN-28-10 with the names, shapes and order of the published file."""
    import torch

    rng, tensors = np.random.default_rng(0), {}
    entry = convert.zoo.entry(*ENTRY)
    for name, slot in convert.slots(convert.zoo.build(entry.family, entry.options)).items():
        value = rng.uniform(0.1, 0.9, slot.shape).astype(np.float32)
        for prefix in ("", "sub_") if name.startswith("block1.") else ("",):
            tensors[f"module.{prefix}{name}"] = torch.tensor(value)
            if name.endswith("running_mean"):
                counter = f"module.{prefix}{name.removesuffix('running_mean')}num_batches_tracked"
                tensors[counter] = torch.tensor(3)
    torch.save({"state_dict": tensors}, path, _use_new_zipfile_serialization=zipped)


def seconds(convert, path):
    began = time.process_time()
    jax.block_until_ready(convert.load_robustbench(*ENTRY, path).model)
    return time.process_time() - began


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other", type=Path, help="the checkout to compare with")
    parser.add_argument("--legacy", action="store_true")
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args()
    here = package(Path(__file__).parents[1])
    both = here, package(args.other)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "wrn.pt"
        write(here, path, not args.legacy)
        rows = [[seconds(convert, path) for convert in both] for _ in range(args.rounds + 2)][2:]
    ratios = [ours / theirs for ours, theirs in rows]
    ours, theirs = (statistics.median(column) for column in zip(*rows))
    print(
        f"here {ours:.3f} s, there {theirs:.3f} s; median of ratios {statistics.median(ratios):.3f}"
    )


if __name__ == "__main__":
    main()
