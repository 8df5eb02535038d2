"""Misuse of what public functions share: every one names the argument, what came and what to pass.

A table of public functions against a table of misuses; a function that is missing is found.
"""

import dataclasses
import importlib
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wdjax
from wdjax import (
    attacks,
    certify,
    ensembles,
    image,
    lipschitz,
    losses,
    models,
    nppr,
    smoothing,
    training,
)
from wdjax import transductive as games
from wdjax.report import audit
from wdjax.smoothing import noise

pytestmark = pytest.mark.fast

KEY = jax.random.key(0)
MODEL = wdjax.Model(lambda w, x: x.reshape(len(x), -1) @ w, jnp.linspace(-1, 1, 12).reshape(4, 3))
X = np.linspace(0.1, 0.9, 8, dtype=np.float32).reshape(2, 4)
Y = np.asarray(MODEL(X)).argmax(1)
PICTURE = wdjax.Model(MODEL.func, jnp.linspace(-1, 1, 48).reshape(16, 3))
PICTURES = np.linspace(0.1, 0.9, 32, dtype=np.float32).reshape(2, 4, 4, 1)
CHAIN = lipschitz.relu_chain([np.ones((3, 4)), np.eye(3)], [np.zeros(3), np.zeros(3)])
PGD = attacks.PGD(steps=2)

NET = models.mlp((4, 3), key=KEY)
DEFENSE = games.Fixed(NET)
FAMILY = nppr.Family(mode="independent", components=2, upsample="none")
SHAPED = {"model": MODEL, "x": X, "y": Y}
BALL = SHAPED | {"norm": 2, "eps": 0.1}
KEYED = SHAPED | {"eps": 0.1, "key": KEY}
SENT = SHAPED | {"perturbation": nppr.distributions.UniformBall(0.1), "key": KEY}
SMOOTH = {"model": MODEL, "x": X, "noise": noise.Gaussian(0.2), "key": KEY}
ONE = SENT | {"x": X[0], "y": Y[0]}
PLAYED = {"defense": DEFENSE, "memory": (), "attack": games.transfer(PGD), "x": X, "y": Y}
BANK = {"bank": None, "eps": 0.1, "key": KEY}
DRAWN = wdjax.Model(
    lambda p, x: x @ p["w"] + jax.random.normal(p["k"], (1, 3)), {"w": MODEL.args[0], "k": KEY}
)
SIDES = {"model": MODEL, "lower": np.zeros(4, np.float32), "upper": np.ones(4, np.float32)}
BOX = SIDES | {"spec": certify.label_wins(0, 3)}

# Of every public function a call that could be made.
CALLS = {
    wdjax.search: SHAPED | {"attack": PGD, "eps": 0.1, "key": KEY},
    wdjax.run: SHAPED | {"attack": PGD, "eps": 0.1},
    wdjax.spend: {"found": wdjax.search(PGD, MODEL, X, Y, eps=0.1), "eps": 0.1},
    training.train: KEYED | {"attack": PGD, "epochs": 1},
    certify.margin_bounds: BALL,
    certify.certified: BALL,
    certify.radius: SHAPED | {"norm": 2},
    certify.verify: BALL,
    certify.growth_bound: BALL | {"order": 1},
    certify.wdro_bound: BALL | {"order": 1},
    certify.certified_accuracy: {"radius": np.ones(2), "eps": 0.1, "order": 1},
    certify.lipschitz_constant: SHAPED | {"norm": 2},
    certify.layer_product: SIDES | {"norm": 2},
    certify.interval_jacobian: SIDES | {"norm": 2},
    certify.margin_lipschitz: SIDES | {"norm": 2},
    certify.trainable_bounds: BALL,
    certify.interval_start: {"model": NET, "key": KEY},
    certify.property: BOX | {"key": KEY},
    certify.properties: BOX | {"lower": np.zeros((1, 4)), "upper": np.ones((1, 4)), "key": KEY},
    smoothing.certify: SMOOTH | {"y": Y, "eps": 0.1},
    smoothing.predict: SMOOTH,
    smoothing.cautions: {"x": X, "noise": SMOOTH["noise"], "eps": 0.1, "n": 99, "alpha": 0.01},
    smoothing.tally: SMOOTH | {"n": 4},
    smoothing.soft: SMOOTH,
    noise.perturb: {"noise": noise.Gaussian(0.2), "key": KEY, "x": X[0]},
    lipschitz.as_chain: {"model": MODEL, "x": X},
    lipschitz.local_lipschitz: BALL,
    lipschitz.global_lipschitz: {"model": MODEL, "x": X, "norm": 2},
    lipschitz.global_radius: SHAPED | {"norm": 2},
    lipschitz.jacobian_norm: {"model": MODEL, "x": X},
    lipschitz.sampled_lipschitz: BALL | {"key": KEY},
    lipschitz.trainable_lipschitz: BALL,
    lipschitz.verify: BALL,
    lipschitz.lower_constants_at_samples: {"net": CHAIN, "x": X, "y": Y, "norm": 2},
    lipschitz.theory: {"net": CHAIN, "x": X, "y": Y, "norm": 2},
    lipschitz.masks_at: {"net": CHAIN, "x": X},
    lipschitz.worst_margin: {"net": CHAIN, "x": X, "y": Y, "norm": jnp.inf, "eps": 0.1},
    nppr.estimate: SENT,
    nppr.expected_loss: SENT,
    nppr.spread_within: {name: SENT[name] for name in ("perturbation", "x", "y", "key")},
    nppr.points: {name: SENT[name] for name in ("perturbation", "x", "y", "key")} | {"draws": 2},
    nppr.probabilistic_accuracy: SENT,
    nppr.prbench: SHAPED | {"key": KEY},
    nppr.fit: KEYED | {"family": FAMILY},
    nppr.fit_many: SHAPED | {"eps": 0.1, "keys": jax.random.split(KEY, 2), "family": FAMILY},
    nppr.train_model: KEYED | {"family": FAMILY},
    nppr.universal_start: KEYED | {"family": nppr.Family(mode="label")},
    nppr.importance: ONE,
    nppr.splitting: ONE,
    image.image_wasserstein: {"model": PICTURE, "x": PICTURES, "y": Y, "eps": 0.1},
    image.minimum_radius: {"model": PICTURE, "x": PICTURES, "y": Y},
    image.image_wasserstein_distance: {"x": PICTURES, "z": PICTURES, "ball":
                                       image.ImageWasserstein()},
    image.entropic_distance: {"x": PICTURES, "z": PICTURES, "ball": image.ImageWasserstein()},
    image.translate: {"x": PICTURES, "share": 0.1, "angle": 0.0},
    image.rotate: {"x": PICTURES, "degrees": 5.0},
    image.gaussian_blur: {"x": PICTURES, "kernel": 3},
    image.dim: {"x": PICTURES, "factor": 2.0},
    games.train_classifier: SHAPED | {"key": KEY, "steps": 1},
    games.prepare: {"defense": DEFENSE, "x": X, "y": Y, "key": KEY},
    games.play: PLAYED | {"eps": 0.1, "key": KEY},
    games.mixed_play: PLAYED | {"attack": games.fpa(PGD, 1), "eps": 0.1, "key": KEY, "draws": 1},
    games.cost_multiple: {"defense": DEFENSE, "memory": (), "x": X, "key": KEY},
    games.raise_objective: PLAYED | BANK,
    games.objective_at: PLAYED | {"bank": games.empty_bank(NET, 1)},
    ensembles.a3: KEYED,
    ensembles.a3_wda: KEYED,
    ensembles.autoattack: KEYED,
    ensembles.bisect: KEYED | {"attack": PGD},
    ensembles.cascade: KEYED | {"members": {"pgd": PGD}},
    ensembles.fast: KEYED,
    ensembles.mixed: KEYED | {"attack": PGD},
    ensembles.lowered: {"model": MODEL},
    ensembles.rand: KEYED | {"model": DRAWN},
    ensembles.draws: {"model": DRAWN, "key": KEY, "count": 2},
    ensembles.smoothed: KEYED | {"attack": PGD, "noise": noise.Gaussian(0.2)},
    ensembles.wda_star: KEYED,
    audit.sandwich: SHAPED | {"eps_list": [0.1], "key": KEY},
    audit.of: SHAPED | {"eps_list": [0.1], "key": KEY},
}  # fmt: skip

SHARED = {"attack", "model", "x", "z", "y", "eps", "key", "keys", "noise", "perturbation"}
# Functions of logits, of arrays and of modules, which take no samples, and constructors.
OTHERS = {
    "wdjax.metrics", "wdjax.losses", "wdjax.norms", "wdjax.models.functional",
    "wdjax.models.learning", "wdjax.models.one_lipschitz", "wdjax.models.small", "wdjax.transport",
    "wdjax.transductive.adamod", "wdjax.transductive.objectives", "wdjax.lipschitz.transformer",
    "wdjax.xla_cpu",
}  # fmt: skip


class Foreign(dict):
    """``torch.nn.Module`` as Python sees it, without PyTorch."""


Foreign.__module__, Foreign.__qualname__, Foreign.__name__ = "torch.nn.modules.module", "", "Module"


class Network(Foreign):
    def __call__(self, x):
        return x


@dataclasses.dataclass(frozen=True)
class Unregistered(attacks.PGD):
    """A frozen dataclass, but no pytree."""


def sized(model):
    """The same model for inputs of twice the size."""
    return jax.tree.map(lambda w: jnp.concatenate([w, w]) if w.ndim == 2 else w, model)


MISUSES = {
    "attack": {
        "ball that is a norm": (attacks.PGD(np.inf), "the attack's ball must be an instance"),
        "ball that is a class": (attacks.PGD(wdjax.Lp), "got the class Lp"),
        "loss by its name": (attacks.PGD(loss="ce"), "loss must be a function"),
        "a class": (attacks.PGD, r"instance, PGD\("),
        "no pytree": (Unregistered(steps=2), "register_dataclass"),
        "a function": (lambda x: x, "has no|without ball"),
        "a word": ("pgd", "'pgd'"),
        "nothing": (None, "None"),
    },
    "model": {
        "a PyTorch module": (Network(), "PyTorch.*wdjax.convert"),
        "a plain function": (lambda x: x, r"wdjax.Model\("),
        "a class": (models.MLP, "class"),
        "a word": ("resnet", "'resnet'"),
        "nothing": (None, "None"),
        "of other inputs": (sized, r"does not accept x of shape \[\d+, 4"),
    },
    "x": {
        "a pytree": ({"image": X}, "a dict of 'image'"),
        "of two arrays": ((X, X[:1]), r"a tuple of float32"),
        "bytes": (np.uint8(255 * X), "uint8"),
        "complex": (X.astype(np.complex64), "complex64"),
        "half": (jnp.asarray(X, jnp.bfloat16), "bfloat16"),
        "words": (np.array([["a"] * 4] * 2), "<U1|array"),
        "empty": (X[:0], "empty"),
        "masked": (np.ma.masked_greater(X, 0.5), r"filled\(value\)"),
        "nothing": (None, "None"),
    },
    "y": {
        "one-hot": (np.eye(3)[Y], r"float64\[2, 3\].*argmax"),
        "floats": (Y.astype(np.float32), "float32"),
        "too few": (Y[:1], r"\[1\]"),
        "a pytree": ({"label": Y}, "a dict of 'label'"),
        "words": (["cat", "dog"], "cat"),
        "masked": (np.ma.masked_array(Y, Y > 0), "masked array"),
        "nothing": (None, "None"),
    },
    "eps": {
        "complex": (0.1 + 0.2j, "0.1"),
        "complex array": (jnp.asarray(0.1 + 0.2j), "complex64"),
        "a word": ("8/255", "'8/255'"),
        "masked": (np.ma.masked_array(0.1, True), "masked array"),
        "negative": (-0.1, "-0.1"),
        "NaN": (float("nan"), "nan"),
        "a key": (KEY, "key"),
        "a pytree": ({"eps": 0.1}, "a dict of 'eps'"),
        "nothing": (None, "None"),
    },
    "key": {
        "a number": (0, r"jax.random.key\(0\)"),
        "a NumPy number": (np.int64(3), r"jax.random.key\(3\)"),
        "an old key": (jax.random.PRNGKey(0), "wrap_key_data"),
        "several": (jax.random.split(KEY, 2), r"\[2\]"),
        "a word": ("seed", "'seed'"),
        "nothing": (None, "None|pass key"),
    },
    "noise": {
        "a class": (noise.Gaussian, r"instance, Gaussian\("),
        "a number": (0.25, "smoothing.noise.*got 0.25"),
    },
    "perturbation": {
        "a class": (nppr.distributions.UniformBall, r"instance, UniformBall\("),
        "a number": (0.1, "nppr.distributions.*got 0.1"),
        "complex eps": (nppr.distributions.UniformBall(jnp.asarray(1j)), "eps must be"),
    },
}  # fmt: skip
MISUSES["z"] = MISUSES["x"]
MISUSES["keys"] = {"a number": (0, "got 0"), "one": (KEY, r"key<fry>\[\]")}
# Single inputs, and attacks of another protocol.
EXCEPT = {
    (noise.perturb, "x"), (games.play, "attack"), (games.raise_objective, "attack"),
    (games.mixed_play, "attack"),
    (games.objective_at, "attack"), (nppr.importance, "y"), (nppr.splitting, "y"),
    (nppr.importance, "x"), (nppr.splitting, "x"),  # Tried below.
}  # fmt: skip


OPTIONAL = {
    wdjax.search: {"key", "eps"}, ensembles.bisect: {"key"}, ensembles.mixed: {"key", "eps"},
    audit.sandwich: {"key"}, audit.of: {"key"}, smoothing.certify: {"eps"},
    training.train: {"attack", "eps"}, certify.property: {"key"}, certify.properties: {"key"},
    ensembles.wda_star: {"eps"}, ensembles.smoothed: {"eps"}, smoothing.cautions: {"eps"},
}  # fmt: skip


# They decide properties of any function, not of classifiers only.
PLAIN = {certify.property, certify.properties}
# They take samples that are pytrees; the model of the table does not.
TREES = {wdjax.search, wdjax.run}


def cases():
    for function, given in CALLS.items():
        for name in sorted(SHARED & set(given)):
            if (function, name) not in EXCEPT:
                title = f"{function.__module__}.{function.__name__}: {name}"
                yield pytest.param(function, given, name, id=title)


@pytest.mark.parametrize(("function", "given", "name"), [*cases()])
def test_misuse_is_named(function, given, name):
    for label, (bad, message) in MISUSES[name].items():
        if label == "nothing" and name in OPTIONAL.get(function, ()):
            continue
        if label == "a plain function" and function in PLAIN:
            message = r"must return floats \[n, 3\]"
        if bad is sized:
            bad = sized(given["model"])
        if label == "of other inputs" and "x" not in given:
            continue
        if name == "x" and label == "a pytree" and function in TREES:
            message = r"the model does not accept x of shape \{'image'"
        with pytest.raises(ValueError, match=f"(?s)({message})") as caught:
            call(function, given | {name: bad})
        assert re.search(rf"\b{name}\b", str(caught.value)), (label, caught.value)
        assert not isinstance(caught.value, jax.errors.JAXTypeError), label


MESHES = [function for function in CALLS if "mesh" in inspect.signature(function).parameters]


@pytest.mark.parametrize("function", MESHES, ids=lambda f: f"{f.__module__}.{f.__name__}")
def test_what_is_no_mesh_is_named(function):
    other = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    for wrong in ("gpu", jax.devices(), other):
        with pytest.raises(ValueError, match=r"mesh must be of wdjax\.parallel\.data_mesh"):
            call(function, CALLS[function] | {"mesh": wrong})


def call(function, given):
    """Without names where a function wants places."""
    bound = inspect.signature(function).bind(**given)
    return function(*bound.args, **bound.kwargs)


def test_calls_can_be_made():
    """The battery's calls are sound, so that a misuse is all that is wrong with each."""
    for function in (
        wdjax.search, wdjax.run, certify.verify, certify.trainable_bounds, smoothing.tally,
        nppr.points, games.objective_at, image.rotate, ensembles.bisect, lipschitz.masks_at,
    ):  # fmt: skip
        call(function, CALLS[function])


def test_every_public_function_is_in_the_table():
    rooms = (
        "certify",
        "smoothing",
        "smoothing.noise",
        "lipschitz",
        "nppr",
        "nppr.distributions",
        "image",
        "transductive",
        "training",
        "ensembles",
        "report.audit",
        "metrics",
        "models",
        "losses",
    )
    missing = set()
    for room in ("wdjax", *(f"wdjax.{name}" for name in rooms)):
        module = importlib.import_module(room)
        names = getattr(module, "__all__", None) or [n for n in vars(module) if n[0] != "_"]
        for function in (getattr(module, name) for name in names):
            own = inspect.isfunction(function) and function.__module__.startswith("wdjax.")
            if not own or function in CALLS or function.__module__ in OTHERS:
                continue
            if SHARED & {*inspect.signature(function).parameters}:
                missing.add(f"{function.__module__}.{function.__name__}")
    assert missing <= {"wdjax.training.start", "wdjax.training.gradients"}, missing


@pytest.mark.parametrize("estimator", [nppr.importance, nppr.splitting])
def test_misuse_of_one_input_is_named(estimator):
    for bad in ({"x": {"image": X[0]}}, {"x": np.uint8(255 * X[0])}, {"y": 0.5}, {"y": "cat"}):
        (name,) = bad
        with pytest.raises(ValueError, match=rf"^{name} must be"):
            estimator(**ONE | bad)


def test_attacks_of_games_are_named():
    for bad in (PGD, "pgd", games.transfer):
        with pytest.raises(ValueError, match="attack must be one on model spaces"):
            games.play(**PLAYED | {"attack": bad, "eps": 0.1, "key": KEY})


def test_a_real_pytorch_module_is_named():
    torch = pytest.importorskip("torch", reason="what is refused is PyTorch's")
    for bad in (torch.nn.Linear(4, 3), torch.nn.Sequential(torch.nn.Linear(4, 3))):
        with pytest.raises(ValueError, match=rf"PyTorch module, {type(bad).__name__}.*convert"):
            wdjax.run(PGD, bad, X, Y, eps=0.1)


@pytest.mark.parametrize(("build", "mine", "theirs"), [
    (models.wong_mnist, (2, 28, 28, 1), (2, 32, 32, 3)),
    (models.resnet2b, (2, 32, 32, 3), (2, 28, 28, 1)),
    (models.resnet2b, (2, 32, 32, 3), (2, 3, 32, 32)),
])  # fmt: skip
def test_images_of_another_data_set_are_named(build, mine, theirs):
    net = build(key=KEY)
    assert net(np.zeros(mine, np.float32)).shape == (2, 10)
    hint = "channels last: x.transpose" if theirs[1] == 3 else ""
    with pytest.raises(ValueError, match=rf"does not accept x of shape \[2, .*{hint}"):
        wdjax.run(PGD, net, np.zeros(theirs, np.float32), np.array([0, 1]), eps=0.1)


def test_settings_that_go_together_name_each_other():
    with pytest.raises(ValueError, match=r"steps=3 and probe=10; .*WDA\(steps=3, probe=2\)"):
        attacks.WDA(steps=3)
    assert attacks.WDA(steps=3, probe=2).steps == 3


LOSSES = {
    "[n, K]": lambda out, y: -jax.nn.log_softmax(out),
    "one number": lambda out, y: jnp.mean(losses.cross_entropy(out, y)),
    "of one sample": lambda out, y: jax.nn.logsumexp(out) - out[y],
    "integers": lambda out, y: (jnp.argmax(out, -1) != y).astype(int),
    "a pair": lambda out, y: (out[:, 0], out[:, 1]),
    "text": lambda out, y: "loss",
}
WITH_LOSS = [
    attacks.ALMA(steps=2), attacks.APGD(steps=2), attacks.DDN(steps=2), attacks.PGD(steps=2),
    attacks.Square(queries=2), attacks.WPGD(steps=2), image.FrankWolfe(steps=2),
    image.DualProjection(steps=2), image.SinkhornPGD(steps=2), image.NearestTransport(steps=2),
]  # fmt: skip


@pytest.mark.parametrize("attack", WITH_LOSS, ids=lambda attack: type(attack).__name__)
def test_a_loss_is_one_float_a_sample(attack):
    """Another shape would be summed to another attack, that finds less."""
    pictures = type(attack).__module__.startswith("wdjax.image")
    given = (PICTURE, PICTURES, Y) if pictures else (MODEL, X, Y)
    eps = {} if attack.budget == "none" else {"eps": 0.1}
    for name, loss in LOSSES.items():
        wrong = dataclasses.replace(attack, loss=loss)
        with pytest.raises(ValueError, match=r"loss must return floats \[2\], one a sample"):
            wdjax.search(wrong, *given, key=KEY, **eps)
        if name == "one number":
            with pytest.raises(ValueError, match=r"loss must return floats"):
                training.train(NET, X, Y, epochs=1, key=KEY, attack=PGD, eps=0.1, loss=loss)


ADVICE = {
    "a list": (dict(x=X.tolist()), "np.asarray"),
    "one logit": (dict(model=wdjax.Model(lambda w, x: (x @ w)[:, 0], jnp.ones((4, 3)))), "stack"),
    "a tuple": (dict(model=wdjax.Model(lambda w, x: (x @ w, w), jnp.ones((4, 3)))), "logits only"),
    "a norm's name": (dict(norm="linf"), "pass the number jnp.inf"),
    "a number's name": (dict(norm="2"), "pass the number 2"),
}


@pytest.mark.parametrize("name", ADVICE)
def test_errors_say_what_to_do(name):
    wrong, advice = ADVICE[name]
    with pytest.raises(ValueError, match=advice):
        certify.certified(**(SHAPED | {"norm": 2, "eps": 0.1} | wrong))


def test_a_certificate_prints_its_counts():
    found = certify.verify(**SHAPED, norm=jnp.inf, eps=0.0)
    counts = int(found.verified.sum()), len(X)
    assert repr(found).startswith("Certificate({} of {} samples verified, ".format(*counts))


def _rejecting(w, x):
    logits = x @ w
    return logits, 0.5 - jnp.ptp(logits, axis=1)


REJECTING = wdjax.Model(_rejecting, jnp.linspace(-1, 1, 12).reshape(4, 3))
OF_LOGITS = [
    attacks.PGD(),
    attacks.APGD(),
    attacks.Square(queries=5),
    attacks.DDN(),
    attacks.WPGD(),
]


def _accepted(out, y):
    return jnp.minimum(losses.decision_margin(out[0], y), -out[1])


@pytest.mark.parametrize("attack", OF_LOGITS, ids=lambda attack: type(attack).__name__)
def test_a_loss_of_logits_is_told_where_a_model_may_reject(attack):
    how = dict(criterion=_accepted, key=KEY) | ({} if attack.budget == "none" else {"eps": 0.1})
    name = type(attack).__name__
    with pytest.raises(ValueError, match=f"the loss of {name}, .* pass {name} a loss="):
        wdjax.search(attack, REJECTING, X, Y, **how)
    with pytest.raises(ValueError, match=f"the loss of {name}, "):
        jax.jit(lambda x: wdjax.search(attack, REJECTING, x, Y, **how).cost)(X)
    own = dataclasses.replace(attack, loss=_accepted)
    assert wdjax.search(own, REJECTING, X, Y, **how, diagnose=False).cost.shape == (2,)
