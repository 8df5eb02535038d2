"""Models that JAX cannot trace: attacks find what they find on the traced twin, proofs refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wdjax
from wdjax import attacks, certify, convert, identity, lipschitz, smoothing, training
from wdjax.checks import independence

RNG = np.random.default_rng(0)
IN, OUT = (RNG.normal(size=shape).astype(np.float32) for shape in ((8, 5), (5, 4)))
X = RNG.uniform(0.2, 0.8, (6, 2, 4)).astype(np.float32)


def forward(x):
    return np.tanh(x.reshape(len(x), -1) @ IN) @ OUT


def backward(x, change):
    hidden = np.tanh(x.reshape(len(x), -1) @ IN)
    return ((change @ OUT.T * (1 - hidden**2)) @ IN.T).reshape(x.shape)


def apply(params, x):
    return jnp.tanh(x.reshape(len(x), -1) @ params[0]) @ params[1]


MODEL, TWIN = convert.opaque(forward, backward), wdjax.Model(apply, (IN, OUT))
Y = np.asarray(TWIN(X)).argmax(axis=1)


@pytest.mark.fast
def test_values_and_derivatives_are_those_of_the_twin_under_every_transformation():
    weights = RNG.normal(size=(6, 4)).astype(np.float32)

    def both(model):
        out, back = jax.vjp(model, X)
        stacked = jax.vmap(model)(jnp.stack([X, 1 - X]))
        rows = jax.vmap(jax.jacrev(lambda row: model(row[None])[0]))(X)
        return out, back(weights), stacked, rows

    for call in (both, jax.jit(both)):
        for one, other in zip(call(MODEL), call(TWIN)):
            np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("attack", [attacks.PGD(wdjax.Lp(2), steps=5), attacks.DDN(steps=8)])
def test_an_attack_finds_the_points_that_it_finds_on_the_twin(attack):
    eps = {"eps": 0.3} if attack.budget == "sample" else {}
    one, other = (wdjax.search(attack, model, X, Y, **eps) for model in (MODEL, TWIN))
    np.testing.assert_allclose(one.x_adv, other.x_adv, atol=1e-5)
    np.testing.assert_array_equal(one.success, other.success)
    assert np.asarray(one.gradients).sum() == np.asarray(other.gradients).sum() > 0


def test_smoothing_only_calls_it():
    noise = smoothing.noise.Gaussian(0.1)
    how = {"x": X[:2], "noise": noise, "n": 64, "key": jax.random.key(0)}
    one, other = (smoothing.tally(model, **how) for model in (MODEL, TWIN))
    np.testing.assert_array_equal(one, other)


BALL = {"norm": 2, "eps": 0.1}
PROOFS = {
    "certified": lambda: certify.certified(MODEL, X, Y, **BALL),
    "verify": lambda: certify.verify(MODEL, X, Y, **BALL),
    "trainable_bounds": lambda: certify.trainable_bounds(MODEL, X, Y, **BALL),
    "bound": lambda: certify.bound(MODEL, X, X),
    "lipschitz_constant": lambda: certify.lipschitz_constant(MODEL, X, Y, norm=2),
    "layer_product": lambda: certify.layer_product(MODEL, X[0], X[0] + 0.1, norm=2),
    "global_radius": lambda: lipschitz.global_radius(MODEL, X, Y, norm=2),
    "growth_bound": lambda: certify.growth_bound(MODEL, X, Y, order=1, **BALL),
    "local_lipschitz": lambda: lipschitz.local_lipschitz(MODEL, X, Y, **BALL),
}


@pytest.mark.fast
@pytest.mark.parametrize("proof", PROOFS)
def test_what_proves_refuses_it_by_name(proof):
    with pytest.raises(ValueError, match=r"outside JAX .*as those of convert\.opaque"):
        PROOFS[proof]()


@pytest.mark.fast
def test_training_refuses_it():
    with pytest.raises(ValueError, match="no parameters"):
        training.train(MODEL, X, Y, key=jax.random.key(0), epochs=1)


@pytest.mark.fast
def test_whether_samples_mix_is_tried_since_it_cannot_be_proved():
    proof = independence.proof(MODEL, X.shape[1:], jnp.dtype(jnp.float32))
    assert (proof.alone, proof.where) == (False, "pure_callback")
    independence.check(MODEL, X)
    mixing = convert.opaque(lambda x: forward(x - x.mean(axis=0)), backward)
    with pytest.raises(ValueError, match="depends on the rest of its batch"):
        wdjax.search(attacks.fgsm(), mixing, X, Y, eps=0.1)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("function", "gradient", "said"),
    [
        (lambda x: forward(x).round().astype(int), backward, "function must return floats"),
        (lambda x: forward(x) + 0j, backward, "function must return floats"),
        (lambda x: forward(x).astype(str), backward, "function must return floats"),
        (lambda x: forward(x)[:1], backward, r"must return \[n, K\] for n samples"),
        (lambda x: forward(x).sum(), backward, r"must return \[n, K\] for n samples"),
        (lambda x: forward(x)[:, 0], lambda x, change: x, r"must return logits \[6, K\]"),
        (forward, lambda x, change: x.reshape(len(x), -1), "must return the shape of x"),
        (forward, lambda x, change: x > 0, "gradient must return floats"),
        (forward, lambda x: x, "TypeError"),
    ],
)
def test_what_it_returns_is_checked(function, gradient, said):
    with pytest.raises(ValueError, match=said):
        wdjax.search(attacks.fgsm(), convert.opaque(function, gradient), X, Y, eps=0.1)


@pytest.mark.fast
def test_what_it_returns_is_checked_at_every_call():
    two = convert.opaque(lambda x: forward(x)[:, : 4 if len(x) == 2 else 3], backward)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"returned \[6, 3\] for 6 samples"):
        jax.block_until_ready(two(X))


@pytest.mark.fast
@pytest.mark.parametrize("bad", [None, 3, "tanh"])
def test_only_functions_are_taken(bad):
    with pytest.raises(ValueError, match="function must be a function of NumPy arrays"):
        convert.opaque(bad, backward)
    with pytest.raises(ValueError, match="gradient must be a function of NumPy arrays"):
        convert.opaque(forward, bad)


@pytest.mark.fast
def test_what_is_not_a_number_is_refused_or_a_fault():
    where = X.sum((1, 2)) > 4
    assert 0 < where.sum() < 6

    def sick(x):
        return np.where(x.sum(tuple(range(1, x.ndim)), keepdims=True) > 4, np.nan, 1)

    outputs = convert.opaque(lambda x: forward(x) * sick(x)[:, 0], backward)
    with pytest.raises(ValueError, match="outputs that are not finite"):
        wdjax.search(attacks.PGD(steps=3), outputs, X, Y, eps=0.1)
    slopes = convert.opaque(forward, lambda x, change: backward(x, change) * sick(x))
    found = wdjax.search(attacks.PGD(steps=3), slopes, X, Y, eps=1e-6)
    np.testing.assert_array_equal(found.fault, where)


@pytest.mark.fast
def test_functions_of_one_name_are_told_apart_by_what_they_return():
    def of(scale):
        def function(x):
            return scale * forward(x)

        model = convert.opaque(function, backward)
        return identity.digest(identity.program(lambda model, x: model(x), model, X))

    assert of(1.0) == of(1.0)
    assert of(1.0) != of(1.5)


def test_a_torch_module_in_place():
    torch = pytest.importorskip("torch", reason="the module is PyTorch's")
    torch.manual_seed(0)
    layers = torch.nn.Conv2d(2, 3, 3), torch.nn.Tanh(), torch.nn.Flatten(), torch.nn.Linear(24, 4)
    module = torch.nn.Sequential(*layers)
    with pytest.raises(ValueError, match=r"training form.*eval\(\)"):
        convert.opaque_torch(module)
    model = convert.opaque_torch(module.eval())
    state = {name: jnp.asarray(tensor.numpy()) for name, tensor in module.state_dict().items()}

    def twin(state, x):
        kernel = state["0.weight"].transpose(2, 3, 1, 0)
        axes = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=axes)
        x = jnp.tanh(x + state["0.bias"]).transpose(0, 3, 1, 2).reshape(len(x), -1)
        return x @ state["3.weight"].T + state["3.bias"]

    x = RNG.uniform(size=(5, 4, 6, 2)).astype(np.float32)
    y = np.asarray(model(x)).argmax(axis=1)
    own = wdjax.Model(twin, state)
    np.testing.assert_allclose(model(x), own(x), atol=1e-6)
    module.train()
    with pytest.raises(Exception, match=r"module\.eval\(\)"):
        jax.block_until_ready(model(x))
    module.eval()
    attack = attacks.PGD(wdjax.Lp(2), steps=4)
    one, other = (wdjax.search(attack, each, x, y, eps=0.5) for each in (model, own))
    np.testing.assert_allclose(one.x_adv, other.x_adv, atol=1e-5)
    assert not any(tensor.requires_grad and tensor.grad is not None for tensor in
                   module.parameters())  # fmt: skip
