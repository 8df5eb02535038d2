"""Bounds to train through: their gradients, what they prove, and nets that are trained by them."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from wdjax import Lp, Model, attacks, certify, data, models, training

pytestmark = pytest.mark.fast


def filtered(params, x):
    kernel, head = params
    x = jax.lax.conv_general_dilated(
        x, kernel, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return jax.nn.relu(x).reshape(len(x), -1) @ head


@pytest.mark.parametrize(("norm", "backward"), [(math.inf, None), (2, 0.7)])
def test_gradients_are_those_of_finite_differences(norm, backward):
    rng = np.random.default_rng(0)
    params = [
        jnp.array(rng.normal(size=(3, 3, 1, 2)), jnp.float32),
        jnp.array(rng.normal(size=(8, 3)), jnp.float32),
    ]
    x = jnp.array(rng.uniform(0.2, 0.8, size=(3, 4, 4, 1)), jnp.float32)
    y = jnp.array([0, 1, 2])

    def total(params):
        model = Model(filtered, params)
        low = certify.trainable_bounds(model, x, y, norm=norm, eps=0.05, backward=backward)
        return jnp.sum(jnp.where(jnp.isinf(low), 0.0, low))

    slope = jax.jit(jax.grad(total))(params)
    value = jax.jit(total)
    for place in range(2):
        for _ in range(4):
            step = np.zeros(params[place].shape, np.float32)
            step.flat[rng.integers(step.size)] = 1e-2
            sides = [
                value([p + s * step if i == place else p for i, p in enumerate(params)])
                for s in (1, -1)
            ]
            found = float(jnp.sum(slope[place] * step))
            assert found == pytest.approx(float(sides[0] - sides[1]) / 2, rel=0.05, abs=1e-3)


def test_they_lie_between_intervals_and_the_truth():
    model, rng = models.mlp((4, 16, 16, 3), key=jax.random.key(0)), np.random.default_rng(1)
    x = jnp.array(rng.uniform(size=(8, 4)), jnp.float32)
    y = model(x).argmax(axis=-1)
    how = {"norm": math.inf, "eps": 0.1}
    ends = [
        jax.jit(lambda model, b=b: certify.trainable_bounds(model, x, y, backward=b, **how))(model)
        for b in (None, 1.0)
    ]
    found = certify.margin_bounds(model, x, y, method="interval", **how)
    np.testing.assert_allclose(ends[0], found, rtol=1e-5)
    points = jnp.clip(x + 0.1 * rng.choice([-1, 1, 0.3], size=(2000, *x.shape)), 0, 1)
    out = model(points.reshape(-1, 4)).reshape(2000, 8, 3)
    apart = jnp.min(jnp.take_along_axis(out, y[None, :, None], axis=2) - out, axis=0)
    rival = jnp.arange(3) != y[:, None]
    assert np.all((ends[1] <= apart + 1e-5) | ~rival)
    assert np.mean((ends[1] > ends[0])[rival]) > 0.9


def test_intervals_verify_what_is_trained_for_it():
    """Of a net that is trained otherwise they verify nothing at this radius."""
    train, test = data.digits()
    net, x, y = models.mlp((64, 64, 10), key=jax.random.key(0)), *test.take(200)
    proof = certify.CertifiedTraining(backward=True)
    trained = training.train(
        net, *train, key=jax.random.key(1), epochs=15, certificate=proof, eps=0.06
    )
    how = {"norm": math.inf, "eps": 0.05, "method": "interval", "batch_size": 200}
    assert np.mean(certify.certified(trained.model, x, y, **how)) > 0.35
    assert np.mean(trained.model(x).argmax(axis=-1) == y) > 0.8
    # Epochs tell what is verified at the radius of the time: all of it in the end.
    assert 0.4 < trained.history.robust_accuracy[-1] <= trained.history.accuracy[-1]


PGD = {
    norm: attacks.PGD(Lp(norm, None), steps=1, iterate="last", step_size=9.0)
    for norm in (2, math.inf)
}
STILL = optax.sgd(0.0)
WAYS = {
    "IBP": {},
    "CROWN-IBP": {"backward": True},
    "SABR": {"attack": True, "small": 0.3},
    "MTL-IBP": {"attack": True, "mix": 0.2},
    "CC-IBP": {"attack": True, "mix": 0.2, "blend": "logits"},
    "Exp-IBP": {"attack": True, "mix": 0.2, "blend": "powers"},
    "both": {"attack": True, "mix": 0.6, "small": 0.5},
    "adversarial": {"attack": True, "mix": 0.0},
}


@pytest.mark.parametrize("norm", PGD)
def test_all_methods_are_one_on_linear_models(norm):
    """Where a gradient step attains the exact bound: each loss is ``log(1 + exp(eps |w| - m))``."""
    rng = np.random.default_rng(3)
    w, x = rng.normal(size=(6, 2)), rng.uniform(size=(8, 6))
    y = np.arange(8) % 2
    size = np.linalg.norm(w[:, 1] - w[:, 0], {2: 2, math.inf: 1}[norm])
    margin = np.where(y, 1, -1) * (x @ (w[:, 1] - w[:, 0])) - 0.3 * size
    model = Model(lambda w, x: x @ w, jnp.asarray(w, jnp.float32))
    for name, way in WAYS.items():
        if norm == 2 and name not in ("SABR", "both"):
            continue
        way = way | ({"attack": PGD[norm]} if "attack" in way else {})
        proof = certify.CertifiedTraining(norm=norm, box=None, warm=0.0, ramp=1e-6, **way)
        seen = training.train(
            model, x.astype(np.float32), y, key=jax.random.key(0), epochs=2, batch_size=8,
            certificate=proof, eps=0.3, optimizer=STILL,
        ).history  # fmt: skip
        assert seen.loss[-1] == pytest.approx(np.mean(np.logaddexp(0, -margin)), rel=1e-4), name
        assert seen.robust_accuracy[-1] == pytest.approx(np.mean(margin > 0)), name


def test_a_smaller_ball_lies_within_the_whole_one():
    """As seen by a certificate that keeps the centres and the radius it is asked for."""
    seen = []

    class Spy(certify.CertifiedTraining):
        def margins(self, model, x, y, eps, done):
            jax.debug.callback(lambda *t: seen.append(t), x, eps)
            return super().margins(model, x, y, eps, done)

    jax.tree_util.register_dataclass(
        Spy,
        ["warm", "ramp", "clean", "attack", "mix", "small"],
        ["norm", "box", "blend", "backward", "regularise"],
    )
    net, x = models.mlp((4, 8, 3), key=jax.random.key(0)), jnp.full((6, 4), 0.05)
    pgd = attacks.PGD(steps=3, iterate="last")
    training.train(
        net, x, jnp.arange(6) % 3, key=jax.random.key(0), epochs=2, batch_size=6, eps=0.2,
        certificate=Spy(warm=0.0, ramp=1e-6, attack=pgd, small=0.25),
    )  # fmt: skip
    jax.effects_barrier()
    center, radius = seen[-1]
    assert radius == pytest.approx(0.05)
    reach = np.abs(center - 0.05)
    assert np.max(reach) == pytest.approx(0.15)
    assert np.max(reach) + radius <= 0.2 + 1e-6
    assert np.min(center) == 0


LIRPA = {
    ("dense", math.inf): ([-0.18787, 0.10056, -0.05796], [-0.05199, 0.25504, 0.01836]),
    ("conv", math.inf): ([-0.32859, -0.37721, -0.42816], [-0.0976, -0.13169, -0.16066]),
    ("conv", 2): ([-0.61297, -0.65108, -0.84488], [-0.22531, -0.25056, -0.36375]),
    ("sigmoid", math.inf): ([-0.00927, 0.17281, 0.65288], [0.06031, 0.25399, 0.74416]),
}
"""The first sample's margins, of the true label with each other, by ``IBP`` and ``CROWN-IBP`` of
auto_LiRPA 0.3, within linf .05 and l2 .2 without a box."""


@pytest.mark.parametrize(("name", "norm"), LIRPA)
def test_margins_are_not_below_those_of_auto_lirpa(name, norm):
    """But for what rounding, which they leave out, is charged: up to 2e-4 here."""
    rng = np.random.default_rng(0)
    shapes = [(12, 16), (16, 16), (16, 4), (3, 3, 2, 4), (3, 3, 4, 4), (16, 4), (12, 16), (16, 4)]
    w = [rng.normal(size=s) / np.sqrt(np.prod(s[:-1])) for s in shapes]
    w = [t.astype(np.float32) for t in w]
    flat, images = (rng.uniform(0.2, 0.8, s).astype(np.float32) for s in ((3, 12), (3, 4, 4, 2)))

    def conv(w, x):
        x = jax.nn.relu(models.conv.conv(x, w[3], 1, 1))
        return jax.nn.relu(models.conv.conv(x, w[4], 2, 1)).reshape(len(x), -1) @ w[5]

    apply, x = {
        "dense": (lambda w, x: jax.nn.relu(jax.nn.relu(x @ w[0]) @ w[1]) @ w[2], flat),
        "conv": (conv, images),
        "sigmoid": (lambda w, x: jax.nn.sigmoid(x @ w[6]) @ w[7], flat),
    }[name]
    model = Model(apply, w)
    y = jnp.argmax(model(x[:1]), axis=-1)
    eps = 0.2 if norm == 2 else 0.05
    how = {"norm": norm, "eps": eps, "box": None}
    bounds = jax.jit(lambda w, b: certify.trainable_bounds(w, x[:1], y, backward=b, **how))
    for theirs, backward in zip(LIRPA[name, norm], (0.0, 1.0)):
        own = np.delete(np.asarray(bounds(model, backward)[0]), int(y[0]))
        assert np.all(own >= np.array(theirs) - 3e-4), (own, theirs)


def test_intervals_keep_their_width_through_new_weights():
    net = models.mlp((300, 300, 300, 300), key=jax.random.key(0))
    low = np.random.default_rng(0).uniform(size=300).astype(np.float32) * 0.9
    widths = [
        float(
            jnp.mean(
                jnp.subtract(*certify.bound(lambda x, m=m: m(x[None])[0], low, low + 0.1)[::-1])
            )
        )
        for m in (certify.interval_start(net, key=jax.random.key(1)), net)
    ]
    # The last layer has no ReLU, which would halve its width: twice that of the inputs.
    assert widths[0] == pytest.approx(0.2, rel=0.15)
    assert widths[1] > 10
    with pytest.raises(ValueError, match="kernel"):
        certify.interval_start(Model(lambda w, x: x @ w, jnp.eye(2)), key=jax.random.key(0))


def test_the_regularisers_are_those_of_shi_et_al():
    """By NumPy, on the intervals of one layer."""
    rng = np.random.default_rng(2)
    w = rng.normal(size=(5, 40)).astype(np.float32) * 2
    v, x = rng.normal(size=(40, 2)).astype(np.float32), rng.uniform(size=(3, 5)).astype(np.float32)
    model = Model(lambda w, x: jnp.maximum(0.0, x @ w[0]) @ w[1], [w, v])
    proof = certify.CertifiedTraining(box=None, warm=0.0, ramp=1.0, regularise=0.7)
    found = jax.jit(proof.penalty)(model, x, 0.1, 0.4)
    center, half = x @ w, 0.04 * np.sum(np.abs(w), axis=0) * np.ones((3, 1))
    apart, parts = (center - center.mean()) ** 2, [0.04 / half.mean()]
    for size in (np.abs(center), apart):
        one, two = (np.sum(size[these]) for these in (center > half, center < -half))
        parts.append(min(one / two, two / one))
    expected = sum(max(0, 0.5 - part) / 0.5 for part in parts)
    assert expected > 0.5
    assert found == pytest.approx(0.7 * 0.6 * expected, rel=1e-3)
    assert proof.penalty(model, x, 0.1, 1.0) == 0


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"warm": 0.7}, "warm"),
        ({"ramp": 1.5}, "ramp"),
        ({"clean": -0.1}, "clean"),
        ({"norm": 3}, "norm"),
        ({"box": (1.0, 0.0)}, "box"),
        ({"mix": 0.5}, "no attack"),
        ({"small": 0.5}, "no attack"),
        ({"mix": 1.5, "attack": attacks.PGD()}, "mix"),
        ({"attack": attacks.PGD(Lp(2))}, "stay within eps in the ball"),
        ({"attack": attacks.FMN()}, "stay within eps in the ball"),
        ({"attack": "pgd"}, r"attack must be of wdjax\.attacks"),
        ({"attack": attacks.PGD}, "got the class PGD"),
        ({"regularise": -1.0}, "regularise"),
        ({"regularise": math.inf}, "regularise"),
        ({"regularise": "a"}, "regularise"),
        ({"blend": "both"}, "blend"),
        ({"warm": np.float32(-0.1)}, "warm"),
        ({"small": np.float32(0.1)}, "no attack"),
        ({"mix": jnp.asarray(1.5), "attack": attacks.PGD()}, "mix"),
    ],
)
def test_bad_schedules_are_refused(wrong, said):
    with pytest.raises(ValueError, match=said):
        certify.CertifiedTraining(**wrong)


def test_a_certificate_goes_with_a_radius_and_without_an_attack():
    net, x, y = models.mlp((4, 3), key=jax.random.key(0)), jnp.full((2, 4), 0.5), jnp.array([0, 1])
    how = {"key": jax.random.key(0), "certificate": certify.CertifiedTraining()}
    for wrong in ({}, {"eps": 0.1, "attack": attacks.fgsm()}, {"eps": 0.1, "kappa": 2.0}):
        with pytest.raises(ValueError, match=r"certificate|kappa"):
            training.train(net, x, y, **how, **wrong)


def test_samples_lie_in_the_box_of_the_certificate():
    net, y = models.mlp((2, 3), key=jax.random.key(0)), jnp.array([0, 1])
    x = jnp.array([[1.5, 0.2], [0.3, 1.8]])
    how = {"key": jax.random.key(0), "epochs": 1, "eps": 0.1}
    for box in ((0.0, 2.0), None):
        proof = certify.CertifiedTraining(box=box)
        assert jnp.isfinite(training.train(net, x, y, certificate=proof, **how).history.loss).all()
    with pytest.raises(ValueError, match=r"outside the box \[0, 1.2"):
        training.train(net, x, y, certificate=certify.CertifiedTraining(box=(0.0, 1.2)), **how)


@pytest.mark.parametrize("wrong", [attacks.PGD(), "IBP", certify.trainable_bounds, True])
def test_a_certificate_that_is_none_is_refused(wrong):
    net, x, y = models.mlp((4, 3), key=jax.random.key(0)), jnp.full((2, 4), 0.5), jnp.array([0, 1])
    with pytest.raises(ValueError, match="certificate must be bounds to train through"):
        training.train(net, x, y, key=jax.random.key(0), certificate=wrong, eps=0.1)


@pytest.mark.parametrize("weight", [2.0, -0.5, math.nan])
def test_a_weight_of_backward_bounds_lies_between_0_and_1(weight):
    """Beyond, the mean of two lower bounds is none."""
    model, x = Model(lambda w, x: x @ w, jnp.eye(2)), jnp.array([[0.9, 0.1]])
    with pytest.raises(ValueError, match=r"backward must be .* in \[0, 1\]"):
        certify.trainable_bounds(model, x, jnp.array([0]), norm=2, eps=0.1, backward=weight)
    for wrong in ("a", np.full(1, 0.5), "0.5"):
        with pytest.raises(ValueError, match="backward must be"):
            certify.trainable_bounds(model, x, jnp.array([0]), norm=2, eps=0.1, backward=wrong)
    net = models.mlp((2, 3, 2), key=jax.random.key(0))
    how = {"norm": 2, "eps": 0.1}
    traced = jax.jit(lambda w: certify.trainable_bounds(net, x, jnp.array([0]), backward=w, **how))
    ends = [traced(jnp.float32(end))[0, 1] for end in (0, 1)]
    assert traced(jnp.float32(weight))[0, 1] in (*ends, -math.inf)


@pytest.mark.parametrize("backward", [None, 1.0])
def test_labels_that_are_no_classes_have_no_bounds(backward):
    """JAX would count -1 from the end, or bound a logit alone."""
    model, x = Model(lambda w, x: x @ w, jnp.eye(2)), jnp.array([[0.9, 0.1]] * 4)
    how = {"norm": math.inf, "eps": 0.1, "box": None, "backward": backward}
    low = certify.trainable_bounds(model, x, jnp.array([0, -1, 2, -3]), **how)
    assert low[0, 1] == pytest.approx(0.6, abs=1e-4)
    assert (low[1:] == -math.inf).all()
