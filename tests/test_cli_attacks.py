"""Settings of attacks on the command line: read, typed, checked, done and told."""

import json

import numpy as np
import pytest

from wdjax import Lp, attacks, losses
from wdjax.cli import attack_command, attack_table, attack_words, main, parser
from wdjax.models import convert
from wdjax.report import summary

BASE = ["attack", "--arch", "mlp", "--weights", "w", "--data", "d", "--eps", "0.1", "--json", "-"]


def columns(text, *more, norm="linf"):
    parsed = parser().parse_args([*BASE, "--norm", norm, "--attacks", text, *more])
    return attack_command._columns(parsed)


def made(text, *more, norm="linf"):
    """What the words stand for: names with all their settings."""
    ball = Lp({"linf": np.inf, "l2": 2, "l0": 0}[norm])
    return [
        (column.name, attack_table.described(column.name, ball, column.settings))
        for column in columns(text, *more, norm=norm).values()
    ]


def test_the_words_of_the_issue():
    found = columns("pgd(steps=100, restarts=5), wda(rivals=20), fast")
    assert [*found] == ["pgd(steps=100, restarts=5)", "wda(rivals=20)", "fast"]
    pgd, wda, fast = found.values()
    assert attack_table.make("pgd", Lp(), pgd.settings) == attacks.PGD(steps=100, restarts=5)
    assert attack_table.make("wda", Lp(), wda.settings) == attacks.WDA(rivals=20)
    assert fast.settings == {}


NOT_LINF = {"cw": "l2", "ddn": "l2", "alma": "l2", "sigma-zero": "l0"}


def test_every_setting_of_every_attack_can_be_given():
    """Each with its default gives the attack without settings."""
    tried = 0
    for name, kinds in ((name, attack_table.settings_of(name)) for name in attack_table.METHODS):
        norm = NOT_LINF.get(name, "linf")
        ((_, plain),) = made(name, norm=norm)
        assert plain.keys() >= kinds.keys()
        for setting in kinds:
            text = str(plain[setting]).rpartition("wdjax.losses.")[2]
            ((_, same),) = made(f" {name} ( {setting} = {text} ) ", norm=norm)
            assert same == plain, (name, setting)
            tried += 1
    assert tried > 80


def test_settings_have_the_types_that_attacks_declare():
    text = "pgd(step_size=2/255, loss=margin, random_start=TRUE), apgd-t(targets=3, widths=(3,2,1))"
    pgd, apgd = columns(text).values()
    wanted = {"step_size": 2 / 255, "loss": losses.margin, "random_start": True}
    assert pgd.settings == wanted
    assert apgd.settings == {"targets": 3, "widths": (3.0, 2.0, 1.0)}
    ball = Lp(2)
    assert attack_table.make("apgd-t", ball, apgd.settings).widths == (3, 2, 1)
    for name in attack_table.ATTACKS:
        if name not in NOT_LINF:
            declared = summary.settings(attack_table.ATTACKS[name](Lp()))
            assert attack_table.settings_of(name).keys() <= declared.keys()


def test_rivals_of_the_option_and_of_the_word():
    both = made("wda, wda(rivals=2), wda++", "--rivals", "7")
    assert [settings["rivals"] for _, settings in both] == [7, 2, 7]
    for text in ("wda(rivals=2)", "pgd"):
        with pytest.raises(ValueError, match="--rivals 7 would be ignored"):
            columns(text, "--rivals", "7")


REFUSED = {
    "pgd(rounds=3)": "pgd has no setting 'rounds' here; it has steps, loss, random_start, iterate, "
    "restarts, step_size.",
    "pgd(100)": "name=value.*got '100'; it has steps, loss",
    "pgd(100, steps=3)": "name=value",
    "pgd(*args)": "name=value",
    "pgd(steps=1 steps=2)": "name=value",
    "pgd(steps==1)": "name=value",
    "pgd(steps=1,,loss=margin)": "name=value",
    "pgd(steps=)": "name=value",
    "pgd(steps=5, steps=6)": "steps twice",
    "pgd(steps=0)": r"pgd\(steps=0\): steps must be an integer of at least 1",
    "pgd(steps=1.5)": "steps of pgd must be a whole number",
    "pgd(steps=1e3)": "steps of pgd must be a whole number",
    "pgd(steps=0x10)": "whole number",
    "pgd(steps=1_0)": "whole number",
    "pgd(steps=true)": "whole number",
    "pgd(steps=none)": "whole number",
    "pgd(steps=9999999)": "at most 1000000",
    "pgd(steps=٣)": "whole number",
    "pgd(ｓteps=3)": "name=value",
    "pgd(step_size=nan)": "step_size of pgd must be finite",
    "pgd(step_size=1e999)": "step_size of pgd must be finite",
    "pgd(step_size=-1)": "at least 0",
    "pgd(step_size=(1,2))": "must be a number such as",
    "pgd(random_start=1)": "must be true or false",
    "pgd(iterate=first)": "'best' or 'last'",
    "pgd(iterate=last, restarts=3)": "restarts must be 1",
    "pgd(loss=__import__)": "loss of pgd must be one of cross_entropy, decision_margin",
    "pgd(loss=targeted_margin)": "must be one of",
    "pgd(steps=__import__('os').system('true'))": "name=value",
    "pgd(ball=2)": "no setting 'ball'",
    "pgd(__class__=1)": "no setting '__class__'",
    "fgsm(steps=3)": "fgsm has no setting 'steps' here; it has loss",
    "wpgd(order=2)": "no setting 'order'",
    "wfgsm(steps=2)": "it has loss",
    "apgd-ce(loss=margin)": "no setting 'loss'",
    "apgd-ce(targets=3)": "no setting 'targets'",
    "apgd-t(targets=0)": "targets must be an integer of at least 1",
    "fab-t(targets=0)": "targets must be an integer of at least 1",
    "apgd-ce(widths=3)": "numbers in parentheses",
    "apgd-ce(widths=())": "numbers in parentheses",
    "apgd-ce(widths=(3,nan))": "finite",
    "apgd-t(restarts=1000000, steps=1000000)": "steps are more than",
    "wda(probe=30)": "at least probe",
    "wda(rivals=0)": "rivals must be an integer of at least 1",
    "fast(passes=3)": "passes must be at least 12",
    "fast(eps=1)": "fast has no setting 'eps' here; it has passes",
    "a3(finisher=pgd)": "a3 has no setting 'finisher' here; it has passes",
    "a3-wda(rivals=0)": "rivals must be an integer",
    "wda-star(passes=3)": "at least 21 passes",
    "wda-star(start=none)": "it has passes, most, tolerance",
    "autoattack(version=rand)": "'standard' or 'plus'",
    "table1(steps=3)": "or table1 alone",
    "pgd, table1": "or table1 alone",
    "nope(x=1)": "--attacks knows fgsm, pgd",
    "pgd(": "names with settings",
    "pgd)": "names with settings",
    "pgd)(": "names with settings",
    "pgd(steps=1)(steps=2)": "names with settings",
    "pgd wda": "names with settings",
    "(steps=3)": "names with settings",
    "pgd" + "(" * 3000: "names with settings",
    "pgd(widths=" + "(" * 1500 + ")" * 1500 + ")": "names with settings",
    "pgd(steps=" + "9" * 3000 + ")": "at most 1000000",
    "pgd," * 500000: "4000 characters at most",
    "pgd,pgd": "each once",
    "pgd,pgd(steps=40)": "each once",
    "pgd(step_size=0.5),pgd(step_size=1/2)": "each once",
    "pgd(\x1b[2J=3)": "name=value",
    "pgd(\ud800=3)": "name=value",
    "pgd(steps=3\0)": "whole number",
}


@pytest.mark.parametrize("text", REFUSED, ids=lambda text: ascii(text[:30]))
def test_what_is_no_setting_is_one_line_before_the_work(text, capsys, monkeypatch):
    monkeypatch.setattr(convert, "load", lambda *a: pytest.fail("the work had begun"))
    assert main([*BASE, "--norm", "linf", f"--attacks={text}"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("wdjax: ")
    assert said.err.count("\n") == 1
    assert said.err.isascii()
    assert said.err[:-1].isprintable()
    assert len(said.err) < 600
    with pytest.raises(ValueError, match=REFUSED[text]):
        columns(text)


def test_settings_reach_the_attack_and_the_json(tmp_path, capsys):
    torch = pytest.importorskip("torch", reason="PyTorch writes the checkpoint")
    torch.manual_seed(0)
    net = torch.nn.Sequential()
    net.add_module("fc1", torch.nn.Linear(16, 8))
    net.add_module("fc2", torch.nn.Linear(8, 3))
    torch.save(net.state_dict(), tmp_path / "mlp.pth")
    x = np.random.default_rng(0).uniform(0, 1, (12, 4, 4, 1)).astype(np.float32)
    y = np.array(convert.load(tmp_path / "mlp.pth", "mlp").model(x)).argmax(-1)
    np.savez(tmp_path / "x.npz", x=x, y=y)
    words = ["attack", "--arch", "mlp", "--weights", str(tmp_path / "mlp.pth"), "--norm", "linf"]
    words += ["--data", str(tmp_path / "x.npz"), "--eps", "1e-4", "--json", "-", "--quiet"]
    words += ["--attacks", "pgd(steps=3), pgd(steps=4, restarts=2), fast(passes=14)"]
    words += ["--points", str(tmp_path / "p.npz"), "--plot", str(tmp_path / "p.png")]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)["attacks"]
    three, twice, fast = found.values()
    assert [*found] == ["pgd(steps=3)", "pgd(steps=4, restarts=2)", "fast(passes=14)"]
    assert (three["settings"]["steps"], three["settings"]["restarts"]) == (3, 1)
    assert three["gradients_per_sample"] <= 3  # A sign step in a corner ends early.
    assert twice["gradients_per_sample"] == 9  # Two runs of four, and one step between them.
    assert fast["settings"] == {"passes": 14}
    assert fast["forwards_per_sample"] <= 14
    with np.load(tmp_path / "p.npz") as points:
        assert points["pgd(steps=4, restarts=2)/x_adv"].shape == x.shape
    words[words.index("linf")], words[words.index("1e-4")] = "l0", "2"
    words[words.index("--attacks") + 1] = "pgd(steps=3), sigma-zero(steps=30)"
    assert main(words) == 0
    pgd, zero = json.loads(capsys.readouterr().out)["attacks"].values()
    assert pgd["max_cost"] in (0, 1, 2)
    assert 0 < zero["transport_cost"] <= 2 * (1 + 1e-6)
    for name in ("apgd-ce", "fast", "wda-star"):
        words[words.index("--attacks") + 1] = name
        assert main(words) == 2
        assert f"{name}: " in (said := capsys.readouterr().err)
        assert "not for norm 0" in said


def test_a_list_is_read_in_linear_time():
    """The longest texts that are read, in shapes that defeat expressions which go back."""
    for text in (
        "(" * 4000,
        "a(" + "b" * 3998,
        "a(" + "()" * 1999,
        "a(b=" * 1000,
        " " * 4000 + "(",
    ):
        for call in (attack_words.read, lambda _, text: attack_words.typed(
            attack_words.Word("pgd", text), {"steps": int}
        )):  # fmt: skip
            with pytest.raises(ValueError, match=r"takes|written"):
                call("--attacks", text)


@pytest.mark.parametrize(
    ("text", "more", "bounded"),
    [
        ("pgd", (), "maximum"),
        ("fast", (), "maximum"),
        ("pgd", ("--kappa", "2"), "average"),
        ("wda++", (), "average"),
        ("wda++", ("--order", "inf"), "maximum"),
        ("wpgd", (), "average"),
    ],
)
def test_whether_eps_bounds_each_sample_or_their_average(text, more, bounded):
    parsed = parser().parse_args([*BASE, "--norm", "linf", "--attacks", text, *more])
    (column,) = attack_command._columns(parsed).values()
    assert attack_command._bounded(column, parsed) == bounded
