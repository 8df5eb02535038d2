"""Process seconds to convert a full WRN-28-10, here and in another checkout by turns.

    python bench/convert.py OTHER_CHECKOUT

The file is written once with PyTorch, in RobustBench's layout: zip, or legacy with ``--legacy``.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

CHILD = """
import sys, time
import jax
from wdjax import convert

for _ in range(4):
    began = time.process_time()
    made = convert.load_robustbench("Carmon2019Unlabeled", "cifar10", "Linf", sys.argv[1])
    jax.block_until_ready(made.model)
    print(time.process_time() - began)
    del made
"""


def write(path, zipped):
    """A random WRN-28-10 with the names, shapes and order of the published file."""
    import numpy as np
    import torch

    from wdjax.models import zoo
    from wdjax.models.pytorch import slots

    rng, tensors = np.random.default_rng(0), {}
    entry = zoo.entry("Carmon2019Unlabeled", "cifar10", "Linf")
    for name, slot in slots(zoo.build(entry.family, entry.options)).items():
        value = rng.uniform(0.1, 0.9, slot.shape).astype(np.float32)
        for prefix in ("", "sub_") if name.startswith("block1.") else ("",):
            tensors[f"module.{prefix}{name}"] = torch.tensor(value)
            if name.endswith("running_mean"):
                counter = f"module.{prefix}{name.removesuffix('running_mean')}num_batches_tracked"
                tensors[counter] = torch.tensor(3)
    torch.save({"state_dict": tensors}, path, _use_new_zipfile_serialization=zipped)


def seconds(checkout, path):
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    command = [sys.executable, "-c", CHILD, path]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return min(map(float, ran.stdout.split()))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other", type=Path, help="the checkout to compare with")
    parser.add_argument("--legacy", action="store_true")
    parser.add_argument("--rounds", type=int, default=4)
    args = parser.parse_args()
    here = Path(__file__).parents[1]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "wrn.pt"
        write(path, not args.legacy)
        pairs = [(seconds(here, path), seconds(args.other, path)) for _ in range(args.rounds)]
    for ours, theirs in pairs:
        print(f"here {ours:.3f} s, there {theirs:.3f} s, ratio {ours / theirs:.3f}")
    print(f"median ratio {statistics.median(ours / theirs for ours, theirs in pairs):.3f}")
    least = [min(column) for column in zip(*pairs)]
    print(f"least: here {least[0]:.3f} s, there {least[1]:.3f} s, ratio {least[0] / least[1]:.3f}")


if __name__ == "__main__":
    main()
