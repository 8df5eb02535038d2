"""The main job and the command line, end to end."""

import itertools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wdjax
from wdjax import attacks, certify, remarks, transport
from wdjax.cli import main
from wdjax.engine import driver
from wdjax.report import audit, page, plots
from wdjax.report import summary as reports

KEY = jax.random.key(0)


@pytest.fixture(scope="session")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("audit")
    assert main(["audit", "--out", str(folder), "--samples", "40"]) == 0
    return folder, json.loads((folder / "report.json").read_text())


def test_audit_writes_a_whole_report(report):
    folder, content = report
    assert content["schema"] == "wdjax.results/1"
    assert content["passed"]
    assert [model["model"] for model in content["models"]] == [
        "standard training",
        "adversarial training",
    ]
    shown = (folder / "report.html").read_text()
    figures = shown.count("<svg ") + shown.count("<img ")
    assert shown.count("<figure>") == shown.count("<figcaption>") == figures
    assert shown.count("<svg ") == 20
    assert "http" not in shown
    assert "trained on 1447 digits of 8 x 8 pixels for 30 epochs" in shown
    assert len(list(folder.glob("*.png"))) == 10
    assert not list(folder.glob(".*"))


def test_audit_is_a_sandwich_whose_balls_are_nested(report):
    _, content = report
    for model in content["models"]:
        assert model["clean_accuracy"] > 0.9
        balls = [model["balls"][f"omega_{p}"] for p in ("inf", "2", "1")]
        for ball in balls:
            certified, attacked = ball["certified_accuracy"], ball["attacked_accuracy"]
            assert all(low <= high + 1e-6 for low, high in zip(certified, attacked))
            losses = zip(ball["attacked_loss"], ball["certified_loss"])
            assert all(low <= high + 1e-5 for low, high in losses)
        for small, large in itertools.pairwise(balls):
            for key in ("certified_accuracy", "attacked_accuracy"):
                assert all(a >= b - 1e-6 for a, b in zip(small[key], large[key]))
        assert balls[0]["certified_accuracy"][1] > 0.8
    standard, robust = (model["balls"]["omega_inf"] for model in content["models"])
    assert robust["attacked_accuracy"][-1] > standard["attacked_accuracy"][-1]


def test_audit_is_deterministic(report, tmp_path):
    _, content = report
    main(["audit", "--out", str(tmp_path), "--samples", "40"])
    again = json.loads((tmp_path / "report.json").read_text())
    assert again["models"] == content["models"]


def test_a_linear_model_leaves_no_gap():
    rng = np.random.default_rng(3)
    weights = jnp.asarray(rng.normal(size=(6, 2)), jnp.float32)
    model = wdjax.Model(lambda w, x: (x - 0.5) @ w, weights)
    x = jnp.asarray(rng.uniform(0.4, 0.6, (30, 6)), jnp.float32)
    y = jnp.argmax(model(x), axis=-1)
    radii = [0.01, 0.03, 0.05]
    found = audit.sandwich(model, x, y, eps_list=radii, key=KEY)
    assert found.passed
    for order in (math.inf, 2, 1):
        np.testing.assert_allclose(found.attacked(order), found.certified(order), atol=5e-3)


LINEAR = wdjax.Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [-1.0, 1.0]]))
POINTS = jnp.array([[0.6, 0.4], [0.9, 0.1], [0.3, 0.7]]), jnp.array([0, 0, 0])


def broken(found):
    return {
        invariant.name: invariant.detail for invariant in found.invariants if not invariant.holds
    }


def far(model, x, y):
    """A certificate that promises three times the truth."""
    return 3 * certify.radius(model, x, y, norm=math.inf)


def generous(model, x, y):
    """A certificate that vouches for a misclassified sample."""
    return jnp.full(len(y), 0.01)


def test_a_lying_certificate_is_caught():
    found = audit.sandwich(
        LINEAR,
        *POINTS,
        eps_list=[0.15],
        key=KEY,
        certificates={"honest": audit.standard_certificates(wdjax.Lp())["CROWN"], "far": far},
    )
    said = broken(found)
    assert said["no flip inside a certified ball"] == "far, worst at index 1"
    assert "attacked accuracy >= certified accuracy in Omega_inf" in said
    assert not found.passed
    found = audit.sandwich(
        LINEAR, *POINTS, eps_list=[0.15], key=KEY, certificates={"generous": generous}, attacks={}
    )
    assert broken(found)["no flip inside a certified ball"] == "generous, worst at index 2"


def test_a_lying_loss_bound_is_caught():
    def zero(model, x, y, *, eps, order):
        return np.zeros_like(eps)

    found = audit.sandwich(LINEAR, *POINTS, eps_list=[0.1], key=KEY, loss_bounds={"zero": zero})
    assert set(broken(found)) == {
        f"attacked loss <= certified loss in {audit.ball_name(order)}" for order in audit.ORDERS
    }
    assert found.lipschitz is None


def test_own_attacks_and_certificates_appear_everywhere():
    steps = []
    found = audit.sandwich(
        LINEAR,
        *POINTS,
        eps_list=[0.05, 0.25],
        key=KEY,
        attacks={
            "<one> step": attacks.fgsm(),
            "a walk": attacks.WDAPlusPlus(),
            "far, seldom": audit.Attempt(attacks.WDA(), orders=(2,), kappa=4.0),
        },
        certificates={
            "my own": lambda model, x, y: certify.radius(model, x, y, norm=math.inf),
            "nothing": lambda model, x, y: np.zeros(len(y)),
        },
        loss_bounds={},
        progress=steps.append,
    )
    assert found.passed, broken(found)
    assert [step.number for step in steps] == list(range(len(steps)))
    # Two radii at 1 + 3 + 1 orders and two certificates.
    assert {step.total for step in steps} == {len(steps)} == {12}
    content = json.loads(json.dumps(reports.describe(found), allow_nan=False)) | {"model": "linear"}
    searches = {name: attack["searches"] for name, attack in content["attacks"].items()}
    orders = {name: {one["order"] for one in own} for name, own in searches.items()}
    assert orders == {"<one> step": {"inf"}, "a walk": {"inf", "2", "1"}, "far, seldom": {"2"}}
    assert {name: own[0].get("kappa") for name, own in searches.items()} == {
        "<one> step": 1.0,
        "a walk": None,
        "far, seldom": 4.0,
    }
    assert [*content["certificates"]] == ["my own", "nothing"]
    assert content["balls"]["omega_1"]["certified_loss"] is None
    whole = {"models": [content], "versions": {}, "data": "points", "remarks": []}
    shown = page.render(whole, {})
    for words in ("&lt;one&gt; step", "a walk", "far, seldom", "certified by my own"):
        assert words in shown
    lines = {
        line.get_label(): line for axis in plots.accuracy(found).axes for line in axis.get_lines()
    }
    assert set(lines) == {*found.names, "certified", "certified by my own", "certified by nothing"}
    assert lines["a walk"].get_color() == plots.styles(found.names)["a walk"]["color"]
    drawn = (
        plots.accuracy(found),
        plots.loss(found),
        plots.distances(found),
        plots.allocation(found),
    )
    for axis in (axis for figure in drawn for axis in figure.axes):
        assert all(line.get_marker() not in ("", "None", None) for line in axis.get_lines())


def test_a_budget_searches_no_more_often_than_it_must(monkeypatch):
    searched = []
    truth = driver.search
    monkeypatch.setattr(
        driver, "search", lambda attack, *a, **k: searched.append(attack) or truth(attack, *a, **k)
    )
    radii = [0.05, 0.1, 0.2]
    tried = {"pgd": attacks.PGD(steps=2), "walk": attacks.WDAPlusPlus()}
    audit.sandwich(LINEAR, *POINTS, eps_list=radii, key=KEY, attacks=tried, certificates={})
    # Points measure the noise with which an attack within a radius is compared.
    made = [name for one in searched if (name := type(one).__name__) != "Points"]
    assert sorted(made) == ["PGD"] * 3 + ["WDAPlusPlus"]


def vanishing(w, x):
    """Class 1 has a finite logit and a gradient of 0 times infinity."""
    logits = x @ w
    return logits.at[:, 1].add(jnp.sqrt(jnp.maximum(logits[:, 0] - 50, 0)) - 5)


@pytest.mark.parametrize("name", list(audit.standard_attacks(wdjax.Lp(), [0.1])))
def test_a_fault_fails_the_audit(name):
    one = {name: audit.standard_attacks(wdjax.Lp(), [0.1])[name]}
    model = wdjax.Model(vanishing, jnp.array([[1.0, -1.0, 0.0], [-1.0, 1.0, 0.5]]))
    x, y = POINTS[0], jnp.array([1, 0, 2])
    found = audit.sandwich(
        model, x, y, eps_list=[0.01], key=KEY, attacks=one, certificates={}, loss_bounds={}
    )
    first = 0 if name == "pgd" else 1  # Only PGD attacks samples that are misclassified.
    said = broken(found)
    assert set(said) == {"no fault met by any attack"}
    count = 3 - first
    assert f"{count} of 3 samples, first at index {first} ({name})" in said.popitem()[1]
    entry = reports.describe(found)["attacks"][name]["searches"][0]
    assert (entry["faults"], entry["first_fault"]) == (count, first)
    shown = page.render(
        {
            "models": [reports.describe(found) | {"model": "faulty"}],
            "versions": {},
            "remarks": [],
            "data": "points",
            "seed": 0,
        },
        {},
    )
    assert "FAILS: no fault met by any attack" in shown
    assert "do not trust these numbers" in shown


def test_vanished_gradients_are_said():
    model = wdjax.Model(lambda w, x: jax.nn.one_hot(jnp.argmax(x @ w, -1), 2), jnp.eye(2))
    found = audit.sandwich(
        model,
        *POINTS,
        eps_list=[0.01],
        key=KEY,
        attacks={"pgd": attacks.PGD(steps=3)},
        certificates={},
        loss_bounds={},
    )
    content = reports.describe(found) | {"model": "steps"}
    assert content["attacks"]["pgd"]["searches"][0]["zero_gradients"] == 1.0
    shown = page.render({"models": [content], "versions": {}, "data": "points", "remarks": []}, {})
    assert f"pgd, Omega_inf, eps 0.01: 100% zero gradients; {remarks.VANISHED}" in shown


def test_accuracies_are_the_same_floats_on_both_sides():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.uniform(0.4, 0.6, (100, 2)), jnp.float32)
    y = jnp.argmax(LINEAR(x), axis=-1).at[7].set(1 - jnp.argmax(LINEAR(x), axis=-1)[7])
    tried = {"fgsm": attacks.fgsm()}
    found = audit.sandwich(LINEAR, x, y, eps_list=[0.0], key=KEY, attacks=tried, loss_bounds={})
    slack = {invariant.name: invariant.slack for invariant in found.invariants}
    assert found.attacked(math.inf).tolist() == [0.99]
    assert slack["attacked accuracy >= certified accuracy in Omega_inf"] == 0.0


def test_batches_change_no_number():
    from wdjax import models

    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.uniform(0, 1, (23, 8)), jnp.float32)
    model = models.mlp((8, 8, 3), key=KEY)
    tried = {"pgd": attacks.PGD(steps=5, random_start=True), "wda++": attacks.WDAPlusPlus()}
    y = jnp.argmax(model(x), axis=-1).at[:2].set(0)
    whole, parts = (
        audit.sandwich(model, x, y, eps_list=[0.02, 0.1], key=KEY, attacks=tried, batch_size=size)
        for size in (None, 5)
    )
    assert whole.passed, broken(whole)
    assert parts.passed, broken(parts)
    np.testing.assert_allclose(parts.radius, whole.radius, atol=1e-6)
    for one, other in zip(parts.entries, whole.entries):
        assert one[:4] == other[:4]
        np.testing.assert_allclose(one[4:8], other[4:8], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attacks": {"l2": attacks.PGD(wdjax.Lp(2))}}, "'l2' moves within Lp"),
        ({"attacks": {"w": audit.Attempt(attacks.WDAPlusPlus(), kappa=2.0)}}, "leave out kappa"),
        ({"attacks": {"w": audit.Attempt(attacks.WDA(), kappa=0.5)}}, "kappa must be"),
        ({"attacks": {"w": audit.Attempt(attacks.WDA(), orders=(0.5,))}}, "order must be"),
        ({"certificates": {"short": lambda model, x, y: [1.0]}}, "'short' must return 3 radii"),
        ({"certificates": {"nan": lambda model, x, y: [1.0, 1.0, math.nan]}}, "without NaN"),
        ({"loss_bounds": {"b": lambda model, x, y, *, eps, order: [1.0, 2.0]}}, "'b' must return"),
        ({"batch_size": 0}, "batch_size must be"),
    ],
)
def test_what_does_not_fit_is_refused(options, message):
    options = {"attacks": {}, "certificates": {}, "loss_bounds": {}} | options
    with pytest.raises(ValueError, match=message):
        audit.sandwich(LINEAR, *POINTS, eps_list=[0.1], key=KEY, **options)


def test_a_broken_invariant_is_exit_code_3(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(certify, "lipschitz_constant", lambda *a, **k: 1e-3)
    assert main(["audit", "--out", str(tmp_path), "--samples", "10", "--quiet"]) == 3
    said = capsys.readouterr()
    assert "standard training, attacked loss <= certified loss in Omega_1" in said.err
    assert said.out == ""


@pytest.mark.parametrize("radii", [[], [0.2, 0.1], [-0.1, 0.1]])
def test_bad_radii_are_refused(radii):
    model = wdjax.Model(lambda w, x: x @ w, jnp.eye(2))
    with pytest.raises(ValueError, match="eps_list must increase"):
        audit.sandwich(model, jnp.ones((1, 2)), jnp.zeros(1, int), eps_list=radii, key=KEY)


ANCHORS = [
    ("resnet2b", "cifar10_resnet2b.pth", "cifar10_test_0_100", 2 / 255, 0.77, 0.60, 0.59),
    ("wong_mnist", "mnist_linf_robust.pth", "mnist_test_0_500", 0.1, 0.99, 0.96, 0.555),
    ("trades_smallcnn", "mnist_trades_smallcnn.pt", "mnist_test_0_500", 0.3, 1.0, 0.95, 0.50),
]
ALLOCATED = {
    "resnet2b": (0.2048, 0.3421),
    "wong_mnist": (0.3926, 0.5884),
    "trades_smallcnn": (0.3467, 0.5284),
}


@pytest.mark.parametrize(("arch", "weights", "images", "eps", "clean", "point", "mixed"), ANCHORS)
def test_published_weights_fall_as_far_as_the_reference_attacks(
    shared, tmp_path, arch, weights, images, eps, clean, point, mixed
):
    def attack(names, *options):
        out = tmp_path / "out.json"
        command = ["attack", "--arch", arch, "--norm", "linf", "--eps", repr(eps)]
        command += ["--weights", str(shared / "data" / "weights" / weights)]
        command += ["--data", str(shared / "data" / f"{images}.npz"), "--samples", "100"]
        assert main([*command, "--attacks", names, "--json", str(out), *options]) == 0
        return json.loads(out.read_text())

    pointwise = attack("wda,wda++")
    assert pointwise["clean_accuracy"] == clean
    assert pointwise["attacks"]["wda"]["attacked_accuracy"] <= point + 1e-9
    assert pointwise["attacks"]["wda"]["max_cost"] <= eps * (1 + 1e-5)
    assert pointwise["attacks"]["wda"]["kappa"] == 1.0
    assert "kappa" not in pointwise["attacks"]["wda++"]
    assert all(measured["faults"] == 0 for measured in pointwise["attacks"].values())
    mixture = attack("wda", "--kappa", "2")
    assert mixture["attacks"]["wda"]["attacked_accuracy"] <= mixed + 1e-9
    second = attack("wda++", "--order", "2")
    for content, bar in zip((pointwise, second), ALLOCATED[arch]):
        assert content["attacks"]["wda++"]["attacked_accuracy"] <= bar
        assert content["attacks"]["wda++"]["transport_cost"] <= eps * (1 + 1e-5)


def test_exact_transport_of_a_real_attack(shared):
    from wdjax import data
    from wdjax.models import convert

    model = convert.load(shared / "data" / "weights" / "mnist_linf_robust.pth", "wong_mnist").model
    x, y = data.load_npz(shared / "data" / "mnist_test_0_500.npz").take(60)
    for attack, spending in (
        (attacks.WDA(), {"order": 1, "kappa": 2.0}),
        (attacks.WDAPlusPlus(), {"order": 2}),
        (attacks.WDAPlusPlus(wdjax.Lp(2)), {"order": 1}),
    ):
        norm, order = attack.ball.norm, spending["order"]
        eps = 0.1 if norm == math.inf else 1.0
        result = wdjax.run(attack, model, x, y, eps=eps, **spending)
        found = transport.AdversarialDistribution.from_result(x, y, result)
        exact = transport.wasserstein(found, norm, order)
        assert 0.5 * eps < exact <= eps * (1 + 1e-5)
        np.testing.assert_allclose(found.accuracy(model, batch_size=17), result.accuracy, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--attacks": "pgd,magic"}, "knows fgsm, pgd, apgd-ce"),
        ({"--weights": "nowhere.pth"}, "nowhere.pth"),
        ({"--data": "nowhere.npz"}, "nowhere.npz"),
        ({"--eps": "-1"}, "eps must be finite and at least 0"),
        ({"--arch": "perceptron"}, "perceptron"),
    ],
)
def test_bad_commands_are_exit_code_2(shared, tmp_path, capsys, change, message):
    options = {
        "--arch": "mlp",
        "--weights": str(shared / "data" / "weights" / "mnist_2_20.pth"),
        "--data": str(shared / "data" / "mnist_test_0_500.npz"),
        "--norm": "linf",
        "--eps": "0.1",
        "--samples": "5",
        "--json": str(tmp_path / "out.json"),
    } | change
    assert main(["attack", *(word for pair in options.items() for word in pair)]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out.json").exists()


def test_flips_that_a_smaller_budget_knew_count_in_a_larger_one():
    """Along ``sin(10 x)`` a single step of .5 ends beyond the flips that one of .15 finds."""
    wave = wdjax.Model(
        lambda k, x: jnp.concatenate([jnp.sin(k * x), jnp.zeros_like(x)], axis=1), jnp.array(10.0)
    )
    x, y = jnp.array([[0.2], [0.22]]), jnp.array([0, 0])
    alone = {"fgsm": attacks.fgsm(wdjax.Lp())}
    found = audit.sandwich(
        wave, x, y, eps_list=[0.15, 0.5], key=KEY, attacks=alone, certificates={}, loss_bounds={}
    )
    assert found.curve("fgsm", math.inf).tolist() == [0, 1]
    assert found.attacked(math.inf).tolist() == [0, 0]
    assert reports.describe(found)["balls"]["omega_inf"]["attacked_accuracy"] == [0, 0]
    # And in the larger balls, where the knapsack buys them.
    assert found.attacked(1).tolist() == [0, 0]


def test_an_audit_goes_on_where_it_was(tmp_path):
    def ask(**options):
        return audit.sandwich(LINEAR, *POINTS, eps_list=[0.05, 0.15], key=KEY, **options)

    def end(step):
        if step.number == stop:
            raise KeyboardInterrupt

    expected, asked = ask(), []
    for stop in (1, 5, 11):  # noqa: B007
        with pytest.raises(KeyboardInterrupt):
            ask(checkpoint=tmp_path / "kept", progress=end)
    found = ask(checkpoint=tmp_path / "kept", every=0.0)
    assert reports.describe(found) == reports.describe(expected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "search", lambda *a, **k: pytest.fail("an attack was made again"))
        patch.setattr(certify, "radius", lambda *a, **k: pytest.fail("certified again"))
        again = ask(checkpoint=tmp_path / "kept")
    assert reports.describe(again) == reports.describe(expected)
    # What a caller's function returns is asked for again: nothing tells one from another.
    for value in (0.01, 0.02):
        own = {"mine": lambda model, x, y, value=value: asked.append(value) or [value, value, 0.0]}
        told = ask(checkpoint=tmp_path / "own", certificates=own)
        assert told.certificates["mine"].tolist() == [value, value, 0.0]
    assert asked == [0.01, 0.02]
    with pytest.raises(ValueError, match="eps_list was"):
        audit.sandwich(LINEAR, *POINTS, eps_list=[0.06], key=KEY, checkpoint=tmp_path / "kept")
    louder = {"pgd": attacks.PGD(loss=lambda out, y: -wdjax.losses.margin(out, y))}
    with pytest.raises(ValueError, match="belongs to other"):
        ask(checkpoint=tmp_path / "own", attacks=louder)
