"""``--shard`` and ``merge``: parts of a command's work give the result of the whole."""

import functools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wdjax import ensembles, models
from wdjax.attacks import PGD
from wdjax.certify import pointwise
from wdjax.cli import game_command, main, options
from wdjax.files import persist
from wdjax.image import FrankWolfe, NearestTransport, union
from wdjax.transductive import Fixed, digits, transfer

COUNT = 5
ROWS = 23
BALL = ["--norm", "linf", "--eps", "0.05", "--batch-size", "4"]
ATTACKS = (
    "wda(steps=5, probe=2), wda++(steps=6), pgd(steps=3, restarts=2, random_start=true), "
    "wpgd(steps=3), fast"
)
COMMANDS = {
    "attack": ["attack", *BALL, "--attacks", ATTACKS, "--points", "points.npz"],
    "crown": ["certify", *BALL, "--method", "crown", "--steps", "3", "--radii", "radii.npz"],
    "smoothing": [
        "certify", "--norm", "l2", "--eps", "0.05", "--method", "smoothing", "--sigma", "0.2",
        "--votes", "200", "--n0", "20", "--alpha", "0.01",
    ],
    "images": ["image-attack", "--k", "0.5,1", "--window", "3", "--radii", "leasts.npz", *BALL[4:]],
    "nppr": [
        "nppr", *BALL[:4], "--mode", "joint,label", "--components", "2", "--latent", "4",
        "--steps", "5", "--draws", "64",
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small net and 23 images, of which some are misclassified, in the folder of the commands."""
    folder = tmp_path_factory.mktemp("shards")
    for name, seed in (("mlp", 0), ("other", 1)):
        net = models.mlp((16, 8, 3), key=jax.random.key(seed))
        architecture = {"family": "mlp", "options": {"sizes": [16, 8, 3]}, "normalize": ""}
        persist.save_model(folder / f"{name}.safetensors", net, architecture)
    x = np.random.default_rng(0).uniform(0, 1, (ROWS, 4, 4, 1)).astype(np.float32)
    y = np.array(models.mlp((16, 8, 3), key=jax.random.key(0))(x)).argmax(-1)
    y[::7] = (y[::7] + 1) % 3
    np.savez(folder / "x.npz", x=x, y=y)
    np.savez(folder / "moved.npz", x=x[::-1], y=y[::-1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ensembles, "fast", functools.partial(ensembles.fast, passes=12))
        patch.setattr(union, "members", lambda ball: ((FrankWolfe(ball, steps=2), 1.0),))
        patch.setattr(union, "NearestTransport", functools.partial(NearestTransport, steps=3))
        patch.chdir(folder)
        yield folder


def words(name, **changes):
    how = {"--model": "mlp.safetensors", "--data": "x.npz", **changes}
    return [*COMMANDS[name], *(word for pair in how.items() for word in pair)]


def part(name, number, count=COUNT):
    return f"{name}.json.{number}-of-{count}.safetensors"


@pytest.fixture(scope="module")
def parts(folder):
    """All parts of every command, made when they are asked for."""
    made = {}

    def of(name):
        if name not in made:
            for number in range(1, COUNT + 1):
                given = [*words(name), "--json", f"{name}.json", "--shard", f"{number}/{COUNT}"]
                assert main([*given, "--quiet"]) == 0
            assert not (folder / f"{name}.json").exists()
            made[name] = [part(name, number) for number in range(1, COUNT + 1)]
        return made[name]

    return of


def timeless(content):
    if isinstance(content, list):
        return [timeless(part) for part in content]
    if isinstance(content, dict):
        return {k: timeless(v) for k, v in content.items() if not k.endswith("seconds")}
    return content


@pytest.mark.parametrize("name", COMMANDS)
def test_merged_parts_are_the_whole(name, folder, parts):
    """Bit for bit, in every key but times, and in the other files."""
    found = parts(name)
    assert main(["merge", *np.roll(found, 2), "--quiet"]) == 0
    merged = json.loads((folder / f"{name}.json").read_text())
    arrays = {p.name: dict(np.load(p)) for p in folder.glob("*s.npz")}
    for path in arrays:
        (folder / path).unlink()
    assert main([*words(name), "--json", "whole.json", "--quiet"]) == 0
    whole = json.loads((folder / "whole.json").read_text())
    assert [*merged] == [*whole]
    for key, value in timeless(whole).items():
        assert timeless(merged)[key] == value, key
    assert merged["seconds"] > 0
    for path in folder.glob("*s.npz"):
        for key, value in np.load(path).items():
            np.testing.assert_array_equal(arrays[path.name][key], value)


def test_games_are_dealt_out_and_merged(folder, capsys, monkeypatch):
    """Every game is played by one part; nothing is merged of some."""
    own = {"weak": PGD(steps=1), "strong": PGD(steps=3)}

    def tiny(given):
        net = models.mlp((64, 10), key=given.key)
        rows = {name: digits.Row(transfer(attack)) for name, attack in own.items()}
        return digits.DigitsCase(lambda: Fixed(net), 0.1, None, 6, rows)

    monkeypatch.setitem(digits.CASES, "tiny", tiny)
    monkeypatch.setitem(game_command.FAMILIES, "tiny", ("tiny",))
    words = ["game", "--defense", "tiny", "--draws", "2", "--seeds", "0,1", "--json"]
    for number in (1, 2, 3):
        assert main([*words, "games.json", "--shard", f"{number}/3"]) == 0
    dealt = capsys.readouterr().out
    assert dealt.count("part 2 of 3 does it") == 3 * 2
    found = [part("games", number, 3) for number in (3, 1, 2)]
    assert main(["merge", *found, "--quiet"]) == 0
    assert main([*words, "whole.json", "--quiet"]) == 0
    merged, whole = (json.loads((folder / f"{n}.json").read_text()) for n in ("games", "whole"))
    for game in (*merged["games"], *whole["games"]):
        assert game.pop("cost_multiple") > 0
    assert timeless(merged) == timeless(whole)
    assert "merge all of them" in refused(capsys, "merge", *found[:2], "--partial")
    assert main([*words, "split.json", "--devices", "4", "--quiet"]) == 0  # 3 divide 6 inputs.
    split = json.loads((folder / "split.json").read_text())
    for game in split["games"]:
        del game["cost_multiple"]
    alike(timeless(split), timeless(whole))


def test_rows_of_every_division_are_all_rows_once():
    for n in (1, 5, 23):
        for count in range(1, n + 1):
            own = [options.Shard(number, count).rows(n) for number in range(1, count + 1)]
            assert [row for rows in own for row in rows] == [*range(n)]
            assert {*map(len, own)} <= {n // count, -(-n // count)}


def test_a_second_look_is_taken_at_the_survivors_of_all_parts(folder, capsys):
    """A blind attack is noticed when it is merged, with the numbers of the whole."""
    (folder / "flat_net.py").write_text(
        "import jax.numpy as jnp, wdjax\n"
        "def apply(w, x):\n"
        "    return jnp.round(4 * x.reshape(len(x), -1) @ w)\n"
        "def build():\n"
        "    return wdjax.Model(apply, jnp.eye(16)[:, :3] * 1.0)\n"
    )
    own = ["attack", "--model", "flat_net:build", "--data", "x.npz", *BALL, "--attacks", "fgsm"]
    for number in (1, 2):
        assert main([*own, "--json", "flat.json", "--shard", f"{number}/2", "--quiet"]) == 0
    pair = part("flat", 1, 2), part("flat", 2, 2)
    assert "say --model flat_net:build if you trust it" in refused(capsys, "merge", *pair)
    assert main(["merge", *pair, "--model", "flat_net:build"]) == 0
    assert main([*own, "--json", "flat_whole.json", "--quiet"]) == 0
    merged, whole = (json.loads((folder / f"{n}.json").read_text()) for n in ("flat", "flat_whole"))
    assert timeless(merged) == timeless(whole)
    assert "a second look" in capsys.readouterr().err
    assert "standing_at_second_look" in merged["attacks"]["fgsm"]


def test_remarks_of_parts_may_differ(folder, monkeypatch):
    """On samples that one part alone has, and on bounds, which are not computed again."""
    (folder / "open_net.py").write_text(
        "import jax.numpy as jnp, wdjax\n"
        "def apply(w, x):\n"
        "    h = x.reshape(len(x), -1)\n"
        "    return jnp.where(h[:, :1] > 0.9, jnp.nan, 1.0) * (h @ w)\n"
        "def build():\n"
        "    return wdjax.Model(apply, jnp.eye(16)[:, 1:4] * 1.0)\n"
    )
    x = np.full((6, 4, 4, 1), 0.3, np.float32)
    x[0, 0, 0], x[:4, 0, 1] = 1.0, 0.5
    x[4:, 0, 2] = 0.5
    np.savez(folder / "open.npz", x=x, y=np.zeros(6, int))
    own = ["certify", "--model", "open_net:build", "--data", "open.npz", *BALL, "--method", "crown"]

    def wrong(model, x, y, **how):
        return jnp.ones((len(x), 3)), np.zeros(len(x), int), None

    for searched, said in ((pointwise.searched, 1), (wrong, 2)):
        monkeypatch.setattr(pointwise, "searched", searched)
        for number in (1, 2):
            assert main([*own, "--json", "open.json", "--shard", f"{number}/2", "--quiet"]) == 0
        pair = part("open", 1, 2), part("open", 2, 2)
        assert main(["merge", *pair, "--model", "open_net:build", "--quiet"]) == 0
        assert main([*own, "--json", "open_whole.json", "--quiet"]) == 0
        names = "open", "open_whole"
        merged, whole = (json.loads((folder / f"{name}.json").read_text()) for name in names)
        assert timeless(merged) == timeless(whole)
        assert len(whole["remarks"]) == said
        assert "not finite for 1 of 6 samples" in whole["remarks"][0]


def refused(capsys, *given):
    assert main([*map(str, given)]) == 2
    return capsys.readouterr().err


def test_what_does_not_fit_together_is_refused(folder, parts, capsys):
    found = parts("crown")
    said = refused(capsys, "merge", *found[:2], *found[3:])
    assert "part 3 of 5 is missing" in said
    said = refused(capsys, "merge", *found[1:4])
    assert "parts 1, 5 of 5 are missing" in said
    assert "are both part 2/5" in refused(capsys, "merge", *found, found[1])
    other = {
        "a setting": (words("crown")[:4] + ["0.06"] + words("crown")[5:], "eps is 0.06 there and"),
        "a model": (words("crown", **{"--model": "other.safetensors"}), "is about another model"),
        "samples": (words("crown", **{"--data": "moved.npz"}), "is about other samples"),
        "a command": (words("smoothing"), "does not belong to"),
    }
    for given, match in other.values():
        assert main([*given, "--json", "odd.json", "--shard", f"2/{COUNT}", "--quiet"]) == 0
        said = refused(capsys, "merge", found[0], part("odd", 2), *found[2:])
        assert match in said
        assert part("odd", 2) in said
    assert main([*words("crown"), "--json", "odd.json", "--shard", "2/3", "--quiet"]) == 0
    assert "of different divisions" in refused(capsys, "merge", *found, part("odd", 2, 3))


def test_another_version_is_refused(folder, parts, capsys, monkeypatch):
    from wdjax.report import summary

    now = summary.versions()
    found = parts("crown")
    monkeypatch.setattr(summary, "versions", lambda: now | {"jax": "0.0.1"})
    assert main([*words("crown"), "--json", "old.json", "--shard", f"5/{COUNT}", "--quiet"]) == 0
    assert "jax is '0.0.1' there" in refused(capsys, "merge", *found[:4], part("old", 5))
    assert "jax was" in refused(capsys, "merge", *found)


def test_changed_samples_and_damaged_or_foreign_files_are_refused(folder, parts, capsys):
    found = [folder / path for path in parts("crown")]
    shutil.copy(folder / "x.npz", folder / "kept.npz")
    shutil.copy(folder / "moved.npz", folder / "x.npz")
    assert "samples named by the command are not those" in refused(capsys, "merge", *found)
    shutil.copy(folder / "kept.npz", folder / "x.npz")
    grown = {name: np.concatenate([a, a[:2]]) for name, a in np.load(folder / "x.npz").items()}
    np.savez(folder / "x.npz", **grown)
    assert "samples named by the command are not those" in refused(capsys, "merge", *found)
    shutil.copy(folder / "kept.npz", folder / "x.npz")
    (folder / "kept.npz").unlink()
    content = bytearray(found[2].read_bytes())
    for place in (len(content) - 9, len(content) // 3):
        spoilt = folder / "spoilt.safetensors"
        changed = bytearray(content)
        changed[place] ^= 1
        spoilt.write_bytes(changed)
        said = refused(capsys, "merge", *found[:2], spoilt, *found[3:])
        assert str(spoilt) in said
    spoilt.write_bytes(content[: len(content) // 2])
    assert str(spoilt) in refused(capsys, "merge", *found[:2], spoilt, *found[3:])
    for strange in ("mlp.safetensors", "x.npz", "absent"):
        assert strange in refused(capsys, "merge", folder / strange)


def test_an_incomplete_merge_is_about_what_is_there(folder, parts, capsys):
    found = parts("attack")
    own = np.array([path for number, path in enumerate(found) if number not in (0, 3)])
    assert main(["merge", *own, "--partial", "--json", "some.json"]) == 0
    some = json.loads((folder / "some.json").read_text())
    rows = [row for number in (2, 3, 5) for row in options.Shard(number, COUNT).rows(ROWS)]
    assert some["coverage"] == {"n": len(rows), "of": ROWS, "missing_parts": [1, 4]}
    assert some["n"] == len(rows)
    assert [remark.split(" is left out")[0] for remark in some["remarks"]] == [
        "wpgd(steps=3)", "fast"
    ]  # fmt: skip
    held = dict(np.load(folder / "x.npz"))
    np.savez(folder / "rows.npz", x=held["x"][rows], y=held["y"][rows])
    alone = words("attack", **{"--data": "rows.npz"})
    alone[alone.index(ATTACKS)] = "wda(steps=5, probe=2), wda++(steps=6)"
    assert main([*alone, "--json", "rows.json", "--quiet"]) == 0
    expected = json.loads((folder / "rows.json").read_text())
    assert some["data_sha256"] == expected["data_sha256"]
    for name, row in expected["attacks"].items():
        assert timeless(some["attacks"][name]) == timeless(row)
    assert "merge all of its parts" in refused(capsys, "merge", *parts("nppr")[:3], "--partial")


@pytest.mark.parametrize(
    ("command", "more", "name"),
    [
        ("crown", ["--method", "lipschitz"], "expected loss"),
        ("images", ["--attack", "frank-wolfe(steps=2)", "--natural"], "natural"),
    ],
)
def test_an_incomplete_merge_says_what_is_left_out(command, more, name, folder, capsys):
    given = [*words(command)[:5], "--model", "mlp.safetensors", "--data", "x.npz", *more]
    assert main([*given, "--json", "left.json", "--shard", "1/2", "--quiet"]) == 0
    assert main(["merge", part("left", 1, 2), "--partial", "--quiet"]) == 0
    remark = f"{name} is left out: it needs all samples, and parts are missing"
    assert remark in json.loads((folder / "left.json").read_text())["remarks"]
    assert remark in capsys.readouterr().err


def test_options_that_make_no_part_are_refused_before_any_work(folder, capsys):
    own = words("crown")
    for text in ("0/5", "6/5", "1", "a/b", "1/5/5", "-1/5", "1/0"):
        assert "must be I/N" in refused(capsys, *own, "--json", "a.json", f"--shard={text}")
    assert "name it" in refused(capsys, *own, "--shard", "1/5")
    assert "name it" in refused(capsys, *own, "--shard", "1/5", "--json", "-")
    assert "23 samples for 24" in refused(capsys, *own, "--shard", "1/24", "--json", "a.json")
    assert "--rare" in refused(
        capsys, *words("nppr"), "--rare", "2", "--shard", "1/5", "--json", "a.json"
    )


def test_a_part_is_resumed_from_its_own_checkpoint_only(folder, parts, capsys):
    """A finished part is read, not made again; the checkpoint of another part is refused."""
    (expected,) = (folder / path for path in parts("crown")[3:4])
    own = [*words("crown"), "--json", "again.json", "--checkpoint", "kept", "--shard"]
    assert main([*own, f"4/{COUNT}", "--quiet"]) == 0
    assert main([*own, f"4/{COUNT}", "--quiet"]) == 0
    assert main(["merge", *parts("crown")[:3], part("again", 4), parts("crown")[4], "--quiet"]) == 0
    assert expected.exists()
    assert f"shard was '4/{COUNT}' and is '5/{COUNT}'" in refused(capsys, *own, f"5/{COUNT}")


@pytest.mark.usefixtures("eight_devices")
@pytest.mark.parametrize("name", COMMANDS)
def test_devices_change_no_decision(name, folder, capsys):
    found = {}
    for devices in "21":
        given = [*words(name), "--devices", devices, "--json", f"{devices}.json", "--quiet"]
        assert main(given) == 0
        found[devices] = timeless(json.loads((folder / f"{devices}.json").read_text()))
    alike(found["2"], found["1"])
    assert "--devices 9: there are 8" in refused(capsys, *words(name), "--devices", "9")
    assert "whole number" in refused(capsys, *words(name), "--devices", "some")


def alike(one, other):
    """Equal, but for the rounding of another batch."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other)):
        assert a == (pytest.approx(b, rel=1e-5, abs=1e-5) if isinstance(b, float) else b)


@pytest.mark.usefixtures("eight_devices")
def test_a_part_of_many_devices_is_merged_on_one(folder, parts, monkeypatch):
    given = [*words("crown"), "--devices", "2", "--json", "wide.json", "--quiet"]
    for number in (1, 2):
        assert main([*given, "--shard", f"{number}/2"]) == 0
    here = jax.devices()
    monkeypatch.setattr(jax, "devices", lambda: here[:1])
    assert main(["merge", part("wide", 1, 2), part("wide", 2, 2), "--quiet"]) == 0


AUDIT = ["audit", "--model", "mlp.safetensors", "--data", "x.npz", "--eps-list", "0.05"]


def without_times(page):
    return re.sub(r'"(compile_)?seconds": [0-9.e+-]+|; \d+ s;', "", page)


def test_parts_of_an_audit_are_the_whole(folder, capsys):
    """The numbers, the figures and the page; without a part it says what it lacks."""
    own = [*AUDIT, "--batch-size", "4"]
    for number in (1, 2):
        assert main([*own, "--out", "night", "--shard", f"{number}/2", "--quiet"]) == 0
    names = [f"night/report.json.{number}-of-2.safetensors" for number in (2, 1)]
    assert {path.name for path in (folder / "night").iterdir()} == {Path(n).name for n in names}
    assert main(["merge", *names]) == main([*own, "--out", "whole"])
    for path in (folder / "whole").iterdir():
        merged = folder / "night" / path.name
        if path.suffix == ".png":
            assert merged.read_bytes() == path.read_bytes()
        elif path.suffix == ".html":
            assert without_times(merged.read_text()) == without_times(path.read_text())
    merged, whole = (
        json.loads((folder / n / "report.json").read_text()) for n in ("night", "whole")
    )
    assert [*merged] == [*whole]
    assert timeless(merged) == timeless(whole)
    assert merged["seconds"] > 0
    main(["merge", *names[1:], "--partial", "--json", "some.json"])
    some = json.loads((folder / "some.json").read_text())
    assert some["coverage"] == {"n": 11, "of": ROWS, "missing_parts": [2]}
    (model,) = some["models"]
    assert "certified_loss" in whole["models"][0]["loss_bounds"]["Lipschitz"]
    rows = whole["models"][0]["samples"]
    assert model["samples"] == {
        name: {one: values[:11] for one, values in part.items()}
        if isinstance(part, dict)
        else part[:11]
        for name, part in rows.items()
    }
    assert "parts are missing" in model["loss_bounds"]["Lipschitz"]["refused"]
    capsys.readouterr()
    assert "it is for --model or --arch" in refused(capsys, "audit", "--shard", "1/2")


BIG = """
import resource, sys
import numpy as np
from wdjax.cli import main
words = ["attack", "--model", "pooled_net:build", "--norm", "linf", "--eps", "0.01", "--attacks",
         "pgd(steps=2)", "--json", "big.json", "--quiet", "--samples"]
def held():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
assert main([*words, "20", "--data", "little"]) == 0
assert main([*words, "2000", "--data", "little", "--shard", "100/100"]) == 0
before = held()
assert main([*words, "20", "--data", "big"]) == 0
assert main([*words, "40000", "--data", "big", "--shard", "2000/2000"]) == 0
print(held() - before)
"""


def test_memory_does_not_grow_with_the_data(folder):
    """Of 2 GB, which lie in no block of the disk, twenty rows: megabytes above a small file's."""
    (folder / "pooled_net.py").write_text(
        "import jax.numpy as jnp, wdjax\n"
        "def apply(w, x):\n"
        "    return x.mean((1, 2)) @ w\n"
        "def build():\n"
        "    return wdjax.Model(apply, jnp.eye(3))\n"
    )
    for name, rows in (("little", 2000), ("big", 40000)):
        (folder / name).mkdir()
        shape = (rows, 64, 64, 3)
        np.lib.format.open_memmap(folder / name / "x.npy", "w+", np.float32, shape)
        np.save(folder / name / "y.npy", np.zeros(rows, int))
    assert (folder / "big" / "x.npy").stat().st_size > 1.9e9
    child = subprocess.run([sys.executable, "-c", BIG], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    assert int(child.stdout) < 60
    (folder / "big" / "x.npy").unlink()


def test_a_part_looks_at_its_own_rows_alone(folder, capsys):
    """Another part's NaN is not met; one that has to look at all samples meets it."""
    held = dict(np.load(folder / "x.npz"))
    held["x"][20] = np.nan
    np.savez(folder / "spoilt.npz", **held)
    own = words("crown", **{"--data": "spoilt.npz"})
    for number, code in ((1, 0), (5, 2)):
        assert main([*own, "--json", "a.json", "--shard", f"{number}/{COUNT}"]) == code
    assert "x[20] holds a value that is not finite" in capsys.readouterr().err
    # The constant of an audit's loss bound depends on all labels and on no sample.
    audit = [*AUDIT, "--samples", str(ROWS), "--out", "spoilt", "--quiet"]
    audit[audit.index("--data") + 1] = "spoilt.npz"
    assert main([*audit, "--shard", "1/5"]) == 0
    whole = ["attack", *own[1:5], "--attacks", "wpgd(steps=1)", *own[-4:], "--json", "a.json"]
    assert main([*whole, "--shard", f"1/{COUNT}"]) == 2
    assert main([*whole, "--shard", f"2/{COUNT}"]) == 0
