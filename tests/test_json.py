"""The one language of JSON: ``docs/json.md`` has every key of every command, and no other."""

import argparse
import dataclasses
import functools
import json
import re
from pathlib import Path
from typing import ClassVar

import jax
import numpy as np
import pytest
from test_run import Here

from wdjax import ensembles, models
from wdjax.attacks import PGD
from wdjax.cli import audit_command, engines, game_command, main, parser
from wdjax.files import persist
from wdjax.image import FrankWolfe, NearestTransport, union
from wdjax.report import audited, page, summary
from wdjax.transductive import Fixed, digits, transfer
from wdjax.transductive.digits import DigitsCase, Row

PAGE = (Path(__file__).parents[1] / "docs" / "json.md").read_text()
SUBJECT = ["--model", "{in}/mlp.safetensors", "--data", "{in}/x.npz"]
BALL = ["--norm", "linf", "--eps", "0.2"]
COMMANDS = {
    "attack": [
        ["attack", *SUBJECT, *BALL, "--attacks", "pgd(steps=2),wda++", "--bfloat16"],
        ["attack", "--model", "json_fourier:stepped", "--data", "{in}/zero.npz", *BALL,
         "--attacks", "pgd(steps=2)"],
    ],
    "image-attack": [
        ["image-attack", *SUBJECT, "--k", "1,4", "--window", "3", "--radii", "{out}/r.npz"],
        ["image-attack", *SUBJECT, "--k", "1,4", "--window", "3", "--samples", "2", "--natural",
         "--attack", "sinkhorn(growing=true, steps=3)"],
    ],
    "certify": [
        ["certify", *SUBJECT, *BALL, "--method", "bab", "--seconds", "0.1", "--steps", "1"],
        ["certify", *SUBJECT, *BALL, "--seconds", "0.1", "--steps", "1"],
        ["certify", *SUBJECT, *BALL, "--method", "lipschitz"],
        ["certify", *SUBJECT, "--norm", "l2", "--eps", "0.05", "--method", "smoothing",
         "--sigma", "0.1", "--votes", "300"],
    ],
    "nppr": [
        ["nppr", *SUBJECT, *BALL, "--steps", "2", "--draws", "20", "--latent", "2",
         "--components", "2", "--mode", "label", "--rare", "1"],
    ],
    "audit": [
        ["audit", "--samples", "4"],
        ["audit", "--model", "json_fourier:build", "--data", "{in}/x.npz", "--eps-list", "0.1",
         "--samples", "3"],
        ["audit", "--model", "json_fourier:stepped", "--data", "{in}/zero.npz", "--eps-list", "0.1",
         "--samples", "3"],
    ],
    "game": [
        ["game", "--defense", "tiny", "--draws", "2"],
        ["game", *SUBJECT, "--eps", "0.05", "--attacks", "transfer", "--draws", "2"],
    ],
    "table": [
        ["table", "wang2025-table3-cifar10", *SUBJECT, "--quick", "--seeds", "0,1"],
    ],
    "verify": [["verify", "--instances", "{in}/instances.csv", "--proof", "{out}/proofs"]],
    "run": [["run", "{in}/jobs.toml", "--out", "{out}/run"]],
}  # fmt: skip
"""Every command that writes JSON, small, and so often that every key occurs."""


JOBS = """
[models.mlp]
model = "mlp.safetensors"
[data.x]
data = "x.npz"
[threats.linf]
norm = "linf"
eps = 0.2
[methods.weak]
command = "attack"
attacks = "pgd(steps=2)"
"""

FOURIER = """
import jax.numpy as jnp, wdjax

def apply(weights, x):
    return jnp.fft.rfft(x.reshape(len(x), -1)).real @ weights

def step(weights, x):
    return jnp.round(4 * apply(weights, x) / 9)

stepped = lambda: wdjax.Model(step, jnp.eye(9, 3))
build = lambda: wdjax.Model(apply, jnp.eye(9, 3))
"""
"""A model with a primitive that no certificate knows, and one without gradients."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Screened(Fixed):
    """A net that does not adapt, and rejects inputs of which it is unsure."""

    rejects: ClassVar[bool] = True

    def predict(self, memory, adapted, x):
        logits = super().predict(memory, adapted, x)
        return logits, -logits.max(-1)


def tiny(given):
    """A game of one turn."""
    net = models.mlp((64, 10), key=given.key)
    return DigitsCase(
        lambda: Screened(net), 0.1, None, 6, {"transfer": Row(transfer(PGD(steps=1)))}
    )


def properties(folder):
    """A list of properties of ``x - relu(x)`` that are violated, proved, open, and missing."""
    from onnx import TensorProto, helper, save

    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, 1]) for n in "xy"]
    nodes = [helper.make_node("Relu", ["x"], ["r"]), helper.make_node("Sub", ["x", "r"], ["y"])]
    graph = helper.make_graph(nodes, "net", ends[:1], ends[1:])
    opset = [helper.make_opsetid("", 17)]
    save(helper.make_model(graph, opset_imports=opset, ir_version=9), folder / "net.onnx")
    box = "(declare-const X_0 Real)(declare-const Y_0 Real)(assert (>= X_0 -1))(assert (<= X_0 1))"
    cases = {"sat": "(<= Y_0 -0.5)", "unsat": "(>= Y_0 3)", "open": "(>= Y_0 1e-9)"}
    for name, forbidden in cases.items():
        (folder / f"{name}.vnnlib").write_text(f"{box}(assert {forbidden})")
    rows = [f"net.onnx,{name}.vnnlib,{0.001 if name == 'open' else 60}" for name in cases]
    (folder / "instances.csv").write_text("\n".join([*rows, "net.onnx,none.vnnlib,1"]))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """What every command wrote, by command; each wrote something twice or more where it can."""
    folder = tmp_path_factory.mktemp("json")
    net = models.mlp((16, 8, 3), key=jax.random.key(0))
    architecture = {"family": "mlp", "options": {"sizes": [16, 8, 3]}, "normalize": ""}
    persist.save_model(folder / "mlp.safetensors", net, architecture)
    x = np.random.default_rng(0).uniform(0, 1, (8, 4, 4, 1)).astype(np.float32)
    np.savez(folder / "x.npz", x=x, y=np.asarray(net(x)).argmax(-1))
    np.savez(folder / "zero.npz", x=x, y=np.zeros(8, int))
    (folder / "json_fourier.py").write_text(FOURIER)
    (folder / "jobs.toml").write_text(JOBS)
    properties(folder)
    recipe = audit_command.Recipe(epochs=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(engines, "Child", Here)
        patch.setattr(audit_command, "RECIPES", {"standard training": recipe})
        patch.setattr(audit_command, "EPS_LIST", (0.0, 0.02))
        patch.setattr(audit_command, "SIZES", (64, 8, 10))
        patch.setattr(audited, "figures", lambda *of: {})
        patch.setattr(page, "pictures", lambda *of: [])
        patch.setattr(union, "members", lambda ball: ((FrankWolfe(ball, steps=2), 1.0),))
        patch.setattr(union, "NearestTransport", functools.partial(NearestTransport, steps=3))
        patch.setattr(ensembles, "fast", functools.partial(ensembles.fast, passes=12))
        patch.setitem(digits.CASES, "tiny", tiny)
        patch.setitem(game_command.FAMILIES, "tiny", ("tiny",))
        found = {}
        for command, runs in COMMANDS.items():
            for number, words in enumerate(runs):
                out = folder / f"{command}-{number}"
                place = ["--out", str(out)] if command == "audit" else ["--json", str(out)]
                words = [word.format(**{"in": folder, "out": folder}) for word in words]
                assert main([*words, *place, "--quiet"]) == 0, words
                file = out / "report.json" if command == "audit" else out
                found.setdefault(command, []).append(json.loads(file.read_text()))
        yield found


def table():
    """The rows of the page: key, meaning, unit, commands."""
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \| (.+?) \|$", PAGE, re.MULTILINE)
    return {key: (meaning, unit, commands.split(", ")) for key, meaning, unit, commands in rows}


def keys(content):
    """Every key with its value; names in a map "by ..." and in settings are no keys."""
    if isinstance(content, list):
        for part in content:
            yield from keys(part)
    if isinstance(content, dict):
        for key, value in content.items():
            yield key, value
            unit = table().get(key, ("", "", []))[1]
            if re.search(r"\bby \w+$", unit):
                value = [*value.values()] if isinstance(value, dict) else value
            if not unit.startswith("settings"):
                yield from keys(value)


def numbers(value):
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, list):
        return [leaf for part in value for leaf in numbers(part)]
    return [value]


def said_of(contents):
    """Every key in some results, with all of its values."""
    found = {}
    for content in contents:
        for key, value in keys(content):
            found.setdefault(key, []).append(value)
    return found


def commands():
    """The commands that write JSON."""
    (found,) = (a for a in parser()._actions if isinstance(a, argparse._SubParsersAction))
    writes = {"json", "compare"}
    return {
        name
        for name, its in found.choices.items()
        if writes & {action.dest for action in its._actions}
    }


def test_every_command_is_held_to_the_page():
    assert set(COMMANDS) == commands()


def test_the_page_has_every_key_and_every_key_is_written(written):
    rows = table()
    assert len(rows) == len(re.findall(r"^\| `", PAGE, re.MULTILINE)), "a key is there twice"
    found = {(key, name) for name, contents in written.items() for key in said_of(contents)}
    told = {
        (key, name)
        for key, (_, _, where) in rows.items()
        for name in (COMMANDS if where == ["all"] else where)
    }
    assert found - told == set(), "written, and not on the page"
    assert told - found == set(), "on the page, and not written"


def test_what_every_json_begins_with(written):
    for name, contents in written.items():
        for content in contents:
            assert [*content][:3] == ["schema", "command", "versions"]
            assert content["schema"] == summary.SCHEMA
            assert content["command"] == name
            assert content["versions"] == summary.versions()
            assert {"data", "remarks", "seconds", "compile_seconds"} <= content.keys()
            assert 0 <= content["compile_seconds"] <= content["seconds"]
    assert f"`{summary.SCHEMA}`" in PAGE


def test_a_key_means_one_thing(written):
    """One kind of number or text in all commands; shares lie in [0, 1]."""
    rows = table()
    for key, values in said_of([one for contents in written.values() for one in contents]).items():
        _, unit, _ = rows[key]
        if unit.startswith(("by ", "settings")) or unit in ("object", "list"):
            continue
        own = [one for one in numbers(values) if one is not None]
        kinds = {bool if isinstance(one, bool) else type(one) for one in own}
        assert kinds <= {int, float} or len(kinds) <= 1, (key, kinds)
        if "share" in unit or "accurac" in key or unit == "probability":
            assert all(0 <= one <= 1 for one in own), key
        if unit in ("count", "index", "integer"):
            assert kinds <= {int}, key
        if unit == "text":
            assert kinds <= {str}, key
