"""When a flip is one: by how much rounding may move what a criterion says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wdjax
from wdjax import attacks, losses
from wdjax.attacks import ascent
from wdjax.balls import Lp
from wdjax.core import Samples, Victim
from wdjax.ensembles.rand import majority

fast = pytest.mark.fast
rng = np.random.default_rng(0)
Y = jnp.arange(6) % 4
LOGITS = jnp.asarray(rng.normal(size=(6, 4)), jnp.float32)
CLEAN = LOGITS + jnp.asarray(rng.normal(size=(6, 4)), jnp.float32)


def slack(criterion, out, clean):
    return np.asarray(ascent.read(criterion, Samples(None, Y, None, clean), out).slack)


def far(logits):
    return jnp.full((6, 2), -1e9) + 1e6 * logits[:, :2]


def first(out, y):
    return losses.decision_margin(out[:, 0], y)


def unless_refused(out, y):
    return jnp.minimum(losses.margin(out[0], y), -out[1])


# Outputs around the logits that are not read, and the criterion that reads past them.
UNREAD = {
    "classes that never win": (lambda z: jnp.concatenate([z, far(z)], 1), losses.decision_margin),
    "masked classes": (
        lambda z: jnp.where(jnp.arange(9) < 4, jnp.pad(z, ((0, 0), (0, 5))), -1e9),
        losses.margin,
    ),
    "another model": (lambda z: jnp.stack([z, 1e9 * z], 1), first),
    "a refusal": (lambda z: (z, -1e9 + 0 * z[:, 0]), unless_refused),
    "integers": (lambda z: {"z": z, "k": jnp.arange(6)}, lambda out, y: losses.margin(out["z"], y)),
}


@fast
@pytest.mark.parametrize("name", UNREAD)
def test_what_a_criterion_does_not_read_adds_nothing(name):
    around, criterion = UNREAD[name]
    wanted = slack(losses.margin, LOGITS, CLEAN)
    assert (wanted > 0).all()
    np.testing.assert_allclose(slack(criterion, around(LOGITS), around(CLEAN)), wanted, rtol=1e-6)


def bank(logits):
    return jnp.stack([logits, 0.5 * logits, -logits], 1)


@fast
@pytest.mark.parametrize(
    ("criterion", "around"),
    [
        (losses.decision_margin, jnp.asarray),
        (losses.probability_margin, jnp.asarray),
        (losses.dlr, jnp.asarray),
        (majority, bank),
        (lambda out, y: jnp.mean(jax.vmap(losses.margin, (1, None))(out, y), 0), bank),
    ],
    ids=["margin", "probabilities", "ratio", "majority", "mean"],
)
def test_rounding_moves_a_criterion_by_its_slack_at_most(criterion, around):
    out = np.asarray(around(100.0 + LOGITS), np.float64)
    bound = slack(criterion, jnp.asarray(out, jnp.float32), jnp.asarray(out, jnp.float32))
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        exact = jax.jit(lambda out: criterion(out, Y))
        value = np.asarray(exact(out))
        moved = 0.0
        for _ in range(100):
            ulps = 4 * np.spacing(np.float32(np.abs(out))) * rng.choice([-1, 1], out.shape)
            other = np.asarray(exact(out + ulps))
            moved = np.maximum(moved, np.abs(other - value))
    # An ulp is between a half and the whole of the unit that the slack counts in.
    assert (moved <= 1.01 * bound).all()
    assert (bound <= 4 * moved + 1e-9).all()


@fast
def test_derivatives_that_are_none_blind_nothing():
    """A step, a root at 0, a constant: no slack, and what is above 0 counts."""

    def step(out, y):
        return jnp.where(losses.margin(out, y) > 0, 1.0, -1.0)

    def root(out, y):
        return jnp.sqrt(jnp.maximum(losses.margin(out, y), 0.0)) + 0.5

    def opaque(out, y):
        return losses.margin(jax.lax.stop_gradient(out), y) + 100.0

    for criterion in (step, root, opaque):
        read = ascent.read(criterion, Samples(None, Y, None, CLEAN), LOGITS)
        assert np.isfinite(read.slack).all()
        np.testing.assert_array_equal(read.lasts, read.value > read.slack)
        assert read.lasts.any()
    # Ties are no flips, and neither is the least float that says which class argmax takes.
    tied = jnp.ones((6, 4))
    read = ascent.read(losses.decision_margin, Samples(None, Y, None, CLEAN), tied)
    assert (np.asarray(read.value) > 0).any()
    assert not read.lasts.any()


@fast
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float8_e5m2])
def test_floats_of_few_bits_have_a_slack_of_their_own(dtype):
    victim = Victim(None, losses.margin)
    out = jnp.array([[8.0, 8.0 + 8 * float(jnp.finfo(dtype).eps)], [8.0, 32.0]] * 3).astype(dtype)
    samples = Samples(None, jnp.zeros(6, int), None, jnp.full((6, 2), 8.0, dtype))
    read = ascent.read(victim.criterion, samples, out)
    assert read.slack.dtype == jnp.float32
    assert read.lasts.tolist() == [False, True] * 3


def net(p, x):
    """Two hidden layers, a common term in every product, and a choice of heads."""
    hidden = jax.nn.relu(x @ p["in"])
    logits = jax.nn.relu(hidden @ p["middle"]) @ (p["out"] + p["common"]) + p["shift"]
    heads = jnp.stack([logits, jax.nn.softmax(logits), jax.nn.log_softmax(logits)])
    return jnp.tensordot(p["head"], heads, 1)


NETS = {
    "logits": {},
    "small logits": {"scale": 1e-3},
    "common terms": {"common": 1.0},
    "large common terms": {"common": 1000.0},
    "shifted": {"shift": 1e5},
    "softmax": {"head": [0.0, 1.0, 0.0]},
    "log-softmax": {"head": [0.0, 0.0, 1.0]},
}


def made(common=0.0, shift=0.0, head=(1.0, 0.0, 0.0), scale=1.0):
    sizes = {"in": (100, 128), "middle": (128, 128), "out": (128, 10)}
    keys = dict(zip(sizes, jax.random.split(jax.random.key(3), 3)))
    p = {name: jax.random.normal(keys[name], size) / size[0] ** 0.5 for name, size in sizes.items()}
    rest = {"common": common, "shift": shift, "head": head}
    p |= {name: jnp.asarray(value, jnp.float32) for name, value in rest.items()}
    return wdjax.Model(net, p | {"out": scale * p["out"]})


HALVING = {
    "wda++": attacks.WDAPlusPlus(rivals=2),
    "fab": attacks.FAB(steps=10, targets=2),
    "walk": attacks.Walk(Lp(2)),
}


@pytest.mark.parametrize("name", HALVING)
def test_flips_hold_in_any_company(name):
    """What halvings and walks leave next to the boundary is a flip in every batch and program."""
    x = jax.random.uniform(jax.random.key(5), (30, 100))
    forward = jax.jit(lambda model, x: model(x))
    beside = jax.jit(lambda model, x, y: jax.grad(lambda x: losses.margin(model(x), y).sum())(x))
    for which, options in NETS.items():
        model = made(**options)
        y = jnp.argmax(forward(model, x), -1)
        found = wdjax.search(HALVING[name], model, x, y)
        assert found.success.mean() > 0.9, which
        points = found.x_adv
        success = np.asarray(found.success)
        order = rng.permutation(30)
        asked = [forward(model, points), forward(model, points[order])[np.argsort(order)]]
        for size in (1, 3, 10):
            parts = [forward(model, points[i : i + size]) for i in range(0, 30, size)]
            asked.append(jnp.concatenate(parts))
        for out in asked:
            assert (np.argmax(out, -1) != y)[success].all(), which
        assert np.isfinite(beside(model, points, y)).all()


FREE = {
    "walk": attacks.Walk(Lp(2, box=None)),
    "fmn": attacks.FMN(Lp(2, box=None)),
    "ddn": attacks.DDN(Lp(2, box=None)),
    "deepfool": attacks.DeepFool(Lp(2, box=None)),
    "fab": attacks.FAB(Lp(2, box=None), steps=20, targets=2),
}


@pytest.mark.parametrize("name", FREE)
def test_a_shift_of_all_logits_costs_what_its_rounding_takes(name):
    """Two classes: the distance is that of a margin of twice the slack, and no flip is lost."""
    normal = np.asarray(jax.random.normal(jax.random.key(1), (8,)))
    x = jax.random.uniform(jax.random.key(2), (16, 8))
    steep = 2 * np.linalg.norm(normal)

    def apply(p, x):
        return p["shift"] + jnp.stack([x @ p["w"], -x @ p["w"], 0 * x[:, 0] - 9.0], 1)

    for shift in (0.0, 1e3, 1e5, 3e6):
        model = wdjax.Model(apply, {"w": jnp.asarray(normal), "shift": jnp.float32(shift)})
        margin = np.abs(2 * np.asarray(x, float) @ normal)
        y = jnp.argmax(model(x), -1)
        found = wdjax.search(FREE[name], model, x, y)
        known = margin > np.spacing(np.float32(2 * shift))
        assert found.success[known].all()
        if shift < 1e6:  # From here on margins are a few floats.
            most = (margin + 2 * slack_of_two(shift, margin)) / steep
            ratio = np.asarray(found.cost)[known] / most[known]
            assert np.median(ratio) <= 1.03
            assert ratio.max() <= 1.25


def slack_of_two(shift, margin):
    """Of two logits at the boundary, each of which moved by half of the margin."""
    return 2.0**-23 * (8 * shift + 256 * margin)
