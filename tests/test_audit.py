"""The main job and the command line, end to end."""

import itertools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wdjax
from wdjax import attacks, audit, certify, transport
from wdjax.__main__ import main

KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("audit")
    assert main(["audit", "--out", str(folder), "--samples", "40"]) == 0
    return folder, json.loads((folder / "report.json").read_text())


@pytest.mark.xdist_group("audit")
def test_audit_writes_a_whole_report(report):
    folder, content = report
    assert content["schema"] == "wdjax.audit/1"
    assert content["passed"]
    assert [model["name"] for model in content["models"]] == [
        "standard training",
        "adversarial training",
    ]
    page = (folder / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 8
    assert "http" not in page
    assert len(list(folder.glob("*.png"))) == 8
    assert not list(folder.glob("*.part"))


@pytest.mark.xdist_group("audit")
def test_audit_is_a_sandwich_whose_balls_are_nested(report):
    _, content = report
    for model in content["models"]:
        assert model["clean_accuracy"] > 0.9
        balls = [model["balls"][f"Omega_{p}"] for p in ("inf", "2", "1")]
        for ball in balls:
            certified, attacked = ball["certified_accuracy"], ball["attacked_accuracy"]
            assert all(low <= high + 1e-6 for low, high in zip(certified, attacked))
            losses = zip(ball["attacked_loss"], ball["certified_loss"])
            assert all(low <= high + 1e-5 for low, high in losses)
        for small, large in itertools.pairwise(balls):
            for key in ("certified_accuracy", "attacked_accuracy"):
                assert all(a >= b - 1e-6 for a, b in zip(small[key], large[key]))
        assert balls[0]["certified_accuracy"][1] > 0.8
    standard, robust = (model["balls"]["Omega_inf"] for model in content["models"])
    assert robust["attacked_accuracy"][-1] > standard["attacked_accuracy"][-1]


@pytest.mark.xdist_group("audit")
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
    found = audit.sandwich(model, x, y, radii=radii, key=KEY)
    assert all(invariant.holds for invariant in found.invariants)
    for order in (math.inf, 2, 1):
        np.testing.assert_allclose(found.attacked(order), found.certified[order], atol=5e-3)


def test_a_lying_certificate_is_caught(monkeypatch):
    model = wdjax.Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [-1.0, 1.0]]))
    x, y = jnp.array([[0.6, 0.4], [0.9, 0.1]]), jnp.array([0, 0])
    truth = certify.radius
    monkeypatch.setattr(certify, "radius", lambda *a, **k: 3 * truth(*a, **k))
    found = audit.sandwich(model, x, y, radii=[0.15], key=KEY)
    broken = {invariant.name for invariant in found.invariants if not invariant.holds}
    assert "no flip inside a certified ball" in broken
    assert "attacked accuracy >= certified accuracy in Omega_inf" in broken


def test_a_broken_invariant_is_exit_code_1(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(certify, "lipschitz_constant", lambda *a, **k: 1e-3)
    assert main(["audit", "--out", str(tmp_path), "--samples", "10"]) == 1
    assert "BROKEN: attacked loss <= certified loss in Omega_1" in capsys.readouterr().out


@pytest.mark.parametrize("radii", [[], [0.2, 0.1], [-0.1, 0.1]])
def test_bad_radii_are_refused(radii):
    model = wdjax.Model(lambda w, x: x @ w, jnp.eye(2))
    with pytest.raises(ValueError, match="radii must increase"):
        audit.sandwich(model, jnp.ones((1, 2)), jnp.zeros(1, int), radii=radii, key=KEY)


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
    assert pointwise["attacks"]["wda"]["robust_accuracy"] <= point + 1e-9
    assert pointwise["attacks"]["wda"]["max_cost"] <= eps * (1 + 1e-5)
    mixture = attack("wda", "--kappa", "2")
    assert mixture["attacks"]["wda"]["robust_accuracy"] <= mixed + 1e-9
    second = attack("wda++", "--order", "2")
    for content, bar in zip((pointwise, second), ALLOCATED[arch]):
        assert content["attacks"]["wda++"]["robust_accuracy"] <= bar
        assert content["attacks"]["wda++"]["transport_cost"] <= eps * (1 + 1e-5)


def test_exact_transport_of_a_real_attack(shared):
    from wdjax import convert, data

    model = convert.load(shared / "data" / "weights" / "mnist_linf_robust.pth", "wong_mnist").model
    x, y = data.load_npz(shared / "data" / "mnist_test_0_500.npz").take(60)
    for attack, knobs in (
        (attacks.wda(order=1), {"kappa": 2.0}),
        (attacks.wda_plus_plus(order=2), {}),
        (attacks.wda_plus_plus(order=1, norm=2), {}),
    ):
        eps = 0.1 if attack.norm == math.inf else 1.0
        result = wdjax.run(attack, model, x, y, eps=eps, **knobs)
        found = transport.AdversarialDistribution.from_result(x, y, result)
        exact = transport.wasserstein(found, attack.norm, attack.order)
        assert 0.5 * eps < exact <= eps * (1 + 1e-5)
        np.testing.assert_allclose(found.accuracy(model, batch_size=17), result.accuracy, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--attacks": "pgd,magic"}, "knows fgsm, pgd, wda, wda"),
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


def test_versions(capsys):
    assert main(["versions"]) == 0
    assert json.loads(capsys.readouterr().out)["jax"] == jax.__version__
