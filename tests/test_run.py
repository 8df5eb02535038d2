"""``run``: many models and methods from one file, killed, damaged, repeated, and one table."""

import contextlib
import importlib.util
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from test_fuzz_argv import judged
from test_page import Reader
from test_shards import timeless

import wdjax
from wdjax import attacks, models
from wdjax.cli import attack_table, engines, main, run_command
from wdjax.engine import driver
from wdjax.files import persist

ROOT = Path(wdjax.__file__).parents[1]
ROWS = 7
JOBS = """
shards = 2
[models.a]
model = "a.safetensors"
info = { link = "https://example.org", additional_data = false, venue = "none" }
[models.b]
model = "b.safetensors"
only = { methods = ["autoattack"] }
[data.squares]
data = "x.npz"
[threats.Linf]
norm = "linf"
eps = "8/255"
batch-size = 3
[threats.mass]
k = "1,2"
window = "3"
batch-size = 3
[methods.autoattack]
command = "attack"
attacks = "autoattack,fgsm"
only = { threats = ["Linf"] }
[methods.crown]
command = "certify"
method = "crown"
steps = 2
shards = 3
only = { threats = ["Linf"] }
[methods.nppr]
command = "nppr"
steps = 2
draws = 20
latent = 2
components = 2
only = { threats = ["Linf"] }
[methods.mass]
command = "image-attack"
only = { threats = ["mass"] }
"""


class Here:
    """A command line that is done at once, in this process."""

    def __init__(self, words, log):
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(log.open("a"))
            stack.enter_context(contextlib.redirect_stdout(file))
            stack.enter_context(contextlib.redirect_stderr(file))
            code = main([*words])
        self._fault = f"exit code {code}" if code else ""

    def done(self):
        return True

    def fault(self):
        return self._fault


def short(model, x, y, *, eps, ball, checkpoint=None, every=0.0, order=1.0, **how):
    """In place of AutoAttack, which takes its time."""
    return driver.search(attacks.PGD(ball, steps=2), model, x, y, eps=eps, **how)


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """Two nets, seven images, and their jobs; parts are done in this process."""
    folder = tmp_path_factory.mktemp("run")
    x = np.random.default_rng(0).uniform(0, 1, (ROWS, 4, 4, 1)).astype(np.float32)
    for seed, name in enumerate("ab"):
        net = models.mlp((16, 8, 3), key=jax.random.key(seed))
        architecture = {"family": "mlp", "options": {"sizes": [16, 8, 3]}, "normalize": ""}
        persist.save_model(folder / f"{name}.safetensors", net, architecture)
        if name == "a":
            np.savez(folder / "x.npz", x=x, y=np.asarray(net(x)).argmax(-1))
    (folder / "jobs.toml").write_text(JOBS)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(engines, "Child", Here)
        patch.setitem(attack_table.SEARCHES, "autoattack", short)
        yield folder


@pytest.fixture(scope="module")
def ran(given):
    """What the run wrote."""
    assert main(["run", "jobs.toml", "--out", "out", "--json", "results.json", "--quiet"]) == 0
    return json.loads((given / "results.json").read_text())


def test_every_job_is_what_its_command_says(given, ran):
    names = [" ".join(row["job"]) for row in ran["jobs"]]
    assert names == [
        "a squares Linf autoattack", "a squares Linf crown", "a squares Linf nppr",
        "a squares mass mass", "b squares Linf autoattack",
    ]  # fmt: skip
    subject = ["--model", "a.safetensors", "--data", "x.npz", "--batch-size", "3", "--json", "one"]
    ball = ["--norm", "linf", "--eps", "8/255"]
    nppr = ["--steps", "2", "--draws", "20", "--latent", "2", "--components", "2"]
    commands = [
        ["attack", *ball, "--attacks", "autoattack,fgsm"],
        ["certify", *ball, "--method", "crown", "--steps", "2"],
        ["nppr", *ball, *nppr],
        ["image-attack", "--k", "1,2", "--window", "3"],
    ]
    for row, words in zip(ran["jobs"], commands):
        assert main([*words, *subject, "--quiet"]) == 0
        whole = json.loads((given / "one").read_text())
        assert timeless(json.loads((given / row["file"]).read_text())) == timeless(whole)
        counted = 4 if words[0] == "nppr" else ROWS
        assert (row["command"], row["n"]) == (words[0], counted)
        assert row["clean_accuracy"] == whole["clean_accuracy"]
    titles, *lines = run_command.table(ran)
    shares_of = {line[3]: line[titles.index("of")] for line in lines}
    assert shares_of == dict.fromkeys(["autoattack", "crown", "mass"], "all") | {
        "nppr": "correctly classified samples of the second half"
    }
    shares = [row["shares"] for row in ran["jobs"]]
    first = json.loads((given / ran["jobs"][0]["file"]).read_text())
    assert {row["eps"] for row in ran["jobs"][:3]} == {8 / 255}
    assert [row["average"] for row in ran["jobs"][:2]] == [[], []]
    assert shares[0] == {n: own["attacked_accuracy"] for n, own in first["attacks"].items()}
    assert {*shares[1]} == {f"certified, Omega_{order}" for order in ("inf", "2", "1")}
    assert {"AR", "NPPR joint", "PR uniform"} < shares[2].keys()
    assert [*shares[3]] == ["1", "2"]
    assert ran["seconds"] == pytest.approx(sum(row["seconds"] for row in ran["jobs"]))
    left = {path.name for path in (given / "out").rglob("part-*")}
    assert all(name.endswith(".log") for name in left), "a checkpoint of a finished part"


def test_an_entry_for_robustbench_says_what_was_measured(given, ran):
    place = given / "out/model_info/squares/Linf"
    assert {path.name for path in place.iterdir()} == {"a.json", "b.json"}
    row = ran["jobs"][0]
    assert json.loads((place / "a.json").read_text()) == {
        "name": "a",
        "link": "https://example.org",
        "additional_data": False,
        "venue": "none",
        "dataset": "squares",
        "eps": "8/255",
        "clean_acc": "100.00",
        "autoattack_acc": f"{100 * row['shares']['autoattack']:.2f}",
    }


def test_an_entry_for_robustbench_is_of_the_defaults_and_of_most_samples(given):
    text = JOBS[: JOBS.index("[models.b]")] + JOBS[JOBS.index("[data.squares]") :]
    text = text[: text.index("[threats.mass]")].replace("8/255", "0.2")
    for name, more in {"heavy": "kappa = 3", "quick": "samples = 3", "full": "seed = 1"}.items():
        text += f'[methods.{name}]\ncommand = "attack"\nattacks = "autoattack"\n{more}\n'
    Path("three.toml").write_text(text)
    assert main(["run", "three.toml", "--json", "three.json", "--quiet"]) == 0
    content = json.loads(Path("three.json").read_text())
    heavy, quick, full = (row["shares"]["autoattack"] for row in content["jobs"])
    assert [row["average"] for row in content["jobs"]] == [["autoattack"], [], []]
    entry = json.loads(Path("three/model_info/squares/Linf/a.json").read_text())
    assert len({heavy, quick, full}) == 3
    assert entry["autoattack_acc"] == f"{100 * full:.2f}"
    assert content["remarks"] == [
        "model_info/squares/Linf/a.json is of full, 7 samples: autoattack was run by quick, full"
    ]
    text = text[: text.index("[methods.quick]")]
    Path("heavy.toml").write_text(text)
    assert main(["run", "heavy.toml", "--quiet"]) == 0
    assert not Path("heavy/model_info").exists()


def test_the_page_has_a_table_of_models_for_every_threat(given, ran):
    shown = (given / "out" / "report.html").read_text()
    assert Reader(shown).inside == []
    for heading in ("<h2>squares, Linf: linf, eps 0.0313725</h2>", "<h2>squares, mass</h2>"):
        assert shown.count(heading) == 1
    rows = ran["jobs"]
    for share in {share for row in rows for share in row["shares"].values()}:
        assert f'data-value="{share!r}"' in shown
    assert shown.count('<tr><th scope="row">') == 3  # Of a twice, of b once.
    mixed, alike = (
        re.findall(r'<th scope="col">(.*?)</th>', part) for part in shown.split("<h2>")[1:]
    )
    assert [title for title in mixed if title.endswith((": n", ": clean"))] == [
        f"{method}: {what}" for method in ("autoattack", "crown", "nppr") for what in ("n", "clean")
    ]
    halved = {title for title in mixed if "of correctly classified samples" in title}
    assert halved == {title for title in mixed if re.match("nppr: (AR|PR|NPPR)", title)} != set()
    assert alike[:3] == ["model", "n", "clean"]
    assert sum(len(row["remarks"]) for row in rows) == shown.count('<li class="fails">') > 0
    assert "http" not in shown


def again(capsys, *more):
    """The exit code of the same run once more, its table and what it said."""
    code = main(["run", "jobs.toml", "--out", "out", *more])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_nothing_is_done_twice_but_what_is_damaged(given, ran, capsys):
    """A damaged part is named; what is there is merged anew; other work is refused."""
    begun, merges = [], []

    class Counted(Here):
        def __init__(self, words, log):
            (merges if words[0] == "merge" else begun).append(words)
            super().__init__(words, log)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines, "Child", Counted)
        code, said, _ = again(capsys)
        assert (code, begun) == (0, [])
        merges.clear()
        lines = [line for line in said.splitlines() if ", merge: " not in line]
        rows = sum(len(row["shares"]) for row in ran["jobs"])
        assert [line.startswith("CAREFUL") for line in lines].index(True) == 1 + rows
        assert sum(line.startswith("CAREFUL, a squares Linf nppr: ") for line in lines) == 3
        crown = given / "out/a/squares/Linf/crown"
        whole = (crown / "result.json").read_text()
        path = crown / "result.json.1-of-3.safetensors"
        content = path.read_bytes()
        changed = content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]
        for spoilt in (changed, content.replace(b'"wdjax"', b'"wdjaw"'), content[:50], b""):
            path.write_bytes(spoilt)
            (crown / "part-1").mkdir()  # As a kill leaves a checkpoint that is being removed.
            (crown / "part-1" / "rest").touch()
            code, said, err = again(capsys)
            assert code == 0
            assert f"{path.relative_to(given)} is damaged, and is done again" in err
            assert [words[0] for words in begun] == ["certify"]
            assert "--shard=1/3" in begun[0]
            assert len(merges) == len(ran["jobs"])
            assert "11/11 a squares Linf crown, part 1/3" in said
            begun.clear()
            merges.clear()
        assert timeless(json.loads((crown / "result.json").read_text())) == timeless(
            json.loads(whole)
        )
        (crown / "result.json").write_text(whole[:100])
        assert again(capsys)[0] == 0
        for other in ("steps = 3\nshards", "steps = 2\nsamples = 7\nshards", "shards"):
            (given / "jobs.toml").write_text(JOBS.replace("steps = 2\nshards", other))
            code, _, err = again(capsys)
            (given / "jobs.toml").write_text(JOBS)
            assert code == 2
            assert "1-of-3.safetensors is of other work, certify" in err
            assert not begun


def test_a_result_is_never_that_of_another_model(given, ran, capsys, monkeypatch):
    """Whatever the dates of files say: each part is compared with the model, data and code."""
    (given / "own_code.py").write_text(
        "import jax\nfrom wdjax import models\ndef build():\n"
        "    return models.mlp((16, 8, 3), key=jax.random.key(0))\n"
    )
    job = JOBS[: JOBS.index("[models.b]")] + JOBS[JOBS.index("[data.squares]") :]
    job = job[: job.index("[methods.crown]")].replace("a.safetensors", "now.safetensors")
    Path("old.toml").write_text(job)
    Path("coded.toml").write_text(job.replace("now.safetensors", "own_code:build"))
    shutil.copy2("a.safetensors", "now.safetensors")
    for name in ("old", "coded"):
        assert main(["run", f"{name}.toml", "--json", "old.json", "--quiet"]) == 0
        result = next(Path(name).rglob("result.json"))
        whole = result.read_text()
        result.write_text(whole.replace('"n": 7', '"n": 8'))
        assert main(["run", f"{name}.toml", "--json", "old.json", "--quiet"]) == 0
        assert timeless(json.loads(result.read_text())) == timeless(json.loads(whole))
    shutil.copy2("b.safetensors", "now.safetensors")
    os.utime("now.safetensors", (0, 0))
    code = Path("own_code.py").read_text().replace("key(0)", "key(1)")
    Path("own_code.py").write_text(code)
    monkeypatch.delitem(sys.modules, "own_code")
    capsys.readouterr()
    for name in ("old", "coded"):
        assert main(["run", f"{name}.toml", "--json", "old.json", "--retries", "0", "--quiet"]) == 2
        assert "1 of 1 jobs failed" in capsys.readouterr().err
        content = json.loads(Path("old.json").read_text())
        assert content["jobs"] == []
        assert "not those of" in content["remarks"][0]


def test_a_part_that_fails_is_begun_again_and_then_told(given, ran, capsys, monkeypatch):
    """The others are done, and their table is written."""
    fails = {}

    class Failing(Here):
        def __init__(self, words, log):
            name = next((word for word in words if word.startswith("--shard")), "")
            fails[name] = fails.get(name, 0) + 1
            bad = words[0] == "certify" and fails[name] <= many
            super().__init__(["certify", "--eps=nothing"] if bad else words, log)

    monkeypatch.setattr(engines, "Child", Failing)
    (given / "some.toml").write_text(JOBS[: JOBS.index("[methods.nppr]")])
    how = ["run", "some.toml", "--json", "some.json", "--retries", "1"]
    many = 1
    assert main(how) == 0
    said = capsys.readouterr()
    assert "crown, part 1/3: exit code 2: wdjax certify" in said.err
    assert said.err.count("begun again") == 3
    assert " left\n" in said.out
    rows = json.loads((given / "some.json").read_text())["jobs"]
    assert len(rows) == 3
    for row in rows:
        assert row["shares"] == next(o["shares"] for o in ran["jobs"] if o["job"] == row["job"])
    many = 9
    fails.clear()
    shutil.rmtree(given / "some/a/squares/Linf/crown")
    assert main(how) == 2
    assert "wdjax: 1 of 3 jobs failed: a squares Linf crown: exit" in capsys.readouterr().err
    content = json.loads((given / "some.json").read_text())
    assert len(content["jobs"]) == 2
    assert "part-" in content["remarks"][0]
    assert fails == {"": 2} | {f"--shard={number}/3": 2 for number in (1, 2, 3)}


def with_(change, text=JOBS):
    old, new = change
    assert old in text
    return text.replace(old, new, 1)


BAD = {
    "no TOML": ("[models.a]", "[models.a"),
    "is no TOML": ("shards = 2", "shards = " + "[" * 5000),
    "unknown key 'model'; there are": ("[models.a]", "[model.a]"),
    "a table [data.NAME] is needed": ('[data.squares]\ndata = "x.npz"', ""),
    "cluster must be a table, got '3'": ("shards = 2", "shards = 2\ncluster = 3"),
    "shards must be a whole number, got 'two'": ("shards = 2", "shards = 'two'"),
    "shards must be a whole number, got 'True'": ("shards = 2", "shards = true"),
    "shards from 1 to 999999; got 'attack' and 0": ("shards = 2", "shards = 0"),
    "of the name a folder is made": ("[models.a]", '[models."../a"]'),
    "models.a must be a table": ('[models.a]\nmodel = "a.safetensors"', "[models]\na = 1"),
    "command must be text, got nothing": ('command = "attack"', ""),
    "command must be one of": ('command = "attack"', 'command = "audit"'),
    "info must be a table, got 'x'": ("info = {", "info = 'x'\nzz = {"),
    "info says 'clean_acc = 99.00'": ("venue =", "clean_acc = '99.00', venue ="),
    "info says 'venue = 1979-05-27'": ('venue = "none"', "venue = 1979-05-27"),
    "unrecognized arguments: --info={}": ('data = "x.npz"', 'data = "x.npz"\ninfo = "{}"'),
    "unrecognized arguments: --shards=3": ('norm = "linf"', 'norm = "linf"\nshards = 3'),
    "unrecognized arguments: --stepz=2": ("steps = 2", "stepz = 2"),
    "steps must be text, a number, true or false": ("steps = 2", "steps = [2]"),
    "'Steps' is no option's name": ("steps = 2", "Steps = 2"),
    "--steps must be a whole number of at least 1": ("steps = 2", "steps = -2"),
    "--json is what the run says": ("steps = 2", "json = 'x'"),
    "--points is what the run says": ('command = "attack"', 'command = "attack"\npoint = "x"'),
    "--shard is what": ("steps = 2", "shard = '1/2'"),
    "eps is said twice, as 8/255 and 1": ("steps = 2", "eps = 1"),
    "arguments are required: --eps": ('eps = "8/255"', ""),
    "there is no absent.npz, its --data": ("x.npz", "absent.npz"),
    "there is no absent.safetensors, its --model": ("a.safetensors", "absent.safetensors"),
    "arch needs the checkpoint": ('model = "a.safetensors"', 'arch = "mlp"'),
    "--attacks knows": ("autoattack,fgsm", "autoattack,fgms"),
    "help": ("steps = 2", "help = true"),
    "only must list names of": ('methods = ["autoattack"]', 'methods = ["moss"]'),
    "excluded by an only": (
        JOBS[JOBS.index("[methods.autoattack]") :],
        '[methods.autoattack]\ncommand = "attack"\nonly = { models = [] }',
    ),
}


@pytest.mark.parametrize("said", BAD)
def test_a_bad_file_is_refused_before_any_work(said, given, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(engines, "Child", None)
    text = with_(BAD[said])
    (tmp_path / "bad.toml").write_text(text)
    assert main(["run", str(tmp_path / "bad.toml"), "--out", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert line.startswith(f"wdjax: {tmp_path / 'bad.toml'}")
    assert not any(path.is_file() for path in (tmp_path / "out").rglob("*"))


def test_files_by_chance_are_refused_in_one_line(given, tmp_path, monkeypatch):
    """Pieces of a good file cut out, doubled and spoilt: one line, or the first part is begun."""

    class Nowhere:
        def __init__(self, words, log):
            raise ValueError("a part is begun")

    monkeypatch.setattr(engines, "Child", Nowhere)
    wrong = {}
    for seed in range(60):
        rng = np.random.default_rng(seed)
        lines = JOBS.splitlines()
        for _ in range(rng.integers(1, 4)):
            place = rng.integers(len(lines))
            piece = rng.choice(["", "[]", "x = nan", "only = 3", "\x00", "é = 1", "[" * 99, "= ="])
            lines[place] = str(rng.choice([piece, lines[rng.integers(len(lines))]]))
        (tmp_path / "chance.toml").write_text("\n".join(lines))
        fault = judged(["run", str(tmp_path / "chance.toml"), "--out", str(tmp_path / "out")])
        if fault:
            wrong[fault[:90]] = seed
    assert wrong == {}


@pytest.fixture
def kills(monkeypatch, tmp_path):
    """The module of the full kills, with one model, in two parts, in the present folder."""
    monkeypatch.syspath_prepend(ROOT / "bench")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.chdir(tmp_path)
    import kills

    kills.run_given(tmp_path, 1, 2)
    return kills


def test_a_killed_run_ends_as_if_nobody_had_disturbed_it(kills, tmp_path):
    """Three times with all of its processes; and a damaged part is named and done again."""
    dice = random.Random(0)
    kills.kill_run(tmp_path, dice, 3, 9)
    kills.spoil(tmp_path, dice)
    # Nothing is left but to merge again.
    run = [sys.executable, "-m", "wdjax", "run", "jobs.toml", "--out", "out", "--quiet"]
    subprocess.run(run, check=True)
    attack = "pgd(steps=20, restarts=2, random_start=true), wda(steps=20)"
    words = ["--arch", "mlp", "--weights", "0.safetensors", "--data", "digits.npz", *kills.LINF]
    words += ["--attacks", attack, "--batch-size", "4", "--json", "whole.json", "--quiet"]
    assert main(["attack", *words]) == 0
    expected = kills.timeless(json.loads((tmp_path / "whole.json").read_text()))
    assert kills.run_results(tmp_path)["out/mlp0/digits/Linf/attacks/result.json"] == expected


@pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_the_run(number, kills, tmp_path):
    """A signal to the run alone is passed on; if it is killed, its processes notice."""
    run = [sys.executable, "-m", "wdjax", "run", "jobs.toml"]
    child = subprocess.Popen(run, stderr=subprocess.PIPE, text=True, cwd=tmp_path)

    def alive():
        own = {
            path.parent.name for path in Path("/proc").glob("[0-9]*/cwd") if _leads(path, tmp_path)
        }
        return own - {str(os.getpid())}

    while len(alive()) < 2 and child.poll() is None:
        time.sleep(0.05)
    child.send_signal(number)
    said = child.communicate(timeout=60)[1]
    assert child.returncode == {signal.SIGTERM: 143, signal.SIGKILL: -9}[number], said
    until = time.monotonic() + 30
    while alive() and time.monotonic() < until:
        time.sleep(0.05)
    assert alive() == set()


def _leads(link, folder):
    try:
        return link.resolve() == folder.resolve()
    except OSError:  # Of a process that has just ended.
        return False


def test_without_submitit_a_cluster_is_refused(kills, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "submitit", None)
    assert main(["run", "jobs.toml", "--cluster", "slurm"]) == 2
    assert "pip install 'wdjax[cluster]'" in capsys.readouterr().err


def test_a_cluster_does_the_same(kills, tmp_path):
    """By submitit's processes on this machine; settings that it does not know are refused."""
    if importlib.util.find_spec("submitit") is None:  # Its import takes pytest's log away.
        pytest.skip("the extra [cluster] is not installed")

    def ended(*words):
        return subprocess.run(
            [sys.executable, "-m", "wdjax", "run", *words], capture_output=True, text=True
        )

    text = (tmp_path / "jobs.toml").read_text()
    (tmp_path / "bad.toml").write_text(f"{text}[cluster]\nnothing = 3\n")
    refused = ended("bad.toml", "--cluster", "local")
    assert refused.returncode == 2
    assert refused.stderr.startswith("wdjax: --cluster local: ")
    assert "nothing" in refused.stderr
    (tmp_path / "jobs.toml").write_text(f"{text}[cluster]\ntimeout_min = 9\n")
    there = ended("jobs.toml", "--cluster", "local", "--jobs", "2", "--json", "cluster.json")
    assert there.returncode == 0, there.stderr
    assert main(["run", "jobs.toml", "--json", "here.json", "--out", "here"]) == 0
    rows = [json.loads((tmp_path / f"{n}.json").read_text())["jobs"] for n in ("cluster", "here")]
    assert rows[0][0]["shares"] == rows[1][0]["shares"]
