"""What a command line may hold: every number has a range, and nothing bad is a traceback."""

import argparse
from pathlib import Path

import numpy as np
import pytest

from wdjax.cli import main, options, parser
from wdjax.cli.options import Numbers, Range
from wdjax.models import convert

HOSTILE = [
    "99999999999999999999", "9" * 23, "9" * 5000, "1" + "0" * 400, "1e39", "1e999", "-1e999", "-1",
    "1_0", "\uff11\uff10", "\u00b2", "\u0663", "0x10", " 1 0", "", "nan", "-nan", "inf", "-inf",
    "Infinity", "1/0", "1/nan",
    "1e999/1e999", "1/2/3", "/2", "2/", "\x1b[31m1", "1\n2", "one", "[1]", "1e", ".", "+", "--",
]  # fmt: skip
COMPUTING = ("attack", "image-attack", "certify", "nppr", "audit", "game")


def commands():
    (found,) = (a for a in parser()._actions if isinstance(a, argparse._SubParsersAction))
    return found.choices


def numeric():
    """Every option of every command that takes a number or several, and its kind."""
    for command, its in commands().items():
        for action in its._actions:
            kind = action.type
            if isinstance(kind, Range | Numbers):
                yield command, action.option_strings[0], kind


def test_every_number_of_every_command_has_a_range():
    kinds = {action.type for its in commands().values() for action in its._actions}
    plain = {kind for kind in kinds if not isinstance(kind, Range | Numbers)}
    assert not plain & {int, float, complex}
    found = {(command, option) for command, option, _ in numeric()}
    assert len(found) > 35
    assert {("certify", "--seconds"), ("game", "--seeds"), ("image-attack", "--k")} <= found
    for command in COMPUTING:
        assert (command, "--every") in found
    for _, _, kind in numeric():
        kind = kind.kind if isinstance(kind, Numbers) else kind
        for end in (kind.low, kind.high):
            assert kind(f"{end:.17g}") == end
        with pytest.raises(argparse.ArgumentTypeError):
            kind(str(int(kind.high) * 2 + 1))


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: ascii(text[:20]))
def test_hostile_numbers_are_refused_in_a_line(text, capsys):
    for command, option, _ in numeric():
        with pytest.raises(SystemExit) as ending:
            parser().parse_args([command, f"{option}={text}"])
        assert ending.value.code == 2
        said = capsys.readouterr().err
        program = "wdjax" if text == "--" else f"wdjax {command}"
        assert said.startswith(f"{program}: {option} must be")
        assert said.count("\n") == 1
        assert said.isascii()
        assert said[:-1].isprintable()
        assert len(said) < 300
    assert main([command, option, text]) == 2


def test_numbers_are_read_as_they_are_written():
    assert options.BUDGET("8/255") == 8 / 255
    assert options.BUDGET("1e-3") == options.BUDGET(".001") == options.BUDGET("0.1e-2") == 0.001
    assert options.SEED("0") == options.SEED("+0") == 0
    assert type(options.SAMPLES("7")) is int
    assert type(options.BUDGET("7")) is float
    assert Numbers(options.PIXELS)("5, .5,8/2") == [5.0, 0.5, 4.0]
    with pytest.raises(argparse.ArgumentTypeError, match="each once"):
        Numbers(options.SEED)("1,1")


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    torch = pytest.importorskip("torch", reason="PyTorch writes the checkpoint")
    folder = tmp_path_factory.mktemp("weights")
    net = torch.nn.Sequential()
    net.add_module("fc1", torch.nn.Linear(16, 3))
    torch.save(net.state_dict(), folder / "mlp.pth")
    np.savez(folder / "x.npz", x=np.zeros((4, 4, 4, 1), np.float32), y=np.zeros(4, int))
    return folder


@pytest.mark.parametrize(
    "words",
    [
        ["--option", "sizes=" + "[" * 100_000],
        ["--option", "sizes=" + "[" * 100_000 + "]" * 100_000],
        ["--option", "sizes=[" + "9" * 5000 + ", 3]"],
        ["--option", "sizes=" + "9" * 5000],
        ["--option", "sizes=[99999999999999999999, 3]"],
        ["--option", "sizes=[16, 1e400]"],
        ["--option", "sizes=[16, NaN]"],
        ["--option", "sizes=[-16, 3]"],
        ["--option", "sizes=[16, 99999999999, 3]"],
        ["--option", "sizes={}"],
        ["--option", "normalize=1"],
        ["--option", "=1"],
        ["--option", "sizes"],
        ["--normalize", "1e999 / 1"],
        ["--normalize", "nan / 1"],
        ["--normalize", "0.5 / " + "0" * 5000],
    ],
    ids=lambda words: words[1][:30],
)
def test_hostile_options_of_a_conversion_are_refused(words, weights, capsys):
    assert main(["convert", str(weights / "mlp.pth"), "--arch", "mlp", *words]) == 2
    said = capsys.readouterr()
    assert not said.out
    assert said.err.startswith("wdjax: ")
    assert "Traceback" not in said.err


def begins(command, weights, out):
    """The words of a command that could begin."""
    subject = ["--arch", "mlp", "--weights", str(weights / "mlp.pth")]
    subject += ["--data", str(weights / "x.npz")]
    ball, json = ["--norm", "linf", "--eps", "0.1"], ["--json", str(out / "out.json")]
    own = {"audit": ["--out", str(out / "audit")], "game": json, "image-attack": subject + json}
    return [command, *own.get(command, [*subject, *ball, *json])]


@pytest.mark.parametrize("command", COMPUTING)
def test_places_for_a_checkpoint_are_refused_before_the_work(
    command, weights, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(convert, "load", lambda *a, **k: pytest.fail("the work had begun"))
    (tmp_path / "file").write_text("kept")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("kept")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    monkeypatch.chdir(tmp_path)
    places = ["file", "file/below", "mine", "", ".", "/dev/null", "/dev/null/x", "/proc/x"]
    places += ["a" * 300, "loop", "loop/x", "/" + "a/" * 3000]
    words = begins(command, weights, tmp_path)
    for place in places:
        assert main([*words, "--checkpoint", place]) == 2, place
        said = capsys.readouterr().err
        assert said.startswith("wdjax: "), place
        assert said.count("\n") == 1, place
    assert main([*words, "--every", "5"]) == 2
    assert "--every 5 would be ignored" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "kept"
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


def test_other_settings_do_not_go_on_from_a_checkpoint(weights, tmp_path, capsys):
    words = begins("attack", weights, tmp_path)
    words += ["--attacks", "fgsm", "--checkpoint", str(tmp_path / "kept")]
    assert main(words) == 0
    for change, told in (
        (["--eps", "0.2"], "eps was 0.1 and is 0.2"),
        (["--attacks", "pgd"], "attacks was 'fgsm' and is 'pgd'"),
        (["--seed", "1"], "seed was 0 and is 1"),
        (["--samples", "2"], "samples was None and is 2"),
    ):
        assert main([*words, *change]) == 2
        assert told in capsys.readouterr().err
    other = begins("certify", weights, tmp_path)
    assert main([*other, "--checkpoint", str(tmp_path / "kept")]) == 2
    assert "command was 'attack' and is 'certify'" in capsys.readouterr().err
    # The same numbers in another file, other batches and places of results, are the same work.
    renamed = Path(tmp_path / "same.npz")
    renamed.write_bytes((weights / "x.npz").read_bytes())
    same = ["--data", str(renamed), "--batch-size", "2", "--json", str(tmp_path / "other.json")]
    assert main([*words, *same]) == 0


def test_games_are_refused_before_the_first(monkeypatch, capsys):
    from wdjax import transductive
    from wdjax.transductive import digits

    monkeypatch.setattr(digits, "_fit", lambda *a, **k: pytest.fail("a model was trained"))
    monkeypatch.setattr(transductive, "prepare", lambda *a, **k: pytest.fail("a game began"))
    for attacks, word in (("nope", "'nope'"), ("transfer,nope", "'nope'"), (",", "''")):
        assert main(["game", "--attacks", attacks, "--json", "-"]) == 2
        said = capsys.readouterr().err
        assert f"has an attack {word}; there are transfer, fpa, gmsa-avg" in said
    for attacks, word in (
        ("transfer(iterations=3)", "transfer has no setting 'iterations' here; it has temperature"),
        ("gmsa-avg(steps=3)", "gmsa-avg has no setting 'steps' here; it has temperature, iterat"),
        ("gmsa-avg(restarts=0)", "gmsa-avg(restarts=0): restarts must be an integer of at least 1"),
        ("fpa(iterations=999,simulations=999)", "at most 1000"),
        ("fpa,fpa", "each once"),
        ("fpa(iterations=10),fpa", "each once"),
        ("fpa(((", "names with settings in parentheses"),
    ):
        assert main(["game", "--defense", "dann", "--attacks", attacks, "--json", "-"]) == 2
        assert word in capsys.readouterr().err
