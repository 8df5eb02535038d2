"""The command line: what it refuses, prints, writes and returns."""

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import wdjax
from wdjax import data, models, nppr
from wdjax.cli import attack_table, main, options, parser, process
from wdjax.models import convert
from wdjax.report import summary


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A small MLP as a PyTorch file would be, as safetensors, and some images."""
    torch = pytest.importorskip("torch", reason="PyTorch writes the checkpoint")
    folder = tmp_path_factory.mktemp("given")
    torch.manual_seed(0)
    net = torch.nn.Sequential()
    net.add_module("fc1", torch.nn.Linear(16, 8))
    net.add_module("fc2", torch.nn.Linear(8, 3))
    torch.save(net.state_dict(), folder / "mlp.pth")
    rng = np.random.default_rng(0)
    x = rng.uniform(0, 1, (12, 4, 4, 1)).astype(np.float32)
    y = np.array(convert.load(folder / "mlp.pth", "mlp").model(x)).argmax(-1)
    y[0] = (y[0] + 1) % 3
    np.savez(folder / "x.npz", x=x, y=y)
    words = {
        "--arch": "mlp",
        "--weights": str(folder / "mlp.pth"),
        "--data": str(folder / "x.npz"),
        "--norm": "linf",
        "--eps": "8/255",
        "--attacks": "fgsm",
    }
    return x, y, ["attack", *(word for pair in words.items() for word in pair)]


def test_json_goes_to_stdout_alone(given, capsys):
    *_, command = given
    assert main([*command, "--json", "-"]) == 0
    said = capsys.readouterr()
    content = json.loads(said.out)
    assert content["eps"] == 8 / 255
    assert content["attacks"]["fgsm"]["kappa"] == 1.0
    assert "fgsm: 0.9167 clean" in said.err


def test_quiet_says_nothing(given, capsys, tmp_path):
    *_, command = given
    assert main([*command, "--json", str(tmp_path / "new" / "out.json"), "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")
    assert json.loads((tmp_path / "new" / "out.json").read_text())["n"] == 12


def test_a_folder_that_is_no_checkpoint_is_refused_before_the_work(given, capsys, tmp_path):
    *_, command = given
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "note.txt").write_text("keep me")
    words = ["convert", command[command.index("--weights") + 1], "--arch", "mlp"]
    assert main([*words, "--out", str(tmp_path / "mine")]) == 2
    said = capsys.readouterr()
    assert "not a checkpoint" in said.err
    assert not said.out, "nothing was converted"
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["note.txt"]


def test_orders_reach_budgets_of_the_data_set_and_ensembles(given, capsys, tmp_path):
    *_, command = given
    drawn = tmp_path / "row.png"
    command = [*command, "--eps", "0.1", "--order", "2", "--attacks", "wpgd,fast", "--json", "-"]
    assert main([*command, "--plot", str(drawn)]) == 0
    found = json.loads(capsys.readouterr().out)["attacks"]
    assert 0 < found["wpgd"]["transport_cost"] <= 0.1 * (1 + 1e-5)
    assert found["wpgd"]["gradients_per_sample"] == 50  # Of every image: all share the budget.
    assert found["wpgd"]["max_cost"] > 0.1  # Some go farther than all do on average.
    assert found["fast"]["max_cost"] <= 0.1 * (1 + 1e-5)
    assert found["fast"]["forwards_per_sample"] <= 150
    assert drawn.read_bytes().startswith(b"\x89PNG")


def test_flips_that_only_bfloat16_saw_are_counted(given, capsys):
    x, _, command = given
    command = [*command, "--eps", "0.1", "--bfloat16", "--json", "-", "--attacks"]
    assert main([*command, "wda++"]) == 0
    assert 0 <= json.loads(capsys.readouterr().out)["attacks"]["wda++"]["lost_flips"] <= len(x)
    for names, other in (("wda++,fast", "fast"), ("wpgd", "wpgd"), ("table1", "table1")):
        assert main([*command, names]) == 2
        said = capsys.readouterr()
        assert f"not for {other}" in said.err
        assert "clean" not in said.err


def test_table_1_is_a_row_of_known_columns():
    labels = [column.label for column in attack_table.TABLE_1]
    assert len(set(labels)) == len(labels) == 11
    assert {column.name for column in attack_table.TABLE_1} <= set(attack_table.METHODS)


def test_what_an_attack_cannot_do_is_refused_before_the_work(given, capsys):
    *_, command = given
    assert main([*command, "--attacks", "fgsm,cw", "--json", "-"]) == 2
    said = capsys.readouterr()
    assert "norm must be 2" in said.err
    assert "clean" not in said.err
    assert main([*command, "--attacks", "table1", "--kappa", "2", "--json", "-"]) == 2
    assert "would be ignored" in capsys.readouterr().err


def test_points_can_be_attacked_again(given, capsys, tmp_path):
    x, y, command = given
    saved = tmp_path / "points.npz"
    command = [*command, "--attacks", "fgsm,wda++", "--eps", "0.2", "--json", "-"]
    assert main([*command, "--points", str(saved)]) == 0
    content = json.loads(capsys.readouterr().out)
    with np.load(saved) as points:
        for name in ("fgsm", "wda++"):
            moved = np.where(points[f"{name}/weight"] > 0, points[f"{name}/cost"], 0)
            assert moved.max() == pytest.approx(content["attacks"][name]["max_cost"])
            assert points[f"{name}/x_adv"].shape == x.shape
        flipped = points["fgsm/success"] | points["wda++/success"]
        np.testing.assert_array_equal(points["y"], y)
    again = data.load_npz(saved)
    model = convert.load(command[command.index("--weights") + 1], "mlp").model
    wrong = np.argmax(model(again.x), -1) != y
    clean = np.argmax(model(x), -1) == y
    np.testing.assert_array_equal(wrong[clean], flipped[clean])
    np.testing.assert_array_equal(again.x[~flipped], x[~flipped])


@pytest.mark.parametrize("option", ["--json", "--points"])
def test_what_cannot_be_written_is_refused_before_the_work(
    given, capsys, tmp_path, option, monkeypatch
):
    *_, command = given
    monkeypatch.setattr(convert, "load", lambda *a: pytest.fail("the work had begun"))
    out = {"--json": "-"} | {option: str(tmp_path)}
    assert main([*command, *(word for pair in out.items() for word in pair)]) == 2
    assert capsys.readouterr().err == f"wdjax: {tmp_path} is a folder; name a file.\n"


@pytest.mark.parametrize(
    ("option", "name", "said"),
    [
        ("--points", "-", "only --json writes to stdout"),
        ("--plot", "-", "only --json writes to stdout"),
        ("--plot", "p.pdf", "name a file that ends in .png"),
        ("--plot", "p", "name a file that ends in .png"),
    ],
)
def test_files_are_refused_under_names_that_say_something_else(
    given, capsys, tmp_path, option, name, said, monkeypatch
):
    *_, command = given
    monkeypatch.setattr(convert, "load", lambda *a: pytest.fail("the work had begun"))
    monkeypatch.chdir(tmp_path)
    assert main([*command, option, name]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "options",
    [
        ["--points", "{data}"],
        ["--json", "{data}"],
        ["--plot", "{weights}"],
        ["--json", "z.json", "--points", "./z.json"],
        ["--model", "mynet:build", "--json", "mynet.py"],
        ["--model", "nets.mynet:build", "--json", "nets/mynet.py"],
        ["--model", "nets:build", "--json", "./nets/__init__.py"],
    ],
)
def test_no_output_replaces_an_input_or_another_output(given, capsys, tmp_path, options):
    *_, command = given
    data, weights = (Path(command[command.index(name) + 1]) for name in ("--data", "--weights"))
    before = data.read_bytes(), weights.read_bytes()
    options = [str(tmp_path / o) if "z." in o else o for o in options]
    if "--model" in options:
        command = [*command[: command.index("--arch")], *command[command.index("--arch") + 2 :]]
    assert main([*command, *(o.format(data=data, weights=weights) for o in options)]) == 2
    assert "would replace it: name another file" in capsys.readouterr().err
    assert (data.read_bytes(), weights.read_bytes()) == before
    assert not list(tmp_path.iterdir())


def test_an_audit_refuses_its_folder_at_once(tmp_path, capsys):
    (tmp_path / "file").write_text("kept")
    assert main(["audit", "--out", str(tmp_path / "file")]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--attacks", "fgsm,fgsm"], "each once"),
        (["--attacks", ","], "--attacks knows fgsm, pgd"),
        (["--attacks", "wda++", "--kappa", "2"], "--kappa 2 would be ignored"),
        (["--eps", "nan"], "eps must be finite"),
        (["--kappa", "1/2"], "kappa must be"),
    ],
)
def test_bad_input_is_one_line(given, capsys, change, message):
    *_, command = given
    assert main([*command, "--json", "-", *change]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert message in said.err


@pytest.mark.parametrize("text", ["8/", "/255", "1/0", "one", "1/2/3", ""])
def test_what_is_no_number_is_refused(text, capsys):
    with pytest.raises(SystemExit) as ending:
        parser().parse_args(["attack", "--eps", text])
    assert ending.value.code == 2
    assert "must be a number such as 0.03 or 8/255" in capsys.readouterr().err


def test_versions(capsys):
    assert main(["versions"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said == summary.head("versions")
    assert said["versions"]["jax"] == jax.__version__
    with pytest.raises(SystemExit) as ending:
        main(["--version"])
    assert ending.value.code == 0
    assert capsys.readouterr().out == f"wdjax {wdjax.__version__}\n"


@pytest.mark.parametrize(
    "command", [[], ["audit"], ["attack"], ["nppr"], ["convert"], ["versions"]]
)
def test_every_help_has_an_example_and_explains_every_option(command, capsys):
    with pytest.raises(SystemExit):
        main([*command, "--help"])
    said = capsys.readouterr().out
    assert "python -m wdjax" in said.split("example", 1)[1]
    if command == ["attack"]:
        assert all(f"  {name} " in said for name in attack_table.METHODS)


def test_every_attack_of_the_table_says_what_it_does():
    for line in options.glossary(attack_table.METHODS).splitlines():
        assert len(line) <= 88
        assert "`" not in line
    assert all(summary.explained(make) for make in attack_table.METHODS.values())


def test_commands_keep_programs_where_the_user_says(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    assert process.cache_folder() == tmp_path / "wdjax" / "programs"

    def read():
        return jax.config.jax_compilation_cache_dir, jax.config.jax_enable_compilation_cache

    before = read()
    with process.compilation_cache(True):
        # Tests set a folder of their own, which is kept to.
        assert read() == before
    with process.compilation_cache(False):
        assert read()[1] is False
    assert read() == before
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        with process.compilation_cache(True):
            assert read()[0] == str(tmp_path / "wdjax" / "programs")
        assert read()[0] is None
    finally:
        jax.config.update("jax_compilation_cache_dir", before[0])


@pytest.mark.parametrize("where", ["callback", "attribute"])
@pytest.mark.parametrize(
    ("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_a_signal_that_something_swallows_is_heard(number, raised, where, capsys):
    given = []

    def deaf(*_):
        if not given:
            given.append(number)
            signal.raise_signal(number)

    def interrupted():
        with process.terminable():
            if where == "callback":
                gc.collect()  # Its hook is told of what is dropped.
            else:
                with contextlib.suppress(BaseException):
                    deaf()  # As C code does that asks for an attribute.
            time.sleep(10)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    if where == "callback":
        gc.callbacks.append(deaf)
    try:
        with pytest.raises(raised):
            interrupted()
    finally:
        if where == "callback":
            gc.callbacks.remove(deaf)
        assert signal.signal(signal.SIGINT, before) is signal.default_int_handler
    assert given
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("number", "code", "line"),
    [(signal.SIGINT, 130, b"wdjax: interrupted\n"), (signal.SIGTERM, 143, b"wdjax: terminated\n")],
)
def test_signals_end_a_command_in_one_line(tmp_path, number, code, line):
    out = tmp_path / "audit"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    # Whoever runs the tests in the background makes their children deaf to SIGINT.
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    program = heard + "from wdjax.cli import process_main; process_main()"
    command = [sys.executable, "-c", program, "audit", "--out", str(out), "--samples", "20"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=environment) as running:
        while not out.is_dir() and running.poll() is None:
            time.sleep(0.05)  # The folder is made before the work.
        running.send_signal(number)
        _, said = running.communicate(timeout=60)
    assert (running.returncode, said) == (code, line)
    assert not list(out.iterdir())


def test_nppr_says_what_survives(given, capsys, tmp_path):
    _x, y, command = given
    words = command[1 : command.index("--attacks")]
    out = tmp_path / "nppr.json"
    words = ["nppr", *words, "--eps", "0.3", "--steps", "40", "--draws", "64", "--latent", "8"]
    words += ["--components", "2", "--mode", "label", "--json", str(out)]
    assert main(words) == 0
    said = capsys.readouterr()
    content = json.loads(out.read_text())
    assert content["schema"] == "wdjax.results/1"
    assert [*content["nppr"]] == ["label"]
    assert "NPPR label" in said.out
    assert content["fitted_on"] + content["measured_on"] == len(y)
    uniform = content["pr"]["uniform"]
    for row in (*content["nppr"].values(), *content["pr"].values()):
        low, high = row["interval_of_population"]  # Of six inputs: even if all of them agree.
        assert low + 0.2 < row["value"] < high + 1e-9
        assert 0.4 < high - low <= 1
    assert content["rare"] == []
    for row in content["nppr"].values():
        low, high = row["interval_of_these"]
        assert low <= row["value"] <= high
        assert row["learnt"]
        assert row["value"] <= uniform["value"] + 1e-9
        assert content["ar"]["strong"] <= row["value"] + 1e-9
    ar, rows = content["ar"], [*content["nppr"].values(), *content["pr"].values()]
    assert ar["strong"] == pytest.approx(np.mean(ar["per_sample"]))
    held = np.array(ar["per_sample"]) == 1
    for row in rows:
        held &= np.array(row["per_sample"]) == 1
    assert ar["least"] == pytest.approx(held.mean())
    curve = uniform["bounded_ratio"]
    assert curve["value"][0] == pytest.approx(uniform["value"])
    assert np.all(np.diff(curve["value"]) <= 0)
    assert np.shape(curve["interval_of_these"]) == np.shape(curve["interval_of_population"])
    assert len(curve["ratio"]) == len(curve["value"]) == 7
    assert all(content["inequalities"].values())
    assert len(content["inequalities"]) == 4
    fields = content["prbench"]
    assert {"acc", "PR(0.03)", "GE_PR(0.12)", "ProbAcc(0.01)"} <= set(fields)
    assert main([*words, "--mode", "both"]) == 2
    assert "--mode must be some of" in capsys.readouterr().err


def test_nppr_marks_rare_failures_on_which_two_methods_disagree(
    given, capsys, tmp_path, monkeypatch
):
    *_, command = given
    out = tmp_path / "nppr.json"
    words = ["nppr", *command[1 : command.index("--attacks")], "--steps", "2", "--draws", "20"]
    words += ["--latent", "2", "--components", "2", "--mode", "label", "--json", str(out)]
    importance, seen = nppr.importance, []

    def misses(*given, **how):
        """The second sample's answer, as if a region had been missed."""
        found = importance(*given, **how)
        seen.append(found._replace(runs=found.runs / (100 if len(seen) == 1 else 1)))
        return seen[-1]

    monkeypatch.setattr(nppr, "importance", misses)
    assert main([*words, "--eps", "0.6", "--rare", "3"]) == 0
    said, rows = capsys.readouterr(), json.loads(out.read_text())["rare"]
    assert len(rows) == 3
    for row, found in zip(rows, seen):
        low, high = row["interval"]
        assert 0 <= low <= row["value"] <= high
        assert (row["found"], row["agrees"]) == (found.found, found.agrees)
        assert f"rare, held-out sample {row['sample']}: {row['value']:.2g}" in said.out
        assert len(row["remarks"]) == (not row["agrees"])
        for remark in row["remarks"]:
            assert f"CAREFUL, sample {row['sample']}: {remark}" in said.err
    assert (rows[1]["agrees"], rows[2]["agrees"]) == (False, True)
    assert "further apart than chance allows" in rows[1]["remarks"][0]
    assert rows[1]["interval"][1] > rows[1]["splitting"] > 20 * rows[1]["value"]
    assert main([*words, "--norm", "l2", "--rare", "3"]) == 2
    assert "--rare is for --norm linf" in capsys.readouterr().err


def test_certify_says_what_is_proved(given, capsys, tmp_path):
    *_, command = given
    command = ["certify", *command[1:-2]]
    radii, kept = tmp_path / "radii.npz", tmp_path / "kept"
    out = ["--json", "-", "--radii", str(radii), "--checkpoint", str(kept), "--batch-size", "5"]
    assert main([*command, *out]) == 0
    content = json.loads(capsys.readouterr().out)
    saved = np.load(radii)
    assert content["claim"] == "float program"
    assert content["verified"] == saved["verified"].sum() > 0
    assert content["clean_accuracy"] == pytest.approx(11 / 12)
    assert not saved["verified"][0]
    left = content["certified_accuracy"]
    assert left["omega_1"] <= left["omega_2"] <= left["omega_inf"] <= content["clean_accuracy"]
    assert left["omega_inf"] >= content["verified"] / 12 - 1e-9
    assert 0 < content["compile_seconds"] <= content["seconds"]
    # The work was saved: a second run goes on from its end.
    assert main([*command, *out]) == 0
    assert json.loads(capsys.readouterr().out)["verified"] == content["verified"]
    assert main([*command, "--json", "-", "--method", "interval"]) == 0
    assert json.loads(capsys.readouterr().out)["verified"] <= content["verified"]
    assert main([*command, "--json", "-", "--method", "lipschitz"]) == 0
    by_slopes = json.loads(capsys.readouterr().out)
    assert by_slopes["claim"] == "exact arithmetic"
    assert by_slopes["verified"] <= content["verified"]
    loss = by_slopes["expected_loss"]
    assert 0 < loss["clean_loss"] < loss["certified_loss"]
    rise = loss["lipschitz_constant"] * by_slopes["eps"]
    assert loss["certified_loss"] == pytest.approx(loss["clean_loss"] + rise)
    assert main([*command, "--method", "lipschitz", *out]) == 2  # It keeps no checkpoint.
    assert main([*command, "--json", "-", "--method", "bab", "--seconds", "0.1"]) == 0
    closed = json.loads(capsys.readouterr().out)
    assert closed["verified"] >= content["verified"]
    assert sum(closed["ended"].values()) == 12, "how branch and bound ended"
    assert main([*command, "--json", "-", "--method", "bab", "--seconds", "0"]) == 2
    assert main([*command, "--json", "-", "--eps", "-1"]) == 2


def test_certify_smooths_any_model(given, capsys, tmp_path):
    *_, command = given
    command = ["certify", *command[1:-2], "--norm", "l2", "--eps", "1/20", "--json", "-"]
    radii = tmp_path / "radii.npz"
    smooth = [*command, "--method", "smoothing", "--sigma", "1/10"]
    assert main([*smooth, "--votes", "2000", "--radii", str(radii)]) == 0
    content = json.loads(capsys.readouterr().out)
    saved = np.load(radii)
    assert content["noise"] == "gaussian"
    assert content["claim"] == "smoothed classifier, each radius at level 0.999"
    assert content["verified"] == saved["verified"].sum() == (saved["radius"] >= 0.05).sum() > 0
    assert content["votes_per_sample"] == saved["votes"].mean() < 2100
    left = content["certified_accuracy"]
    assert left["omega_1"] <= left["omega_2"] <= left["omega_inf"] <= content["clean_accuracy"]
    assert main([*smooth, "--votes", "500", "--eps", "0"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert 0 < content["verified"] == round(12 * content["clean_accuracy"]) < 12
    fixed = [*smooth, "--votes", "50", "--test", "clopper-pearson", "--noise", "laplace"]
    assert main([*fixed, "--norm", "l1"]) == 0
    assert json.loads(capsys.readouterr().out)["votes_per_sample"] == 150
    images = ["--norm", "w1", "--sigma", "1/100", "--votes", "200", "--eps", "1/1000"]
    assert main([*smooth, *images]) == 0
    content = json.loads(capsys.readouterr().out)
    assert (content["noise"], content["norm"]) == ("flow", "w1")
    moved = [*command, "--norm", "w1", "--eps", "1/1000", "--method", "crown", "--steps", "2"]
    assert main([*moved, "--json", "-", "--radii", str(radii)]) == 0
    content = json.loads(capsys.readouterr().out)
    assert (content["norm"], content["method"], content["claim"]) == (
        "w1",
        "crown",
        "float program",
    )
    saved = np.load(radii)
    assert content["verified"] == saved["verified"].sum() > 0
    assert np.all(saved["radius"][saved["verified"]] >= 1e-3)
    for words, message in (
        (["--norm", "w1", "--method", "lipschitz"], "--norm w1 take another of interval, crown"),
        (["--method", "smoothing"], "--sigma S"),
        (["--sigma", "1"], "would be ignored"),
        (["--alpha", "0.1"], "would be ignored"),
        (["--method", "crown", "--seconds", "5"], "--seconds would be ignored"),
        (["--method", "lipschitz", "--steps", "3"], "--steps would be ignored"),
        (["--method", "smoothing", "--sigma", "1", "--norm", "linf"], "can be none"),
        (["--method", "smoothing", "--sigma", "1", "--noise", "laplace"], "can be gaussian"),
        (["--method", "smoothing", "--sigma", "-1"], "sigma must be finite"),
    ):
        assert main([*command, *words]) == 2
        assert message in capsys.readouterr().err


def test_games_are_played_and_gone_on_with(capsys, tmp_path):
    command = ["game", "--defense", "urejectron", "--samples", "20"]
    command += [
        "--attacks",
        "transfer(restarts=2)",
        "--draws",
        "2",
        "--checkpoint",
        str(tmp_path / "games"),
        "--json",
        "-",
    ]
    assert main(command) == 0
    said = capsys.readouterr()
    (entry,) = json.loads(said.out)["games"]
    found = entry["attacks"]["transfer(restarts=2)"]
    assert found["settings"]["restarts"] == 2
    assert entry["n"] == 20
    low, high = found["one_shot"]["interval"]
    assert low <= found["one_shot"]["value"] <= high
    assert found["one_shot"]["value"] < 0.5 < found["one_shot_clean"]["value"]
    assert found["max_cost"] <= 0.15 * (1 + 1e-6)
    assert found["rejection"]["0.05"]["rejected"] <= 0.05
    assert entry["cost_multiple"] > 1
    assert "urejectron seed 0 transfer(restarts=2)" in said.err
    assert main(command) == 0  # From the checkpoint, to the same numbers.
    assert json.loads(capsys.readouterr().out)["games"] == [entry]


@pytest.fixture(scope="module")
def own_games(tmp_path_factory):
    """The words of a game around a net with normalisation, and the folder of its files."""
    folder, rng = tmp_path_factory.mktemp("own"), np.random.default_rng(0)
    net = models.norm_mlp((4, 8, 3), key=jax.random.key(0))
    (folder / "gamenet.py").write_text(
        "import jax, wdjax\nfrom wdjax import models\n\n\ndef build():\n"
        "    return models.norm_mlp((4, 8, 3), key=jax.random.key(0))\n"
        "\n\ndef stepped():\n"
        "    return wdjax.Model(lambda net, x: jax.numpy.round(net(x), 1), build())\n"
    )
    for name, n, shape in (("x", 9, (4,)), ("train", 140, (4,)), ("other", 140, (5,))):
        x = rng.random((n, *shape), np.float32)
        np.savez(folder / f"{name}.npz", x=x, y=np.asarray(net(x[:, :4])).argmax(-1))
    words = ["game", "--model", "gamenet:build", "--data", str(folder / "x.npz")]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield [*words, "--eps", "0.07", "--attacks", "transfer", "--draws", "2"], folder


def test_games_are_about_the_inputs_that_were_played(own_games, capsys):
    words, folder = own_games
    assert main([*words, "--defense", "dent", "--samples", "3", "--json", "-"]) == 0
    told, given = json.loads(capsys.readouterr().out), np.load(folder / "x.npz")
    assert told["games"][0]["n"] == told["n"] == 2
    assert told["data_sha256"] == summary.sha256(given["x"][:2], given["y"][:2].astype(np.int32))
    assert told["remarks"] == [
        "dent seed 0 is played with the first 2 of 3 inputs: rounds of 1 come in pairs"
    ]


@pytest.mark.parametrize("defense", [None, "dent", "rmc", "urejectron"])
def test_games_are_played_around_a_model(own_games, defense, capsys):
    words, folder = own_games
    words = words + (["--defense", defense, "--samples", "2"] if defense else [])
    if defense in ("rmc", "urejectron"):
        assert main([*words, "--json", "-"]) == 2
        assert "needs training data: --train FILE.npz" in capsys.readouterr().err
        assert main([*words, "--train", str(folder / "other.npz"), "--json", "-"]) == 2
        assert "other.npz has images [5]" in capsys.readouterr().err
        words += ["--train", str(folder / "train.npz")]
    assert main([*words, "--json", "-"]) == 0
    told = json.loads(capsys.readouterr().out)
    (game,) = told["games"]
    assert game["defense"].startswith(defense or "purify")
    assert (game["eps"], game["n"], told["eps"]) == (0.07, 2 if defense else 9, 0.07)
    found = game["attacks"]["transfer"]
    assert found["static_clean_accuracy"]["value"] == 1
    assert found["max_cost"] <= 0.07 * (1 + 1e-6)


def test_games_say_that_a_model_has_no_gradients_and_keep_a_radius_of_zero(own_games, capsys):
    words, _ = own_games
    told = {}
    for build, eps in (("build", "0"), ("stepped", "0.07")):
        changed = [*words, "--json", "-"]
        changed[2], changed[6] = f"gamenet:{build}", eps
        assert main(changed) == 0
        told[build] = json.loads(capsys.readouterr().out)
    assert told["build"]["remarks"] == []
    assert told["build"]["games"][0]["attacks"]["transfer"]["max_cost"] == 0
    (said,) = [text for text in told["stepped"]["remarks"] if "zero gradients" in text]
    assert said.startswith("PGD on the model alone: 100% zero gradients")


def test_games_around_a_model_refuse_what_does_not_fit(own_games, capsys):
    words, folder = own_games
    train = ["--train", str(folder / "train.npz")]
    for others, message in (
        (words[:3], "needs --data FILE.npz"),
        (words[:5], "needs --eps R"),
        (["game", *words[3:5]], "--data would be ignored"),
        ([*words, *train], "--train would be ignored"),
        ([*words, "--defense", "tadv"], "trains nets of its own"),
        ([*words, "--defense", "nope"], "--defense knows rmc"),
    ):
        assert main([*others, "--json", "-"]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--defense", "nope"], "--defense knows rmc"),
        (["--defense", "dann,dann"], "each once"),
        (["--seeds", "0,x"], "whole numbers"),
        (["--seeds", ""], "whole numbers"),
        (["--defense", "urejectron", "--attacks", "fpa"], "has an attack"),
    ],
)
def test_games_refuse_what_they_do_not_know(capsys, words, reason):
    assert main(["game", *words, "--json", "-"]) == 2
    assert reason in capsys.readouterr().err
