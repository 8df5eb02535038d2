"""Files made to do harm, or broken: each is refused by name, quickly, and leaves nothing behind."""

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import hostile_files
import jax
import numpy as np
import pytest

from wdjax.files import torch_file
from wdjax.models import convert

SHAPES = {"fc1.weight": (5, 4), "fc1.bias": (5,), "fc2.weight": (3, 5), "fc2.bias": (3,)}


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """All cases in one process of their own, which says at its end whether it is unharmed."""
    folder = tmp_path_factory.mktemp("hostile")
    script = Path(hostile_files.__file__)
    ran = subprocess.run(
        [sys.executable, script, folder], capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return json.loads(ran.stdout)


def test_every_case_is_a_value_error_that_names_the_fault(outcome):
    cases = hostile_files.cases()
    assert len(cases) >= 250
    assert len({case.name for case in cases}) == len(cases)
    wrong = {
        case.name: outcome["cases"][case.name]
        for case in cases
        if outcome["cases"][case.name]["kind"] != "ValueError"
        or not re.search(case.message, outcome["cases"][case.name]["said"])
    }
    assert wrong == {}


def test_no_case_costs_much_or_writes(outcome):
    for name, found in outcome["cases"].items():
        assert found["seconds"] < 2, name
        assert found["mb"] < 200, name
        assert found["written"] == [], name


def test_the_process_is_unharmed(outcome):
    assert outcome["unharmed"]


def valid(kind, seed):
    rng = np.random.default_rng(seed)
    values = {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
    body, stored = hostile_files.state_dict(SHAPES, values)
    return getattr(hostile_files, kind)(body, stored)


@pytest.mark.fast
@pytest.mark.parametrize("kind", ["zipped", "legacy"])
def test_valid_files_of_the_same_make_are_read(tmp_path, kind):
    path = tmp_path / "good.pt"
    path.write_bytes(valid(kind, 0))
    assert {name: value.shape for name, value in torch_file.read(path).items()} == SHAPES
    assert convert.load(path, "mlp").report.parameters == 43


@pytest.mark.parametrize("kind", ["zipped", "legacy"])
def test_a_thousand_random_mutations_each(tmp_path, kind):
    """Refused by a ValueError, or a model of exactly these shapes."""
    rng, path = np.random.default_rng(0), tmp_path / "mutated.pt"
    shapes = jax.tree.map(np.shape, convert.from_state_dict(*plain()).model.args[0])
    loaded = 0
    for seed in range(1000):
        content = bytearray(valid(kind, seed))
        for place in rng.integers(0, len(content), rng.integers(1, 4)):
            content[place] = rng.integers(256)
        if seed % 5 == 0:
            cut = rng.integers(0, len(content), 2)
            del content[min(cut) : max(cut)]
        path.write_bytes(content)
        try:
            model = convert.load(path, "mlp", sizes=(4, 5, 3)).model
        except ValueError:
            continue
        assert jax.tree.map(np.shape, model.args[0]) == shapes
        loaded += 1
    assert loaded < 900


def plain():
    from wdjax.models import MLP

    return MLP((4, 5, 3)), {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}


@pytest.mark.fast
def test_every_damaged_entry_of_an_archive_is_named(tmp_path):
    path, good = tmp_path / "damaged.pt", valid("zipped", 0)
    path.write_bytes(good)
    with zipfile.ZipFile(path) as archive:
        entries = {info.filename: archive.read(info) for info in archive.infolist()}
    for name, content in entries.items():
        place = good.index(content, good.index(name.encode()))
        path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        with pytest.raises(ValueError, match=f"CRC-32 for file '{re.escape(name)}'"):
            torch_file.read(path)


@pytest.mark.fast
@pytest.mark.parametrize("read", [torch_file.read, torch_file.read_safetensors])
def test_what_is_no_file_is_not_waited_for(tmp_path, read):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(ValueError, match="pass a file"):
            read(path)
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "absent")
