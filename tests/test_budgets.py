"""Budgets that make no sense, and settings in which nothing can be certified, are said to be so."""

import functools
import inspect
import json
import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_misuse import CALLS, KEY, MODEL, PGD, X, Y, call

import wdjax
from wdjax import Lp, attacks, certify, ensembles, image, nppr, smoothing, training
from wdjax import transductive as games
from wdjax.checks import arguments
from wdjax.cli import main
from wdjax.engine import driver
from wdjax.report import audit
from wdjax.smoothing import noise

fast = pytest.mark.fast

# No ball, or none that has one diameter; the ball of the attack; warnings that are returned.
WITHOUT = {certify.certified_accuracy, games.raise_objective, smoothing.cautions}
BUDGETED = [
    function
    for function, given in CALLS.items()
    if function not in WITHOUT
    and ({"eps", "perturbation"} & set(given) or function is audit.sandwich)
    and "net" not in given
]


@pytest.fixture
def said():
    """What is warned of, with where it is said to come from."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


def sent(eps):
    return {"eps": eps, "perturbation": nppr.distributions.UniformBall(eps), "eps_list": [0.1, eps]}


@fast
@pytest.mark.parametrize("function", [pytest.param(f, id=f"{f.__module__}.{f.__name__}")
                                      for f in BUDGETED])  # fmt: skip
def test_a_budget_in_grey_levels_is_warned_of(function):
    """At the door, before any work: as an error it comes at once."""
    given = CALLS[function]
    bad = {name: value for name, value in sent(8.0).items() if name in given}
    units = "k / \\(height width\\)" if "z" in given or function is image.image_wasserstein else (
        "8/255")  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match=rf"eps=8 is beyond.*{units}"):
            call(function, given | bad)


def test_the_table_of_budgets_is_long():
    """A function whose budget is not looked at is not left out by the filter."""
    takes = [f for f in CALLS if "eps" in inspect.signature(f).parameters]
    assert {*takes} - {*BUDGETED} == WITHOUT | {f for f in takes if "net" in CALLS[f]}
    assert len(BUDGETED) > 35


@fast
@pytest.mark.parametrize("ask", [
    functools.partial(wdjax.search, PGD, MODEL, X, Y),
    functools.partial(wdjax.run, PGD, MODEL, X, Y),
    functools.partial(certify.certified, MODEL, X, Y, norm=jnp.inf),
    functools.partial(certify.verify, MODEL, X, Y, norm=jnp.inf, steps=0),
    functools.partial(ensembles.bisect, PGD, MODEL, X, Y, rounds=2),
    functools.partial(ensembles.mixed, PGD, MODEL, X, Y),
    functools.partial(training.train, MODEL, X, Y, attack=PGD, epochs=1, key=KEY),
])  # fmt: skip
def test_one_warning_to_whoever_asked(ask, said):
    ask(eps=1.0)
    assert not [w for w in said if "is beyond" in str(w.message)], "all of the box is no mistake"
    said.clear()
    ask(eps=1.01)
    (only,) = [w for w in said if "is beyond 1, " in str(w.message)]
    assert only.category is UserWarning
    assert only.filename == __file__


@fast
def test_diameters_are_those_of_the_corners():
    corners = {norm: float(np.linalg.norm(np.ones(12), norm)) for norm in (1, 2, np.inf)}
    for norm, size in corners.items():
        for low, high in ((0, 1), (-1, 1), (0, 255)):
            ball = Lp(norm, (low, high))
            assert ball.diameter((2, 2, 3)) == pytest.approx((high - low) * size)
            cost = ball.cost(
                jnp.full((1, 2, 2, 3), float(low)), jnp.full((1, 2, 2, 3), float(high))
            )
            assert float(cost[0]) == pytest.approx(ball.diameter((2, 2, 3)), rel=1e-6)
    assert Lp(2, None).diameter((2,)) == math.inf
    assert "8/255" in arguments.too_far(Lp(), (4,), [0.1, 8])
    assert "2 * 8/255" in arguments.too_far(Lp(box=(-1, 1)), (4,), 8)
    assert arguments.too_far(Lp(box=(0, 255)), (4,), 8) is None
    assert arguments.too_far(Lp(box=None), (4,), 8) is None
    assert arguments.too_far(object(), (4,), 8) is None
    assert "by 255" in arguments.too_near(Lp(box=(0, 255)), 0.3)
    assert arguments.too_near(image.ImageWasserstein(high=255.0), 0.3) is None


@fast
@pytest.mark.parametrize(("window", "channels"), [(3, "shared"), (None, "shared"), (5, "separate")])
def test_the_farthest_image_is_as_far_as_mass_can_go(window, channels):
    """All mass in one corner, sent as far as a window goes, in every channel."""
    ball = image.ImageWasserstein(window, channels=channels)
    count = 2 if channels == "separate" else 1
    step = 3 if window is None else window // 2
    here, there = np.zeros((1, 4, 4, count)), np.zeros((1, 4, 4, count))
    here[0, 0, 0], there[0, step, step] = 1, 1
    exact = image.image_wasserstein_distance(here, there, ball=ball)
    assert ball.diameter((4, 4, count)) == pytest.approx(float(exact[0]))
    corner = np.zeros((1, 4, 4, 1))
    corner[0, 3, 3] = 1
    plain = image.image_wasserstein_distance(here[..., :1], corner, ball=image.ImageWasserstein())
    assert noise.Flow(0.1).diameter((4, 4, 1)) == pytest.approx(float(plain[0]))
    assert noise.Flow(0.1, cost="l1").diameter((4, 4, 1)) == 6


@fast
def test_budgets_are_spent_in_their_ball(said):
    """Points know how far their ball goes; a long way for a part of the mass is no mistake."""
    wdjax.run(PGD, MODEL, X, Y, eps=0.9, kappa=4.0, diagnose=False)
    found = wdjax.search(wdjax.attacks.WDAPlusPlus(steps=3), MODEL, X, Y, diagnose=False)
    wdjax.spend(found, eps=1.0)
    swept = jax.jit(jax.vmap(lambda eps: wdjax.run(PGD, MODEL, X, Y, eps=eps).accuracy))
    assert np.all(np.isfinite(swept(jnp.array([0.1, 8.0]))))
    inside = jax.jit(lambda x: wdjax.search(PGD, MODEL, x, Y, eps=0.5))(X)
    assert inside.limit.tolist() == found.limit.tolist() == [1.0, 1.0]
    assert not [w for w in said if "is beyond" in str(w.message)]
    for points in (found, wdjax.best_of(found, found)):
        with pytest.warns(UserWarning, match=r"eps=8 is beyond 1.*8/255"):
            wdjax.spend(points, eps=8)


CONSTANT = wdjax.Model(lambda w, x: jnp.broadcast_to(w, (len(x), 3)), jnp.array([1.0, 0.0, 0.0]))
HOPELESS = {
    "no noise": (dict(noise=noise.Gaussian(1e-30)), "nothing can be certified.*raise sigma"),
    "no noise, l1": (dict(noise=noise.Laplace(1e-30)), "nothing can be certified.*raise sigma"),
    "few votes": (dict(n=9), "nothing can be certified: 9 votes.*raise n"),
    "few votes, in sequence": (dict(n=9, eps=0.01), "nothing can be certified: 9 votes"),
    "few votes, randomized": (dict(n=2, test="randomized", alpha=1e-4), "raise n"),
    "far": (dict(n=100, eps=[0.1, 0.5]), "eps=0.5 cannot be certified.*radius 0.2986"),
}


@fast
@pytest.mark.parametrize("case", [pytest.param(v, id=k) for k, v in HOPELESS.items()])
def test_what_no_votes_can_certify_is_said(case, said):
    """And it is true: an ideal model, constant, has no such certificate."""
    change, message = case
    how = {"noise": noise.Gaussian(0.2), "key": KEY, "n": 200} | change
    found = smoothing.certify(CONSTANT, X, np.zeros(2, int), **how)
    (only,) = [str(w.message) for w in said]
    with pytest.raises(UserWarning, match=message):
        raise UserWarning(only)
    wanted = np.max(how.get("eps", 0.0))
    assert np.all(found.radius <= wanted)
    assert np.all(found.radius < wanted) or wanted == 0


@fast
@pytest.mark.parametrize("test", ["clopper-pearson", "randomized", "sequential"])
def test_what_votes_can_certify_is_not_warned_of(test, said):
    """Up to the last radius that the constant model gets."""
    eps = 0.34 if test == "sequential" else None
    how = {"noise": noise.Gaussian(0.2), "key": KEY, "n": 200, "test": test, "eps": eps}
    found = smoothing.certify(CONSTANT, X, np.zeros(2, int), **how)
    assert np.all(found.radius >= 0.34)
    assert not said
    own = {"noise": noise.Gaussian(0.2), "n": 200, "alpha": 0.001, "test": test}
    most = [eps for eps in np.linspace(0.3, 0.6, 61) if not smoothing.cautions(X, eps=eps, **own)]
    assert found.radius.max() <= max(most) + 0.005


@fast
def test_other_votes_that_cannot_tell_are_said(said):
    for ask in (
        lambda: smoothing.predict(MODEL, X, noise=noise.Gaussian(0.2), key=KEY, n=8),
        lambda: nppr.probabilistic_accuracy(
            MODEL, nppr.distributions.UniformBall(0.01), X, Y, key=KEY, rho=0.01, draws=40
        ),
        lambda: ensembles.smoothed(PGD, MODEL, X, Y, noise=noise.Gaussian(0.2), key=KEY, eps=0.1,
                                   votes=8, count=2),
        lambda: smoothing.certify(MODEL, X, Y, noise=noise.Gaussian(0.2), key=KEY, n=100,
                                  alpha=0.5).accuracy(0.1, 1, alpha=0.01),
    ):  # fmt: skip
        said.clear()
        ask()
        (only,) = [w for w in said if "can be" in str(w.message) or "abstains" in str(w.message)]
        assert only.filename == __file__


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """What commands are given: a small MLP, and images."""
    import safetensors.numpy

    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("given")
    shapes = {"fc1.weight": (8, 16), "fc1.bias": (8,), "fc2.weight": (3, 8), "fc2.bias": (3,)}
    tensors = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    safetensors.numpy.save_file(tensors, folder / "mlp.safetensors")
    images = rng.uniform(0, 1, (6, 4, 4, 1)).astype(np.float32)
    hidden = np.maximum(images.reshape(6, -1) @ tensors["fc1.weight"].T + tensors["fc1.bias"], 0)
    y = (hidden @ tensors["fc2.weight"].T + tensors["fc2.bias"]).argmax(1)
    np.savez(folder / "x.npz", x=images, y=y)
    return ["--arch", "mlp", "--weights", str(folder / "mlp.safetensors"), "--data",
            str(folder / "x.npz"), "--json", "-"]  # fmt: skip


COMMANDS = {
    "attack": ("attack --norm linf --attacks fgsm --eps", ("8", "8/255"), "8/255"),
    "attack, kappa": ("attack --norm linf --attacks pgd --kappa 4 --eps", ("8", "0.9"), "8/255"),
    "certify": ("certify --norm l2 --method interval --steps 1 --eps", ("8", "1/2"), "8/255"),
    "certify, w1": ("certify --norm w1 --method interval --steps 1 --eps", ("12", "0.01"),
                    "k / (height width)"),
    "lipschitz": ("certify --norm l2 --method lipschitz --eps", ("8",), "8/255"),
    "nppr": ("nppr --norm linf --mode independent --steps 2 --draws 20 --components 2 --eps",
             ("8",), "8/255"),
    "images": ("image-attack --k", ("5,100",), "k / (height width)"),
    "smoothing, far": ("certify --method smoothing --norm l2 --sigma 1/4 --votes 200 --eps",
                       ("8", "1/4"), "8/255"),
    "smoothing, small": ("certify --method smoothing --norm l2 --eps 1/4 --votes 100 --sigma",
                         ("1e-6", "1/4"), "raise sigma"),
    "smoothing, few": ("certify --method smoothing --norm l2 --eps 1/8 --sigma 1/4 --test "
                       "randomized --votes", ("2", "100"), "raise n"),
    "smoothing, w1": ("certify --method smoothing --norm w1 --sigma 0.1 --votes 200 --eps",
                      ("12", "0.01"), "k / (height width)"),
}  # fmt: skip


@pytest.mark.parametrize("command", [pytest.param(v, id=k) for k, v in COMMANDS.items()])
def test_commands_write_what_they_warn_of(given, command, capsys):
    words, values, message = command
    name, *rest = words.split()
    for value, warned in zip(values, (True, False)):
        assert main([name, *given, *rest, value]) == 0
        captured = capsys.readouterr()
        content = json.loads(captured.out)
        assert any(message in text for text in content["remarks"]) == warned, content["remarks"]
        assert (message in captured.err) == warned
        assert bool(content["remarks"]) == warned


def test_spending_beyond_the_radius_of_a_search_is_said():
    """Flips beyond the radius were not looked for; the rest of the budget could pay for them."""
    x, y = jnp.array([[0.6, 0.4], [0.9, 0.1], [0.8, 0.2]]), jnp.array([0, 0, 0])
    pair = wdjax.Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [-1.0, 1.0]]))
    found = wdjax.search(attacks.PGD(), pair, x, y, eps=0.15)
    assert found.radius.tolist() == pytest.approx([0.15] * 3)
    said = "2 of 3 samples have no flip within 0.15"
    for eps, order, kappa in ((0.15, 1, None), (0.1, 2, None), (0.2, jnp.inf, None), (0.15, 1, 2)):
        with pytest.warns(UserWarning, match=said):
            wdjax.spend(found, eps=eps, order=order, kappa=kappa)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wdjax.spend(found, eps=0.15, order=jnp.inf)
        wdjax.spend(found, eps=0.02, order=1)
        wdjax.spend(found, eps=0.15, order=2, kappa=1)
        near = wdjax.search(attacks.WDAPlusPlus(), pair, x, y, diagnose=False)
        assert bool(jnp.all(jnp.isinf(near.radius)))
        wdjax.spend(wdjax.best_of(found, near), eps=0.3, order=1)
    with pytest.warns(UserWarning, match=said):
        wdjax.spend(driver.within(found, near, 0.15), eps=0.3, order=1)


def test_a_radius_below_that_of_the_search_is_said():
    """Flips at .3 say nothing of those at .1, which the search had no reason to look for."""
    x, y = jnp.array([[0.6, 0.4], [0.52, 0.48]]), jnp.array([0, 0])
    pair = wdjax.Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [-1.0, 1.0]]))
    found = wdjax.search(attacks.PGD(), pair, x, y, eps=0.3)
    with pytest.warns(UserWarning, match="2 of 2 samples have a flip at the edge of this search"):
        assert not wdjax.spend(found, eps=0.1, order=jnp.inf).weight.any()
    near = wdjax.search(attacks.WDAPlusPlus(), pair, x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert wdjax.spend(near, eps=0.11, order=jnp.inf).weight.tolist() == [1, 1]


def test_costs_of_two_norms_are_not_compared():
    x, y = jnp.array([[0.6, 0.4]]), jnp.array([0])
    pair = wdjax.Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [-1.0, 1.0]]))
    one, two = (wdjax.search(attacks.WDAPlusPlus(Lp(p)), pair, x, y) for p in (jnp.inf, 2))
    with pytest.raises(ValueError, match="results of one norm and box"):
        wdjax.best_of(one, two)
