"""Tables and figures of the source papers: which command lines make them, and what was published.

A cell is a number in the JSON of one command line. The lines name neither model nor data, which
the command ``table`` adds. Published numbers are written as the papers print them.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from wdjax.cli.attack_table import TABLE_1

SHARE = "share"
PERCENT = 100.0
"""By which a share is multiplied, to be as the papers print it."""
_SECONDS = {"minutes": 60.0, "hours": 3600.0}
SEED = "{seed}"
"""Stands in a command line for each of the seeds."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """One number of a table."""

    row: str
    column: str
    line: str
    """The command line."""
    path: str
    """Keys into its JSON, with / between; ``a - b`` is a difference."""
    unit: str = SHARE
    """A share of 1; or the paper's: seconds, minutes, hours, distance, number."""

    def measured(self, number: float) -> float:
        """A number of the line's JSON, whose times are seconds, in the cell's unit."""
        return number / _SECONDS.get(self.unit, 1.0)


@dataclasses.dataclass(frozen=True)
class PaperTable:
    """A table or figure of a paper."""

    source: str
    differs: str
    """What is not as in the paper, in a sentence."""
    cells: tuple[Cell, ...]
    published: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """For each model, or the only one, the printed numbers in the order of the cells; - for none.
    """
    seeds: int = 1
    """Runs that the paper takes the mean of."""
    axis: str = ""
    """What the rows of a figure are; empty for a table."""
    quick: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Options by command, which make every line a matter of seconds."""
    first: int | None = None
    """The number of rows that are enough for a quick look; None for all."""
    needs: tuple[str, ...] = ("model", "data")
    """What it is about: the caller's ``model``, ``data`` and training data, ``train``."""


def _column(line: str, paths: Mapping[str, str], unit: str = SHARE) -> tuple[Cell, ...]:
    """The cells of one column, by row."""
    return tuple(Cell(row, "here", line, path, unit) for row, path in paths.items())


def _rows(text: str) -> dict[str, str]:
    """Published numbers, a model a line: ``name: numbers``."""
    return dict(line.split(": ") for line in text.strip().splitlines())


# Le et al.: attacks on distributions.

_ATTACKED = "attacks/{}/attacked_accuracy"


def _le_table_1(what: str, ball: str, published: Mapping[str, str], rivals: str = "") -> PaperTable:
    paths = {"clean": "clean_accuracy"}
    paths |= {column.label: _ATTACKED.format(column.label) for column in TABLE_1}
    return PaperTable(
        f"Table 1, {what}",
        "Points stay in the box of images, beside the radius; WDA++ looks for nearer flips along "
        "the ray from the sample.",
        _column(f"attack {ball} --attacks table1{rivals}", paths),
        published,
        quick=_QUICK,
    )


_COSTS = "wda", "wda++", "wpgd", "pgd", "apgd-ce"
_KAPPAS = "1", "1.5", "2", "3", "4", "5"
_RADII = "1/255", "2/255", "4/255", "8/255", "12/255", "16/255"


def _le_runtime() -> Iterator[Cell]:
    for samples in (100, 200, 400, 800, 1600):
        line = f"attack --norm linf --eps 4/255 --attacks {','.join(_COSTS)} --samples {samples}"
        for name in _COSTS:
            path = f"attacks/{name}/seconds - attacks/{name}/compile_seconds"
            yield Cell(str(samples), name, line, path, "seconds")


def _le_radii() -> Iterator[Cell]:
    for eps in _RADII:
        line = f"attack --norm linf --eps {eps} --order 2 --attacks wda++,wpgd"
        for name in ("wda++", "wpgd"):
            yield Cell(eps, name, line, _ATTACKED.format(name))


def _le_kappas(ball: str) -> Iterator[Cell]:
    for kappa in _KAPPAS:
        line = f"attack {ball} --order 1 --attacks wda --kappa {kappa}"
        yield Cell(kappa, "wda", line, _ATTACKED.format("wda"))


def _le_steps(ball: str, sizes: tuple[str, ...]) -> Iterator[Cell]:
    for steps in (1, 2, 3, 5, 10, 15, 20):
        names = {
            size: f"wda(steps={steps}, probe={min(steps, 10)}, step_size={size})" for size in sizes
        }
        line = f'attack {ball} --attacks "{", ".join(names.values())}"'
        for size, name in names.items():
            yield Cell(str(steps), f"step {size}", line, _ATTACKED.format(name))


_LINF, _L2 = "--norm linf --eps 8/255", "--norm l2 --eps 0.5"
_QUICK = {"attack": "--samples 4"}
_KAPPA_DIFFERS = (
    "The paper does not say the order of the ball: here it is 1; the step grows with the radius "
    "kappa eps."
)
_STEP_DIFFERS = "Each number of iterations is an attack of its own, all of them point-wise."

_LE = {
    "le2025-table1-cifar10-linf": _le_table_1(
        "CIFAR-10, linf, 8/255",
        _LINF,
        _rows("""
Bartoldson WRN-94-16: 93.68 65.25 32.90 58.71 77.09 46.46 76.15 74.31 74.05 73.71 73.55 73.54
Bartoldson WRN-82-8: 93.11 62.06 27.79 56.81 75.33 41.60 74.17 72.54 71.85 71.59 71.46 71.46
Cui WRN-28-10: 92.16 60.01 26.39 50.97 72.61 39.18 70.60 68.62 68.07 67.73 67.58 67.57
Wang WRN-70-16: 93.25 63.08 28.60 55.17 74.80 41.80 73.46 71.68 71.02 70.69 70.53 70.52
Wang WRN-28-10: 92.44 60.96 23.81 52.03 72.67 36.91 70.24 68.24 67.60 67.31 67.17 67.17
Xu WRN-28-10: 93.69 63.25 36.27 52.48 73.98 46.04 67.08 69.00 66.39 63.89 63.93 63.84
Sehwag RN-18: 84.59 54.65 15.23 46.58 63.86 27.38 58.40 57.66 56.30 55.54 55.50 55.50
"""),
    ),
    "le2025-table1-cifar10-l2": _le_table_1(
        "CIFAR-10, l2, 0.5",
        _L2,
        _rows("""
Wang WRN-70-16: 95.54 77.63 55.57 70.09 86.37 66.73 85.66 85.30 85.00 84.97 84.96 84.97
Wang WRN-28-10: 95.16 76.31 57.42 68.65 85.33 68.10 84.52 83.89 83.71 83.68 83.68 83.68
Sehwag WRN-34-10: 90.93 72.01 39.25 67.96 79.87 53.13 78.23 78.16 77.51 77.24 77.22 77.25
Sehwag RN-18: 89.76 69.75 48.40 65.02 77.68 58.64 75.24 75.32 74.69 74.41 74.41 74.40
Ding WRN-28-4: 88.02 63.04 31.35 53.47 71.61 42.89 66.62 66.62 66.22 66.09 66.05 66.06
Rony WRN-28-10: 89.05 64.19 27.79 51.15 72.30 39.94 66.58 67.08 66.59 66.44 66.41 66.42
"""),
    ),
    "le2025-table1-cifar100": _le_table_1(
        "CIFAR-100, linf, 8/255, top 10",
        _LINF,
        _rows("""
Cui WRN-28-10: 73.85 43.68 6.71 24.64 50.42 10.85 43.82 40.37 39.57 39.18 39.17 39.14
Wang WRN-28-10: 72.58 43.61 7.45 24.90 49.81 10.88 44.09 39.66 39.12 38.77 38.70 38.71
Addepalli RN-18: 65.45 37.64 3.07 14.52 42.01 7.80 33.47 28.82 28.26 27.67 27.65 27.63
"""),
        " --rivals 10",
    ),
    "le2025-table1-imagenet": _le_table_1(
        "ImageNet, linf, 4/255, top 20",
        "--norm linf --eps 4/255",
        _rows("""
Xu Swin-L: 78.62 54.86 17.96 48.68 62.09 30.96 59.96 60.30 58.00 59.68 58.32 58.30
Amini Swin-L: 78.80 59.83 25.25 54.56 65.28 38.35 62.12 62.54 61.14 58.92 58.76 58.76
Liu ConvNeXt-B: 76.02 52.95 16.23 45.84 59.79 28.46 55.90 56.78 54.38 55.82 53.19 53.18
Singh CvNeXt-S: 74.10 50.31 12.06 41.40 56.35 23.97 52.82 53.20 51.04 52.42 49.92 49.90
"""),
        " --rivals 20",
    ),
    "le2025-figure4a": PaperTable(
        "Figure 4(a), running time on ImageNet, linf, 4/255",
        "Seconds without compilation; the paper's curves are read from no table.",
        tuple(_le_runtime()),
        axis="samples",
        first=1,
    ),
    "le2025-figure4b": PaperTable(
        "Figure 4(b), growing eps, linf",
        "Both attacks spend in the ball of order 2; the paper's curves are read from no table.",
        tuple(_le_radii()),
        axis="eps",
        quick=_QUICK,
    ),
    "le2025-figure6a": PaperTable(
        "Figure 6(a), kappa, l2, 0.5", _KAPPA_DIFFERS, tuple(_le_kappas(_L2)), axis="kappa",
        quick=_QUICK,
    ),
    "le2025-figure6b": PaperTable(
        "Figure 6(b), kappa, linf, 8/255", _KAPPA_DIFFERS, tuple(_le_kappas(_LINF)), axis="kappa",
        quick=_QUICK,
    ),
    "le2025-figure7a": PaperTable(
        "Figure 7(a), step sizes, l2, 0.5",
        _STEP_DIFFERS,
        tuple(_le_steps(_L2, ("1.0", "0.5", "0.2", "0.1", "0.01", "0.005"))),
        axis="iterations",
        quick=_QUICK,
    ),
    "le2025-figure7b": PaperTable(
        "Figure 7(b), step sizes, linf, 8/255",
        _STEP_DIFFERS,
        tuple(_le_steps(_LINF, ("0.5", "0.1", "0.02", "0.01", "0.005"))),
        axis="iterations",
        quick=_QUICK,
    ),
}  # fmt: skip

# Wang et al.: distributions that are learnt.

_MODES = {"independent": "Indep.", "label": "Label", "input": "Input", "joint": "Joint"}
_FIT = f"nppr --norm linf --eps 16/255 --mode paper --seed {SEED}"
_FIT_QUICK = {"nppr": "--steps 2 --draws 20 --latent 4 --samples 8"}
_FIT_DIFFERS = (
    "Fitted on the first half of the data and measured on the second, as shares of the samples "
    "that are classified correctly; the loss is a smooth 0-1 loss (--loss softplus is the paper's)."
)


def _wang_ablation() -> Iterator[Cell]:
    configurations = {
        "base, K=3": "--components 3 --upsample fixed",
        "learnable, K=3": "--components 3 --upsample learnable",
        "learnable, K=7": "--components 7 --upsample learnable",
        "learnable, K=12": "--components 12 --upsample learnable",
    }
    for row, words in configurations.items():
        for mode, name in _MODES.items():
            yield Cell(row, f"{name} NPPR", f"{_FIT} {words}", f"nppr/{mode}/value")
            yield Cell(row, f"{name} ER", f"{_FIT} {words}", f"nppr/{mode}/entropy_ratio")


def _wang_radii() -> Iterator[Cell]:
    paths = {f"NPPR {mode}": f"nppr/{mode}/value" for mode in _MODES}
    paths |= {"PR uniform": "pr/uniform/value", "AR PGD": "ar/pgd20"}
    for row, path in paths.items():
        for eps in ("4/255", "8/255", "16/255"):
            line = f"nppr --norm linf --eps {eps} --mode paper --components 7 --seed {SEED}"
            yield Cell(row, eps, line, path)


def _wang_models(data: str, published: Mapping[str, str]) -> PaperTable:
    paths = {
        "NPPR joint": "nppr/joint/value",
        "PR Gaussian": "pr/gaussian_truncated/value",
        "PR uniform": "pr/uniform/value",
        "AR PGD": "ar/pgd20",
        "AR C&W": "ar/cw20",
        "accuracy": "clean_accuracy",
    }
    line = f"nppr --norm linf --eps 16/255 --mode joint --components 7 --seed {SEED}"
    return PaperTable(
        f"Table 3, {data}",
        f"{_FIT_DIFFERS} C&W is PGD-20 on the margin.",
        _column(line, paths),
        published,
        seeds=10,
        quick=_FIT_QUICK,
    )


def _wang_extended() -> Iterator[Cell]:
    paths = {
        "NPPR test": ("value", SHARE),
        "NPPR train": ("fitted_value", SHARE),
        "ER": ("entropy_ratio", "number"),
        "max": ("proportion_max", SHARE),
        "min": ("proportion_min", SHARE),
        "std": ("proportion_deviation", SHARE),
    }
    for mode in ("independent", "input", "label", "joint"):
        for components in (3, 7, 12):
            for upsample in ("none", "fixed", "learnable"):
                line = (
                    f"nppr --norm linf --eps 16/255 --mode {mode} --components {components} "
                    f"--upsample {upsample} --covariance {_covariance(upsample)} --seed {SEED}"
                )
                for column, (key, unit) in paths.items():
                    row = f"{mode} {components} {upsample}"
                    yield Cell(row, column, line, f"nppr/{mode}/{key}", unit)


def _covariance(upsample: str) -> str:
    """Without an up-sampler a full covariance has as many entries as pixels squared."""
    return "diagonal" if upsample == "none" else "full"


_WANG = {
    "wang2025-table1": PaperTable(
        "Table 1, up-sampling and components, CIFAR-10, ResNet18, linf, 16/255",
        _FIT_DIFFERS,
        tuple(_wang_ablation()),
        {
            "ResNet18": "95.27 0.21 95.10 99.06 90.31 98.73 90.04 99.02 "
            "95.85 91.35 93.64 99.21 90.26 94.98 89.72 98.94 "
            "95.15 94.37 92.95 87.34 90.31 94.21 89.72 89.92 "
            "95.53 92.43 92.68 76.59 90.02 79.54 89.50 73.83"
        },
        quick=_FIT_QUICK,
        first=1,
    ),
    "wang2025-table2": PaperTable(
        "Table 2, radii, CIFAR-10, ResNet18, linf, K=7",
        _FIT_DIFFERS,
        tuple(_wang_radii()),
        {
            "ResNet18": "- 98.21 95.15 - 96.57 92.95 - 96.53 90.31 - 95.56 89.71 "
            "99.89 99.77 99.49 36.66 23.26 9.27"
        },
        quick=_FIT_QUICK,
    ),
    "wang2025-table3-cifar10": _wang_models(
        "CIFAR-10",
        _rows("""
ResNet18: 88.32 99.47 99.60 9.27 9.67 86.42
ResNet50: 92.99 99.18 99.40 8.57 8.87 90.90
WRN50: 91.68 99.28 99.49 8.89 8.95 91.11
VGG16: 97.83 99.47 99.62 8.79 9.31 92.22
"""),
    ),
    "wang2025-table3-cifar100": _wang_models(
        "CIFAR-100",
        _rows("""
ResNet18: 74.17 97.99 98.60 3.85 4.21 61.00
ResNet50: 85.16 96.93 97.80 3.86 4.32 70.18
WRN50: 78.26 97.48 98.30 4.53 4.77 70.42
VGG16: 91.81 95.57 95.81 4.43 4.19 71.52
"""),
    ),
    "wang2025-table3-tinyimagenet": _wang_models(
        "Tiny ImageNet",
        _rows("""
ResNet18: 60.16 98.87 99.17 2.76 2.71 57.65
ResNet50: 74.35 98.94 99.21 3.56 3.62 69.42
WRN50: 64.66 98.42 98.79 2.32 2.60 72.80
VGG16: 78.08 98.96 99.23 4.69 4.24 64.14
"""),
    ),
    "wang2025-table5": PaperTable(
        "Table 5, extended ablation, CIFAR-10, ResNet18, linf, 16/255",
        f"{_FIT_DIFFERS} Without an up-sampler the covariance is diagonal, and NPPR on training "
        "data is that of the last steps of the fit.",
        tuple(_wang_extended()),
        {
            "ResNet18": "94.25 95.07 0.000431 99.9960 0.0016 57.73 "
            "95.26 95.76 0.002135 99.9766 0.0110 57.71 "
            "95.85 96.30 0.913476 54.43 20.94 18.37 "
            "94.48 95.11 0.000290 99.9956 0.0006 37.79 "
            "95.06 95.71 0.000935 99.9840 0.0013 37.79 "
            "95.15 95.65 0.943673 31.49 8.38 7.93 "
            "94.59 95.43 0.000287 99.9946 0.0003 28.87 "
            "95.06 95.74 0.000757 99.9844 0.0010 28.86 "
            "95.53 95.88 0.924282 20.11 3.83 5.83 "
            "86.14 79.28 0.9216 52.25 18.87 17.13 "
            "90.31 88.92 0.9873 40.95 27.59 6.87 "
            "90.26 87.97 0.9498 46.63 19.91 13.36 "
            "85.60 77.33 0.8512 30.06 2.05 11.32 "
            "90.20 89.22 0.8991 29.46 2.63 9.45 "
            "90.31 87.33 0.9421 24.38 4.61 7.16 "
            "85.13 75.04 0.9404 17.55 1.45 4.62 "
            "89.41 89.98 0.7829 29.30 0.00 8.90 "
            "90.02 87.26 0.7954 20.22 0.00 7.95 "
            "90.48 92.23 0.9885 40.89 28.75 6.59 "
            "95.10 95.99 0.9906 40.14 29.15 5.94 "
            "93.64 94.54 0.9921 39.64 30.11 5.46 "
            "89.30 90.69 0.7359 40.08 0.0001 14.85 "
            "94.03 94.92 0.7320 40.27 0.0117 15.05 "
            "92.95 93.90 0.8734 30.27 0.1151 9.82 "
            "89.22 90.77 0.5458 50.23 0.000034 14.72 "
            "94.50 95.44 0.7068 20.35 0.0113 9.34 "
            "92.68 94.01 0.7659 20.22 0.0095 8.25 "
            "84.82 78.53 0.9369 50.43 20.51 15.41 "
            "90.04 89.24 0.9902 40.31 29.30 6.07 "
            "89.72 87.13 0.9894 40.60 29.24 6.31 "
            "84.10 72.09 0.9689 22.34 8.91 5.43 "
            "89.22 87.83 0.8786 29.22 0.0001 9.34 "
            "89.72 86.62 0.8992 20.40 0.0371 7.89 "
            "84.19 75.93 0.7610 19.96 0.0004 8.28 "
            "89.42 89.25 0.7376 30.23 0.0008 9.41 "
            "- - - - - -"
        },
        quick=_FIT_QUICK,
        first=3,
    ),
}

# Chen et al.: defences that adapt.

_GAME = "games/0/attacks/{}/{}/value"
_ADAPTIVE = {"PGD": "transfer", "FPA": "fpa", "GMSA-AVG": "gmsa-avg", "GMSA-MIN": "gmsa-min"}
_GAME_QUICK = {"game": "--samples 4 --iterations 2 --draws 1", "attack": "--samples 4"}
_STEPS_QUICK = _GAME_QUICK | {"game": f"{_GAME_QUICK['game']} --steps 2"}
_GAME_DIFFERS = "Means over private keys of the defender; attackers submit adversarial points only."
_ITSELF_DIFFERS = (
    " DENT-AA adapts each input beside the clean ones, and its points count when they are "
    "submitted together; the paper counts what falls in batches that are never submitted."
)


def _game(line: str, name: str, attacks: Mapping[str, str]) -> Iterator[Cell]:
    """Accuracies of a game: of the static and the adapted model, clean and under each attack."""
    first = next(iter(attacks.values()))
    yield Cell("static, clean", "here", line, _GAME.format(first, "static_clean_accuracy"))
    yield Cell(f"{name}, clean", "here", line, _GAME.format(first, "one_shot_clean"))
    for row, attack in attacks.items():
        yield Cell(f"{name}, {row}", "here", line, _GAME.format(attack, "one_shot"))


def _own_game(
    source: str,
    eps: str,
    preset: str,
    name: str,
    published: Mapping[str, str],
    itself: Mapping[str, str] = MappingProxyType({}),
    order: str = "natural",
    **more: Any,
) -> PaperTable:
    """A table of a defence around the caller's model, with AutoAttack on the model alone.

    ``itself`` are attacks on the defence as a classifier, by row.
    """
    against = {**itself, "AA": "autoattack", **_ADAPTIVE}
    line = (
        f"game --preset {preset} --order {order} --seeds {SEED} "
        f"--attacks {','.join(against.values())}"
    )
    attacked = f"attack --norm linf --eps {eps} --attacks autoattack"
    static = Cell("static, AA", "here", attacked, _ATTACKED.format("autoattack"))
    first, second, *rest = _game(line, name, against)
    differs = f"{_GAME_DIFFERS}{_ITSELF_DIFFERS if itself else ''}"
    cells = (first, second, static, *rest)
    return PaperTable(source, differs, cells, published, quick=_STEPS_QUICK, **more)


_ALL = "model", "data", "train"


def _trained(source: str, preset: str, name: str, published: Mapping[str, str]) -> PaperTable:
    """A table of a defence that trains the paper's net on the caller's data."""
    against = {"AA": "autoattack", **_ADAPTIVE}
    line = f"game --preset {preset} --seeds {SEED} --attacks {','.join(against.values())}"
    first, second, *rest = _game(line, name, against)
    static = Cell("static, AA", "here", line, _GAME.format("autoattack", "static_accuracy"))
    return PaperTable(
        source,
        f"Trained without dropout. {_GAME_DIFFERS}",
        (first, second, static, *rest),
        published,
        quick=_STEPS_QUICK,
        needs=("data", "train"),
    )


def _chen_figure_1() -> Iterator[Cell]:
    """What a rejecting defence lets through, and rejects, if it may reject 5 % of clean inputs."""
    line = f"game --eps 8/255 --defense urejectron --attacks transfer,brighter --seeds {SEED}"
    far = f"game --eps 3 --defense urejectron --attacks cw --seeds {SEED}"
    kinds = {
        "(a) PGD": (line, "transfer"),
        "(b) C&W": (far, "cw"),
        "(c) benign": (line, "brighter"),
    }
    rates = {"errors": "err", "rejected": "rejected_attacked", "clean rejected": "rejected"}
    for row, (words, attack) in kinds.items():
        for column, rate in rates.items():
            path = f"games/0/attacks/{attack}/rejection/0.05/{rate}"
            yield Cell(row, column, words, path)


_CHEN = {
    "chen2022-figure1": PaperTable(
        "Figure 1, URejectron",
        "The paper shows curves over thresholds; these are their points where 5 % of clean inputs "
        "are rejected. Benign inputs are brighter by 8/255; C&W moves up to 3 in l2.",
        tuple(_chen_figure_1()),
        quick=_GAME_QUICK,
        needs=_ALL,
    ),
    "chen2022-table5": _own_game(
        "Table 5, DENT, inputs sorted by label, CIFAR-10, linf, 8/255",
        "8/255",
        "dent-cifar10",
        "DENT",
        _rows("""
Wu et al.: - - 58.00 58.00 50.40 50.30 50.40 50.40
Carmon et al.: - - 57.30 58.00 51.80 51.80 51.80 51.80
Sehwag et al.: - - 54.90 55.90 50.10 49.80 50.00 50.00
Wang et al.: - - 53.60 55.90 49.00 49.10 48.90 48.70
Hendrycks et al.: - - 51.80 53.10 48.10 48.20 48.30 48.30
Wong et al.: - - 42.40 44.60 40.10 39.90 40.00 40.00
Ding et al.: - - 39.70 42.10 36.20 35.70 35.30 35.00
"""),
        order="labels",
    ),
    "chen2022-table1-mnist": _own_game(
        "Table 1, RMC, MNIST, linf, 0.3",
        "0.3",
        "rmc-mnist",
        "RMC",
        _rows("""
Standard: 99.50 99.00 0.00 97.70 98.30 0.60 0.50 1.10
Madry et al.: 99.60 97.00 87.70 95.70 96.10 59.50 61.40 58.80
"""),
        needs=_ALL,
    ),
    "chen2022-table1-cifar10": _own_game(
        "Table 1, RMC, CIFAR-10, linf, 8/255",
        "8/255",
        "rmc-cifar10",
        "RMC",
        _rows("""
Standard: 94.30 93.10 0.00 94.20 97.60 8.50 8.00 8.10
Madry et al.: 83.20 90.90 44.30 77.90 71.70 40.80 42.50 39.60
"""),
        needs=_ALL,
    ),
    "chen2022-table2": _own_game(
        "Table 2, DENT, CIFAR-10, linf, 8/255",
        "8/255",
        "dent-cifar10",
        "DENT",
        _rows("""
Wu et al.: 85.70 86.10 58.00 78.80 64.40 59.50 59.30 59.60 59.60
Carmon et al.: 88.00 87.40 57.30 - 61.70 58.40 58.40 58.50 58.50
Sehwag et al.: 87.30 86.90 54.90 76.50 59.60 55.80 55.80 55.80 55.80
Wang et al.: 86.60 85.60 53.60 75.90 61.30 55.90 55.80 56.10 56.10
Hendrycks et al.: 85.80 85.50 51.80 77.20 58.40 54.20 54.40 54.20 54.20
Wong et al.: 81.20 81.00 42.40 69.70 48.90 44.10 44.30 44.50 44.30
Ding et al.: 82.40 82.40 39.70 - 44.80 39.90 39.40 39.10 39.20
"""),
        {"DENT-AA": "dent-aa"},
    ),
    "chen2022-table6-mnist": dataclasses.replace(
        _own_game(
            "Table 6, RMC, MNIST, five runs",
            "0.3",
            "rmc-mnist",
            "RMC",
            _rows("""
Standard: 99.40 98.62 0.00 - - - 0.54 0.80
Madry et al.: 99.24 96.50 87.86 - - - 57.14 59.48
"""),
            needs=_ALL,
        ),
        seeds=5,
    ),
    "chen2022-table6-cifar10": dataclasses.replace(
        _own_game(
            "Table 6, RMC, CIFAR-10, five runs",
            "8/255",
            "rmc-cifar10",
            "RMC",
            _rows("""
Standard: 93.96 93.56 0.00 - - - 8.50 8.92
Madry et al.: 83.70 91.46 43.58 - - - 38.50 39.00
"""),
            needs=_ALL,
        ),
        seeds=5,
    ),
    "chen2022-table3-mnist": _trained(
        "Table 3, DANN, MNIST, linf, 0.3",
        "dann-mnist",
        "DANN",
        {"MNIST": "99.42 99.27 0.00 97.59 96.66 96.81 79.37 6.17"},
    ),
    "chen2022-table3-cifar10": _trained(
        "Table 3, DANN, CIFAR-10, linf, 8/255",
        "dann-cifar10",
        "DANN",
        {"CIFAR-10": "93.95 - - 66.61 60.54 53.98 5.53 8.56"},
    ),
    "chen2022-table4-mnist": _trained(
        "Table 4, TADV, MNIST, linf, 0.3",
        "tadv-mnist",
        "TADV",
        {"MNIST": "99.01 99.05 86.61 96.07 96.48 95.47 94.27 95.48"},
    ),
    "chen2022-table4-cifar10": _trained(
        "Table 4, TADV, CIFAR-10, linf, 8/255",
        "tadv-cifar10",
        "TADV",
        {"CIFAR-10": "87.69 - 45.29 - - 58.64 54.12 57.77"},
    ),
}

# Hu et al.: mass that moves between pixels.

_MASS_QUICK = {"image-attack": "--samples 2 --window 3"}
_KS = "5", "10", "20", "50", "100", "200", "500", "1000"
_MASS_DIFFERS = (
    "Every point is in the ball, by its transport plan; published points leave up to 1 % of the "
    "mass missing."
)
_SINKHORN = 'image-attack --k {} --attack "sinkhorn(growing=true, iterations=50, {})"'


def _hu_table_1(data: str, published: Mapping[str, str]) -> PaperTable:
    line = f"image-attack --k {','.join(_KS)}"
    paths = {f"k {k}": f"budgets/{number}/attacked_accuracy" for number, k in enumerate(_KS)}
    return PaperTable(
        f"Table 1 and Figure 2, {data}",
        f"The union of this library's attacks. {_MASS_DIFFERS}",
        _column(line, paths),
        published,
        quick=_MASS_QUICK,
    )


def _hu_ablation() -> Iterator[Cell]:
    """Table 3: what step size and direction do, by a growing radius."""
    kinds = {
        "Wong et al.": "steps=200, direction=linf, step_size=0.001",
        "+ large step": "steps=200, direction=linf, step_size=0.04",
        "+ l2 descent": "steps=200, step_size=0.06",
    }
    for name, words in kinds.items():
        line = _SINKHORN.format(",".join(_KS), words)
        for number, k in enumerate(_KS):
            yield Cell(name, f"k {k}", line, f"budgets/{number}/attacked_accuracy")


def _hu_steps() -> Iterator[Cell]:
    """Table 5: what the step size costs and brings."""
    ks = "100", "200", "400", "800", "1600"
    for size in ("0.02", "0.04", "0.06", "0.08"):
        line = _SINKHORN.format(",".join(ks), f"steps=210, step_size={size}")
        yield Cell(size, "hours", line, "seconds", "hours")
        for number, k in enumerate(ks):
            yield Cell(size, f"k {k}", line, f"budgets/{number}/attacked_accuracy")


_MOVED = (
    *(f"translation {percent} %" for percent in (5, 10, 20)),
    *(f"rotation {degrees}" for degrees in (5, 10, 20)),
    *(f"blur {pixels}" for pixels in (3, 5, 7)),
)
_NATURAL = 'image-attack --k 1 --attack "sinkhorn(steps=1)" --natural'


def _hu_distances() -> Iterator[Cell]:
    for name in _MOVED:
        for column in ("l2", "w1"):
            yield Cell(name, column, _NATURAL, f"natural/{name}/{column}", "distance")


_HU = {
    "hu2020-table1-mnist": _hu_table_1(
        "MNIST",
        _rows("""
Wong et al.: 100 100 100 100 94 91 83 71
Hu et al.: 100 90 85 68 39 8 1 1
"""),
    ),
    "hu2020-table1-cifar10": _hu_table_1(
        "CIFAR-10",
        _rows("""
Wong et al.: 82 82 82 82 82 81 80 77
Hu et al.: 76 68 58 35 20 9 1 0
"""),
    ),
    "hu2020-table2": PaperTable(
        "Table 2, running time and mean radius, MNIST",
        f"Minutes of this machine, of the paper's attack in this library. {_MASS_DIFFERS}",
        _column(_SINKHORN.format("100", "steps=200"), {"minutes": "seconds"}, "minutes")
        + _column(
            _SINKHORN.format("100", "steps=200"), {"mean radius": "radii/mean_radius"}, "distance"
        ),
        _rows("""
Wong et al.: 34 0.443
constrained projection: 78 0.460
+ optimisation: 38 0.460
Hu et al.: 38 0.135
"""),
        quick=_MASS_QUICK,
    ),
    "hu2020-table3-mnist": PaperTable(
        "Table 3, step size and direction, MNIST",
        f"One search of growing radius for each row. {_MASS_DIFFERS}",
        tuple(_hu_ablation()),
        {"MNIST": "100 100 100 100 94 91 83 71 100 96 96 94 88 69 12 0 100 90 85 68 39 8 1 1"},
        quick=_MASS_QUICK,
    ),
    "hu2020-table3-cifar10": PaperTable(
        "Table 3, step size and direction, CIFAR-10",
        f"One search of growing radius for each row. {_MASS_DIFFERS}",
        tuple(_hu_ablation()),
        {"CIFAR-10": "82 82 82 82 82 81 80 77 81 80 78 70 55 23 1 0 76 68 58 35 20 9 1 0"},
        quick=_MASS_QUICK,
    ),
    "hu2020-table4": PaperTable(
        "Table 4, translations, rotations and blurs",
        "Images are shifted to the right, rotated counter-clockwise, and blurred with OpenCV's "
        "standard deviation, which the paper does not name.",
        _column(
            _NATURAL,
            {"clean": "clean_accuracy"} | {name: f"natural/{name}/accuracy" for name in _MOVED},
        ),
        _rows("""
MNIST, standard: 98.9 97.8 85.8 48.3 98.5 97.7 91.9 98.6 93.1 62.4
MNIST, robust: 92.8 91.2 82.3 49.3 91.0 88.7 79.1 88.0 75.1 58.4
CIFAR-10, standard: 94.8 94.5 94.5 93.6 91.6 86.6 64.1 35.1 17.8 15.4
CIFAR-10, robust: 84.4 84.0 84.0 81.7 82.8 81.3 70.6 69.5 35.1 24.7
"""),
        quick=_MASS_QUICK,
    ),
    "hu2020-table5-mnist": PaperTable(
        "Table 5, step sizes, MNIST",
        f"Hours of this machine. {_MASS_DIFFERS}",
        tuple(_hu_steps()),
        {"MNIST": "1.8 84 72 49 21 2 2.1 81 68 42 15 1 2.5 81 67 41 14 1 3.0 81 67 41 14 1"},
        quick=_MASS_QUICK,
        first=2,
    ),
    "hu2020-table5-cifar10": PaperTable(
        "Table 5, step sizes, CIFAR-10",
        f"Hours of this machine. {_MASS_DIFFERS}",
        tuple(_hu_steps()),
        {"CIFAR-10": "3.7 52 44 44 44 44 4.6 52 43 43 43 43 4.9 52 43 43 43 43 5.0 51 42 42 42 42"},
        quick=_MASS_QUICK,
        first=2,
    ),
    "hu2020-table6-mnist": PaperTable(
        "Table 6, how far translations, rotations and blurs are, MNIST",
        "The exact distance of twenty images of equal mass.",
        tuple(_hu_distances()),
        {"MNIST": "5.2 1.0 8.1 2.2 10.3 4.2 3.7 0.5 5.4 0.8 7.8 1.5 3.2 0.3 5.5 1.0 6.5 1.6"},
        quick=_MASS_QUICK,
    ),
    "hu2020-table6-cifar10": PaperTable(
        "Table 6, how far translations, rotations and blurs are, CIFAR-10",
        "The exact distance of twenty images of equal mass: none where the colours' shares of it "
        "change, since no mass moves between channels. Pixels lie in [0, 1], and the paper does "
        "not say in which units its l2 distances are.",
        tuple(_hu_distances()),
        {
            "CIFAR-10": "41.0 1.0 61.6 2.0 82.6 3.7 38.4 0.8 54.8 1.6 71.4 2.8 14.8 0.8 25.4 1.6 "
            "31.3 2.2"
        },
        quick=_MASS_QUICK,
    ),
}

TABLES: dict[str, PaperTable] = {**_LE, **_WANG, **_CHEN, **_HU}
"""The tables and figures by name: key of the paper, number, variant."""
