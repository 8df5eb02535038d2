"""What every attack in the image-Wasserstein ball keeps, and the command."""

import dataclasses
import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_image import apply, exact, labelled, net, pictures

import wdjax
from wdjax import Model, data, image, models
from wdjax.cli import image_attack_command, main
from wdjax.engine import driver
from wdjax.files import persist
from wdjax.image import union
from wdjax.models import convert

BALL = image.ImageWasserstein(window=3)
ATTACKS = {
    "frank-wolfe": image.FrankWolfe(BALL, steps=6, sweeps=3),
    "plain": image.FrankWolfe(BALL, steps=6, sweeps=0, temperature=1e-3, momentum=0.0),
    "sinkhorn": image.SinkhornPGD(BALL, steps=6, iterations=8),
    "nearest": image.NearestTransport(BALL, steps=12, sweeps=3),
    "dual-projection": image.DualProjection(BALL, steps=6),
}
each = pytest.mark.parametrize("name", ATTACKS)


def search(name, model, x, y, eps=0.3, **options):
    eps = None if ATTACKS[name].budget == "none" else eps
    return wdjax.search(ATTACKS[name], model, x, y, eps=eps, **options)


def same(one, other, atol=2e-4, stirred=()):
    """Of those that are ``stirred`` only the points: which of many equal plans is rounding's."""
    for field in ("x_adv", "cost", "margin"):
        pair = [np.asarray(getattr(found, field)) for found in (one, other)]
        if field == "cost":
            pair = [np.delete(cost, stirred) for cost in pair]
        np.testing.assert_allclose(*pair, atol=atol)


@each
def test_units_of_pixels_change_nothing(name):
    model, x = net(scale=3.0), pictures(6)
    y = labelled(model, x)
    plain = search(name, model, x, y)
    assert plain.success.any()
    wide = dataclasses.replace(ATTACKS[name], ball=dataclasses.replace(BALL, high=256.0))
    eps = None if wide.budget == "none" else 0.3
    scaled = Model(lambda m, z: m(z / 256), model)
    found = wdjax.search(wide, scaled, 256 * x, y, eps=eps)
    np.testing.assert_array_equal(found.success, plain.success)
    np.testing.assert_allclose(found.cost, plain.cost, atol=1e-3)


@each
def test_what_every_attack_keeps(name):
    model, x = net(scale=3.0), pictures(10)
    x = x.at[8].set(0.0).at[9].set(1.0)  # Nothing to move, and nowhere to go.
    y = labelled(model, x).at[0].add(1) % 4
    found = search(name, model, x, y)
    assert not found.fault.any()
    assert not found.correct[0]
    assert found.success[1:8].any()
    np.testing.assert_array_equal(found.success, labelled(model, found.x_adv) != y)
    np.testing.assert_allclose(BALL.cost(x, found.x_adv, found.proof), found.cost, rtol=1e-5)
    np.testing.assert_allclose(found.x_adv[8:], x[8:], atol=1e-4)
    for i in range(1, 4):
        assert exact(x[i], found.x_adv[i]) <= float(found.cost[i]) * (1 + 1e-5) + 1e-9
    # The same in other company, and inside jit.
    few = search(name, model, x, y, batch_size=3)
    same(found, few, stirred=9)
    traced = jax.jit(lambda model, x, y: search(name, model, x, y))(model, x, y)
    np.testing.assert_array_equal(traced.success, found.success)
    np.testing.assert_allclose(traced.cost[:9], found.cost[:9], atol=5e-3)
    if ATTACKS[name].budget != "none":
        for one in (found, few, traced):
            assert float(one.cost.max()) <= 0.3 * (1 + 1e-5)


@pytest.mark.parametrize("name", ["plain"])
def test_radii_of_every_sample_and_under_vmap(name):
    model, x = net(scale=3.0), pictures(4)
    y = labelled(model, x)
    radii = jnp.array([0.0, 1e-4, 0.1, 1.0])
    found = search(name, model, x, y, eps=radii)
    assert found.cost[0] == 0
    np.testing.assert_array_equal(found.x_adv[0], x[0])
    assert np.all(found.cost <= radii * (1 + 1e-6))
    several = jax.vmap(lambda eps: search(name, model, x, y, eps=eps))(radii[2:])
    np.testing.assert_allclose(several.cost[0, 2], found.cost[2], atol=5e-3)


def broken(params, x):
    """NaN off a neighbourhood of what is given."""
    logits = apply(params, x)
    return jnp.where(x.reshape(len(x), -1)[:, :1] == 0.5, logits, jnp.nan)


def masked(params, x):
    return jnp.round(3 * apply(params, x))


@pytest.mark.parametrize("name", ["frank-wolfe", "nearest"])
def test_nothing_looks_robust_or_broken_because_something_went_wrong(name):
    model, x = net(scale=3.0), pictures(4).at[:, 0, 0].set(0.5)
    y = labelled(model, x)
    lost = search(name, wdjax.Model(broken, model.args[0]), x, y)
    assert lost.fault.sum() >= 2
    assert not lost.success.any()
    assert np.all(np.isfinite(lost.x_adv))
    y = labelled(wdjax.Model(masked, model.args[0]), x)
    flat = search(name, wdjax.Model(masked, model.args[0]), x, y)
    assert flat.zeros.sum() > 0
    assert np.all(np.isfinite(flat.x_adv))


@pytest.mark.parametrize("name", ["plain", "nearest"])
def test_starts_are_begun_at(name):
    model, x = net(scale=3.0), pictures(6)
    y = labelled(model, x)
    far = image.FrankWolfe(BALL, steps=20)
    known = wdjax.search(far, model, x, y, eps=0.5)
    again = search(name, model, x, y, eps=0.5, start=known.x_adv)
    assert np.mean(np.asarray(again.success) >= np.asarray(known.success)) >= 0.8


def test_smoothness_makes_moves_alike():
    model, x = net(scale=3.0), pictures(6)
    y = labelled(model, x)
    rough, smooth = (
        wdjax.search(image.DualProjection(BALL, steps=10, smoothness=price), model, x, y, eps=0.1)
        for price in (0.0, 0.3)
    )
    rough, smooth = (np.asarray(image.total_variance(found.proof)) for found in (rough, smooth))
    assert np.all(rough > 0.03)
    assert smooth.mean() < 0.8 * rough.mean()


def test_bisection_takes_it():
    model, x = net(scale=3.0), pictures(6)
    y = labelled(model, x)
    attack = image.FrankWolfe(BALL, steps=10)
    found = wdjax.ensembles.bisect(attack, model, x, y, eps=0.2, rounds=6)
    first = wdjax.search(attack, model, x, y, eps=0.2)
    assert found.success.sum() >= max(4, int(first.success.sum()))
    both = np.asarray(first.success)
    assert np.all(found.cost[both] <= first.cost[both])


def test_the_least_radius_of_a_linear_model_is_a_linear_program():
    side = 4
    x = jnp.clip(pictures(6, side=side), 0.1, 0.7)
    gain = jax.random.normal(jax.random.key(2), (side * side,))
    shift = 0.3

    def linear(gain, images):
        value = images.reshape(len(images), -1) @ gain
        # Of every sample its own threshold, a little above what it scores.
        return jnp.stack([jnp.zeros_like(value), value - shift], axis=-1)

    model = wdjax.Model(linear, gain)
    y = labelled(model, x)
    found = wdjax.search(image.NearestTransport(BALL, steps=100), model, x, y)
    assert found.success.sum() >= 4
    for i in np.flatnonzero(found.success):
        assert (
            found.cost[i] <= least(x[i, ..., 0], np.asarray(gain), shift, int(y[i])) * 1.05 + 1e-4
        )


def least(x, gain, shift, label):
    """The least cost of a plan whose image scores beyond the threshold."""
    from scipy import optimize
    from test_image import distances

    x = np.asarray(x, float).ravel()
    side, count = int(len(x) ** 0.5), len(x)
    row, column = np.divmod(np.arange(count), side)
    near = (abs(row[:, None] - row) <= 1) & (abs(column[:, None] - column) <= 1)
    source, sink = np.nonzero(near)
    rows, columns = (
        np.equal.outer(np.arange(count), ends).astype(float) for ends in (source, sink)
    )
    sign = -1 if label == 0 else 1
    solved = optimize.linprog(
        distances(side, side)[near],
        A_ub=np.concatenate([columns, sign * gain[sink][None]]),
        b_ub=np.append(np.ones(count), sign * shift),
        A_eq=rows,
        b_eq=x,
    )
    return solved.fun / x.sum()


def test_it_refuses_what_makes_no_sense():
    model, x = net(), pictures(2)
    y = labelled(model, x)
    with pytest.raises(ValueError, match="odd"):
        image.ImageWasserstein(window=4)
    with pytest.raises(ValueError, match="convex"):
        image.ImageWasserstein(power=2, channels="separate")
    with pytest.raises(ValueError, match="direction"):
        image.SinkhornPGD(direction="up")
    with pytest.raises(ValueError, match="height, width, channels"):
        wdjax.search(ATTACKS["plain"], model, x.reshape(2, -1), y, eps=0.1)
    with pytest.raises(ValueError, match="eps"):
        wdjax.search(ATTACKS["plain"], model, x, y)


def test_colour_images_of_a_residual_net(shared):
    folder = shared / "data"
    x, y = data.load_npz(folder / "cifar10_test_0_100.npz").take(6)
    model = convert.load(folder / "weights" / "cifar10_resnet2b.pth", "resnet2b").model
    for channels in ("shared", "separate"):
        ball = image.ImageWasserstein(channels=channels)
        found = wdjax.search(image.FrankWolfe(ball, steps=8, sweeps=4), model, x, y, eps=10 / 1024)
        moved = found.correct & (found.cost > 0)
        assert moved.sum() >= 3
        i = int(np.argmax(moved))
        judged = image.image_wasserstein_distance(x[i : i + 1], found.x_adv[i : i + 1], ball=ball)
        assert judged[0] <= 10 / 1024 * (1 + 1e-4)


def test_the_command(tmp_path, capsys):
    torch = pytest.importorskip("torch", reason="PyTorch writes the checkpoint")
    torch.manual_seed(0)
    layers = torch.nn.Sequential()
    layers.add_module("fc1", torch.nn.Linear(16, 8))
    layers.add_module("fc2", torch.nn.Linear(8, 3))
    torch.save(layers.state_dict(), tmp_path / "mlp.pth")
    x = np.asarray(pictures(6, side=4))
    y = np.array(convert.load(tmp_path / "mlp.pth", "mlp").model(x)).argmax(-1)
    np.savez(tmp_path / "x.npz", x=x, y=y)
    words = ["image-attack", "--arch", "mlp", "--k", "3, .5", "--window", "3", "--samples", "5"]
    words += ["--weights", str(tmp_path / "mlp.pth"), "--data", str(tmp_path / "x.npz")]
    points, radii = tmp_path / "points.npz", tmp_path / "radii.npz"
    out = ["--json", "-", "--no-cache"]
    assert main([*words, "--points", str(points), "--radii", str(radii), *out]) == 0
    content = json.loads(capsys.readouterr().out)
    half, three = content["budgets"]
    assert (half["k"], three["eps"]) == (0.5, 3 / 16)
    assert 0 <= three["attacked_accuracy"] <= half["attacked_accuracy"]
    assert half["attacked_accuracy"] <= content["clean_accuracy"] <= 1
    for row in content["budgets"]:
        assert row["max_cost"] <= row["eps"] * (1 + 1e-6)
        assert row["max_mass_error"] < 1e-6
        assert row["max_box_excess"] == 0
    kept, near = np.load(points), np.load(radii)
    assert kept["k3/x_adv"].shape == kept["x"].shape == (5, 4, 4, 1)
    assert np.sum(near["radius"] <= 3 / 16) >= kept["k3/success"].sum()
    for bad in ("--k=0", "--window=4", "--k=a"):
        assert main([*words, bad, *out]) == 2


def test_seconds_are_of_natural_images_too(tmp_path, monkeypatch, capsys):
    net = models.mlp((16, 8, 3), key=jax.random.key(0))
    kind = {"family": "mlp", "options": {"sizes": [16, 8, 3]}, "normalize": ""}
    persist.save_model(tmp_path / "net.safetensors", net, kind)
    x = np.asarray(pictures(4, side=4))
    np.savez(tmp_path / "x.npz", x=x, y=np.asarray(net(x)).argmax(-1))
    monkeypatch.setattr(image_attack_command, "_natural", lambda *_: time.sleep(0.5) or {})
    words = ["--model", str(tmp_path / "net.safetensors"), "--data", str(tmp_path / "x.npz")]
    words += ["--k", "1", "--attack", "frank-wolfe(steps=2)", "--natural", "--json", "-"]
    assert main(["image-attack", *words]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["seconds"] >= content["budgets"][0]["seconds"] + 0.5


def test_flips_of_one_search_count_in_all(tmp_path, monkeypatch, capsys):
    """What the least radii prove, or a search within another radius, no accuracy contradicts."""
    torch = pytest.importorskip("torch", reason="PyTorch writes the checkpoint")
    torch.manual_seed(0)
    net = torch.nn.Sequential()
    net.add_module("fc1", torch.nn.Linear(36, 3))
    torch.save(net.state_dict(), tmp_path / "mlp.pth")
    rng = np.random.default_rng(0)
    x = rng.uniform(0, 1, (8, 6, 6, 1)).astype(np.float32)
    y = np.array(convert.load(tmp_path / "mlp.pth", "mlp").model(x)).argmax(-1)
    np.savez(tmp_path / "x.npz", x=x, y=y)
    # Of weak searches one step of which goes nowhere, so that most is left to the radii.
    weak = image.FrankWolfe(BALL, steps=1, momentum=0.0)
    monkeypatch.setattr(union, "members", lambda ball: ((weak, 1e-3),))
    words = ["image-attack", "--arch", "mlp", "--k", "1,4,18", "--window", "3", "--json", "-"]
    words += ["--weights", str(tmp_path / "mlp.pth"), "--data", str(tmp_path / "x.npz")]
    assert main(words) == 0
    alone = [row["attacked_accuracy"] for row in json.loads(capsys.readouterr().out)["budgets"]]
    points = ["--radii", str(tmp_path / "r.npz"), "--points", str(tmp_path / "p.npz")]
    assert main([*words, *points]) == 0
    found = json.loads(capsys.readouterr().out)["budgets"]
    with np.load(tmp_path / "r.npz") as radii, np.load(tmp_path / "p.npz") as saved:
        for row, before in zip(found, alone):
            proved = np.mean(radii["k"] > row["k"] * (1 + 1e-6))
            assert row["attacked_accuracy"] == proved
            label = f"k{row['k']:g}"
            assert np.mean(~saved[f"{label}/success"]) == proved
            assert (saved[f"{label}/cost"] <= row["eps"] * (1 + 1e-6)).all()
            assert row["max_cost"] <= row["eps"] * (1 + 1e-6)
            assert row["flips_of_other_searches"] == round((before - proved) * 8)
    assert alone[-1] == 1 > found[-1]["attacked_accuracy"]
    model = convert.load(tmp_path / "mlp.pth", "mlp").model
    within = image.image_wasserstein(model, x, y, eps=18 / 36, ball=BALL)
    nearest = image.minimum_radius(model, x, y, ball=BALL)
    with pytest.raises(ValueError, match="does not take key"):
        image.minimum_radius(model, x, y, ball=BALL, key=jax.random.key(0))
    folded = driver.within(within, nearest, 18 / 36)
    assert (folded.success == (nearest.cost <= 0.5)).all()
    assert (folded.gradients == within.gradients + nearest.gradients).all()
    np.testing.assert_array_equal(folded.margin > 0, folded.success)


@each
def test_forward_mode_gives_the_slope_of_the_points(name):
    """The models are linear, and scaled by t: the gradients that attacks follow depend on t.

    Where plans jump between vertices or radii, slopes are finite.
    """
    x = jax.random.uniform(jax.random.key(1), (2, 4, 4, 1), minval=0.1, maxval=0.9)
    w = jax.random.normal(jax.random.key(0), (16, 3))
    y = jnp.argmax(x.reshape(2, -1) @ w, axis=-1)

    def points(t):
        model = wdjax.Model(lambda w, x: x.reshape(len(x), -1) @ w, t * w)
        return search(name, model, x, y, diagnose=False).x_adv

    _, slope = jax.jvp(points, (1.0,), (1.0,))
    assert np.all(np.isfinite(slope))
    if name in ("plain", "nearest"):
        return
    step = 0.01
    known = (points(1 + step) - points(1 - step)) / (2 * step)
    assert np.max(np.abs(slope)) > 1e-3
    np.testing.assert_allclose(slope, known, atol=0.03 * float(np.max(np.abs(known))))
