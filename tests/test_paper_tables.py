"""Tables of the papers: every one at toy size, its cells found in another way, and its numbers read
again in the papers."""

import argparse
import dataclasses
import functools
import json
import math
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from test_run import short

import wdjax
import wdjax.transductive as games
from wdjax import Lp, attacks, ensembles, image, models, nppr
from wdjax.cli import attack_table, game_command, main, printed, table_command
from wdjax.cli.paper_tables import SEED, TABLES
from wdjax.nppr import distributions
from wdjax.report import audit
from wdjax.transductive import PAPER
from wdjax.transductive.digits import Row

PAPERS = Path(wdjax.__file__).parents[2] / "shared" / "seeds"
PAGE = Path(wdjax.__file__).parents[1] / "docs" / "papers.md"
NEEDS = {"model": "weights", "data": "data", "train": "training data"}
FILES = {"le2025": "000", "wang2025": "001", "chen2022": "002", "hu2020": "004"}
BUILD = """
import jax
from wdjax import models

def build():
    return models.norm_mlp((16, 8, 3), key=jax.random.key(0))
"""
KINDS = {tuple(cell.line for cell in table.cells): name for name, table in TABLES.items()}
"""One table of each kind: others differ in the published numbers."""


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A small net with BatchNorm, whose answers are the labels of all images but one."""
    folder = tmp_path_factory.mktemp("tables")
    net = models.norm_mlp((16, 8, 3), key=jax.random.key(0))
    x = np.random.default_rng(0).uniform(0, 1, (8, 4, 4, 1)).astype(np.float32)
    y = np.asarray(net(x)).argmax(-1)
    y[0] = (y[0] + 1) % 3
    np.savez(folder / "x.npz", x=x, y=y)
    more = np.random.default_rng(1).uniform(0, 1, (140, 4, 4, 1)).astype(np.float32)
    np.savez(folder / "train.npz", x=more, y=np.asarray(net(more)).argmax(-1))
    (folder / "tables_net.py").write_text(BUILD)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name in ("autoattack", "a3", "a3-wda"):
            patch.setitem(attack_table.SEARCHES, name, ensemble)
        patch.setattr(ensembles, "autoattack", ensemble)
        patch.setitem(game_command.EXTRAS, "autoattack", Row(games.transfer(ensemble)))
        patch.setattr(ensembles, "fast", functools.partial(ensembles.fast, passes=12))
        for name in PAPER:
            patch.setitem(PAPER, name, brief(name, PAPER[name]))
        yield net, x, y


def ensemble(model, x, y, *, rivals=None, **how):
    """In place of ensembles, which take their time."""
    return short(model, x, y, **how)


def brief(name, preset):
    """A preset with two steps of every attack, and small nets where it trains some."""
    nets = {}
    if name.startswith(("dann", "tadv")):
        nets["network"] = models.network(models.NormMLP, sizes=(16, 8, 3))
    if name.startswith("dann"):
        nets["discriminator"] = models.network(models.MLP, sizes=(8, 4, 2))
    attacks = {
        label: dataclasses.replace(
            attack, inner=dataclasses.replace(attack.inner, steps=2), restarts=1,
            rivals=min(attack.rivals, 1),
        )
        for label, attack in preset.attacks.items()
    }  # fmt: skip

    def defense(**given):
        made = preset.defense(**nets, **given)
        if not hasattr(made, "attack"):
            return made
        return dataclasses.replace(made, attack=dataclasses.replace(made.attack, steps=2))

    return preset._replace(defense=defense, attacks=attacks)


def tabled(name, *more):
    """The JSON of a table, quick."""
    table = TABLES[name]
    places = {"model": "tables_net:build", "data": "x.npz", "train": "train.npz"}
    own = [f"--{need}={places[need]}" for need in table.needs]
    words = ["table", name, "--quick", *own, "--json", f"{name}.json", "--quiet", *more]
    assert main(words) == 0
    return json.loads(Path(f"{name}.json").read_text())


def attacked(attack, net, x, y, **how):
    """The accuracy that an attack leaves of four images."""
    return audit.accuracy(wdjax.run(attack, net, x[:4], y[:4], key=KEY, **how))


KEY = jax.random.key(0)
HELD = slice(4, 8)


def right(net, x, y):
    return float(np.mean(np.asarray(net(x)).argmax(-1) == y))


def uniform(net, x, y, eps):
    noise = distributions.UniformBall(eps, Lp(math.inf))
    return nppr.estimate(net, noise, x, y, key=jax.random.key(1), draws=20).value


def fitted(net, x, y):
    """NPPR of labels, by an up-sampler that is not learnt and three components."""
    family = nppr.Family(mode="label", components=3, latent=4, upsample="fixed")
    found = nppr.fit(
        net, x[:4], y[:4], eps=16 / 255, key=KEY, family=family,
        schedule=nppr.Schedule(steps=2), features=models.features(net), ball=Lp(math.inf),
    )  # fmt: skip
    return nppr.estimate(net, found, x[HELD], y[HELD], key=jax.random.key(1), draws=20).value


def sinkhorn(net, x, y, k, **how):
    """The share of two images that a growing radius breaks beyond k."""
    ball = image.ImageWasserstein(3)
    attack = image.SinkhornPGD(ball, growing=True, iterations=50, **how)
    found = wdjax.search(attack, net, x[:2], y[:2])
    radius = np.where(found.success, found.cost, np.inf)
    return float(np.mean(found.correct & (radius * 16 > k)))


def union(net, x, y):
    found = image.image_wasserstein(net, x[:2], y[:2], eps=5 / 16, ball=image.ImageWasserstein(3))
    return float(np.mean(found.correct & ~found.success))


def trained(net, x, y):
    """FPA against DANN, by the functions that a game is made of."""
    known = np.load("train.npz")
    preset = PAPER["dann-mnist"]
    defense = dataclasses.replace(preset.defense(), steps=2)
    attack = dataclasses.replace(preset.attacks["fpa"], iterations=2)
    memory = games.prepare(defense, known["x"], known["y"], key=jax.random.fold_in(KEY, 1))
    how = {"memory": memory, "eps": preset.eps, "draws": 1, "key": jax.random.fold_in(KEY, 2)}
    return games.play(defense, attack, x[:4], y[:4], **how).one_shot.value


def standing(net, x, y, eps=0.3):
    found = short(net, x[:4], y[:4], eps=eps, ball=Lp(math.inf), key=KEY)
    return float(np.mean(found.correct & ~found.success))


def shifted(net, x, y):
    return right(net, image.translate(x[:2], 0.2), y[:2])


def moved(x):
    return float(np.linalg.norm((image.rotate(x[:2], 20.0) - x[:2]).reshape(2, -1), axis=1).mean())


LINF, L2 = {"eps": 8 / 255}, {"eps": 0.5}
WDA, INF, TWO = attacks.WDA, Lp(math.inf), Lp(2)
OTHERWISE = {
    "le2025-table1-cifar10-linf": {
        ("clean", "here"): lambda *of: right(of[0], of[1][:4], of[2][:4]),
        ("omega_inf:wda", "here"): lambda *of: attacked(WDA(INF), *of, order=math.inf, **LINF),
    },
    "le2025-table1-cifar10-l2": {
        ("omega_1:wda++", "here"): lambda *of: attacked(attacks.WDAPlusPlus(TWO), *of, **L2),
    },
    "le2025-table1-cifar100": {
        ("omega_2:wda(kappa=2)", "here"): lambda *of: attacked(
            WDA(INF), *of, order=2, kappa=2.0, **LINF
        ),
    },
    "le2025-table1-imagenet": {
        ("omega_1:wda(kappa=2)", "here"): lambda *of: attacked(
            WDA(INF), *of, order=1, kappa=2.0, eps=4 / 255
        ),
    },
    "le2025-figure4a": {},
    "le2025-figure4b": {
        ("16/255", "wda++"): lambda *of: attacked(
            attacks.WDAPlusPlus(INF), *of, order=2, eps=16 / 255
        ),
    },
    "le2025-figure6a": {
        ("3", "wda"): lambda *of: attacked(WDA(TWO), *of, order=1, kappa=3.0, **L2),
    },
    "le2025-figure6b": {
        ("2", "wda"): lambda *of: attacked(WDA(INF), *of, order=1, kappa=2.0, **LINF),
    },
    "le2025-figure7a": {
        ("20", "step 0.2"): lambda *of: attacked(
            WDA(TWO, steps=20, probe=10, step_size=0.2), *of, order=1, kappa=1.0, **L2
        ),
    },
    "le2025-figure7b": {
        ("5", "step 0.01"): lambda *of: attacked(
            WDA(INF, steps=5, probe=5, step_size=0.01), *of, order=1, kappa=1.0, **LINF
        ),
    },
    "wang2025-table1": {("base, K=3", "Label NPPR"): fitted},
    "wang2025-table2": {
        ("PR uniform", "16/255"): lambda net, x, y: uniform(net, x[HELD], y[HELD], 16 / 255),
        ("PR uniform", "4/255"): lambda net, x, y: uniform(net, x[HELD], y[HELD], 4 / 255),
    },
    "wang2025-table3-tinyimagenet": {
        ("PR uniform", "here"): lambda net, x, y: uniform(net, x[HELD], y[HELD], 16 / 255),
        ("accuracy", "here"): lambda net, x, y: right(net, x[HELD], y[HELD]),
    },
    "wang2025-table5": {},
    "chen2022-figure1": {},
    "chen2022-table5": {("static, AA", "here"): lambda *of: standing(*of, eps=8 / 255)},
    "chen2022-table6-mnist": {("static, AA", "here"): standing,
                              ("static, clean", "here"): lambda *of: right(of[0], of[1][:4],
                                                                           of[2][:4])},
    "chen2022-table6-cifar10": {},
    "chen2022-table2": {
        ("static, AA", "here"): lambda *of: standing(*of, eps=8 / 255),
        ("static, clean", "here"): lambda net, x, y: right(net, x[:4], y[:4]),
    },
    "chen2022-table3-mnist": {("DANN, FPA", "here"): trained},
    "chen2022-table3-cifar10": {},
    "chen2022-table4-mnist": {},
    "chen2022-table4-cifar10": {},
    "hu2020-table1-cifar10": {("k 5", "here"): union},
    "hu2020-table2": {},
    "hu2020-table3-cifar10": {
        ("+ l2 descent", "k 5"): lambda *of: sinkhorn(*of, 5, steps=200, step_size=0.06),
        ("+ large step", "k 10"): lambda *of: sinkhorn(
            *of, 10, steps=200, step_size=0.04, direction="linf"
        ),
    },
    "hu2020-table4": {("translation 20 %", "here"): shifted},
    "hu2020-table5-cifar10": {},
    "hu2020-table6-cifar10": {("rotation 20", "l2"): lambda net, x, y: moved(x)},
}  # fmt: skip
"""Cells of each kind of table, by functions of the library that are called directly."""


@pytest.mark.parametrize("name", KINDS.values())
def test_a_table_says_what_its_functions_say(given, name):
    content = tabled(name)
    cells = {(cell["row"], cell["column"]): cell for cell in content["cells"]}
    table = TABLES[name]
    left = list(dict.fromkeys(cell.row for cell in table.cells))[: table.first]
    assert list(dict.fromkeys(row for row, _ in cells)) == left
    values = [cell["measured"] for cell in content["cells"]]
    assert all(value is None or (math.isfinite(value) and value >= 0) for value in values)
    assert sum(value is not None for value in values) >= len(values) / 2
    for cell, kind in zip(content["cells"], table.cells):
        assert cell["unit"] == kind.unit
        numbers = [cell["measured"], *cell["by_seed"], *cell["published"].values()]
        assert kind.unit != "share" or all(one is None or 0 <= one <= 1 for one in numbers)
    for place, function in OTHERWISE[name].items():
        assert cells[place]["measured"] == pytest.approx(function(*given), abs=1e-6), place


def test_published_numbers_are_in_the_papers():
    if not PAPERS.exists():
        pytest.skip("the papers are not here")
    for name, table in TABLES.items():
        (path,) = PAPERS.glob(f"{FILES[name.partition('-')[0]]}_*.txt")
        text = path.read_text()
        for model, numbers in table.published.items():
            words = numbers.split()
            assert len(words) == len(table.cells), (name, model)
            if name.startswith("le2025"):
                assert numbers in text, (name, model)
            for word in {*words} - {"-"}:
                assert re.search(rf"(?<![\d.]){re.escape(word)}(?!\d)", text), (name, model, word)


def test_shares_are_printed_in_percent():
    """Other numbers are printed in the unit of the JSON, all published ones as in the papers."""

    def cell(row, unit, measured, deviation, published):
        return {
            "row": row, "column": "here", "unit": unit, "measured": measured,
            "deviation": deviation, "published": {"net": published},
        }  # fmt: skip

    cells = [cell("PR", "share", 0.5, 0.01, 0.9368), cell("ER", "number", 0.25, None, 0.5)]
    said = printed.table(table_command.rows({"cells": cells}))
    assert [line.split() for line in said.splitlines()] == [
        ["here", "net"], ["PR", "50", "±", "1", "93.68"], ["ER", "0.25", "0.5"]
    ]  # fmt: skip
    for table in TABLES.values():
        for name, numbers in table.published.items():
            words = [float(word) for word in numbers.split() if word != "-"]
            known = table_command._published(table)[name]
            cells = [cell(name, one.unit, 0.0, None, value) for one, value in known.items()]
            shown = [[*table_command.rows({"cells": [one]})][1][2] for one in cells]
            assert [*map(printed.cell, shown)] == [*map(printed.cell, words)], name


def on_the_page():
    """The rows of the page's tables, in which every table and figure of the papers has one."""
    section = PAGE.read_text().partition("## Tables and figures")[2]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_page_knows_every_table():
    rows = {row[1].strip("`"): row for row in on_the_page()}
    assert {name for name in rows if name.partition("-")[0] in FILES} == {*TABLES}
    for name, table in TABLES.items():
        what, _, needs, here, published = rows[name]
        assert (what, needs) == (table.source, ", ".join(NEEDS[need] for need in table.needs))
        assert here, name
        model, _, numbers = published.partition(": ")
        assert not published or table.published[model] == numbers, name


def test_the_page_has_every_caption_of_the_papers():
    if not PAPERS.exists():
        pytest.skip("the papers are not here")
    sections = PAGE.read_text().partition("## Tables and figures")[2].split("### ")[1:]
    for section, (key, number) in zip(sections, FILES.items(), strict=True):
        (path,) = PAPERS.glob(f"{number}_*.txt")
        captions = set(re.findall(r"^(Table|Figure) (\d+)[.:]", path.read_text(), re.MULTILINE))
        told = re.findall(r"(Table|Figure)s? ((?:\d+(?:, )?)+)", section)
        assert f"[{key}]" in section
        assert captions <= {
            (kind, one) for kind, some in told for one in some.strip(", ").split(", ")
        }


def test_seeds_rows_and_a_checkpoint(given, capsys):
    """Means and deviations over seeds; a second run does nothing again and says the same."""
    how = ["--seeds", "0,1", "--checkpoint", "kept"]
    name = "wang2025-table3-cifar10"
    first = tabled(name, *how)
    assert len(first["lines"]) == 2
    assert not any(SEED in line for line in first["lines"])
    assert all(line.endswith(TABLES[name].quick["nppr"]) for line in first["lines"])
    for cell in first["cells"]:
        assert cell["measured"] == pytest.approx(np.mean(cell["by_seed"]))
        assert cell["deviation"] == pytest.approx(np.std(cell["by_seed"], ddof=1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nppr, "fit", None)
        again = tabled(name, *how)
    assert again["cells"] == first["cells"]
    words = ["table", name, "--model", "tables_net:build", "--data", "x.npz", *how]
    assert main(words) == 2
    assert "quick" in capsys.readouterr().err
    words = ["table", "le2025-figure6b", "--model", "tables_net:build", "--data", "x.npz"]
    assert main([*words, "--quick", "--rows", "1.5", "--plot", "kappa.png"]) == 0
    assert Path("kappa.png").read_bytes()[1:4] == b"PNG"
    said = capsys.readouterr().out
    assert "1.5" in said
    assert "\n3 " not in said
    assert tabled("le2025-figure6b", "--rows", "1.5", "--samples", "2")["n"] == 2


@pytest.mark.parametrize(("name", "told"), [("le2025-table1-cifar10-l2", 1), ("hu2020-table4", 0)])
def test_published_numbers_of_other_data_are_not_to_be_compared(given, name, told):
    """Of CIFAR-10 beside images of 16 entries; of MNIST beside images of its size."""
    size = 4 if told else 28
    images = np.zeros((2, size, size, 1), np.float32)
    np.savez("sized.npz", x=images, y=[0, 1])
    parsed = argparse.Namespace(data=Path("sized.npz"))
    table = dataclasses.replace(TABLES[name], source=TABLES[name].source + " MNIST" * (1 - told))
    said = table_command._about_others(table, parsed)
    assert len(said) == told
    assert all("CIFAR, whose images have 3072 entries" in text for text in said)


def test_what_a_table_refuses(given, capsys):
    own = ["--model", "tables_net:build", "--data", "x.npz"]
    for words, said in (
        ([], "there is no table 'None'"),
        (["le2025-table1"], "there is no table 'le2025-table1'"),
        (["hu2020-table4"], "hu2020-table4 needs --model or --arch"),
        (["hu2020-table4", *own[:2]], "hu2020-table4 needs --data"),
        (["hu2020-table4", *own, "--plot", "x.png"], "a table, not a figure"),
        (["hu2020-table4", *own, "--seeds", "1"], "has a single seed"),
        (["hu2020-table4", *own, "--rows", "shear"], "no row of hu2020-table4"),
        (["hu2020-table4", *own, "--train", "x.npz"], "--train would be ignored"),
        (["hu2020-table4", *own, "--quick", "--devices", "9"], "--devices 9: there are "),
        (["chen2022-table1-mnist", *own], "needs --train FILE.npz"),
        (["chen2022-table3-mnist", *own], "--model would be ignored"),
    ):
        assert main(["table", *words]) == 2
        assert said in capsys.readouterr().err
    assert main(["table", "--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(TABLES)
