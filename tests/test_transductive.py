"""Games against defences that adapt: attacks on banks against plain loops, referees, resumption."""

import dataclasses
import warnings
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wdjax.transductive as games
from wdjax import Lp, Model, losses, metrics, models
from wdjax.attacks import APGD, DDN, PGD, Square
from wdjax.engine.diagnosis import RobustnessWarning
from wdjax.transductive import attacker as attackers
from wdjax.transductive.attacker import Attacker, Simulation
from wdjax.transductive.bank import Answers
from wdjax.transductive.bank_search import BankFound
from wdjax.transductive.defender import Defender
from wdjax.transductive.fitting import batches
from wdjax.transductive.game_report import threshold_for
from wdjax.transductive.objectives import logits_of
from wdjax.transductive.referee import Referee, measured_costs
from wdjax.transductive.state import AttackerState, RoundInputs

SIZES = (12, 8, 4)


def nets(count=3, sizes=SIZES):
    return [models.mlp(sizes, key=jax.random.key(i)) for i in range(count)]


def filled(members, capacity=None):
    bank = games.empty_bank(members[0], capacity or len(members))
    for member in members:
        bank = games.add_model(bank, member)
    return bank


@pytest.fixture(scope="module")
def given():
    rng = np.random.default_rng(0)
    x = rng.uniform(0.2, 0.8, (6, 12)).astype(np.float32)
    return jnp.asarray(x), jnp.asarray(rng.integers(0, 4, 6), jnp.int32)


def plain_loop(members, x, y, eps, steps, size, reduce, best):
    """PGD on several models as PyTorch users write it: one model after the other."""
    torch = pytest.importorskip("torch", reason="PyTorch is the oracle")
    weights = [
        [(torch.tensor(np.asarray(layer["kernel"])), torch.tensor(np.asarray(layer["bias"])))
         for layer in (model.args[0]["fc1"], model.args[0]["fc2"])] for model in members
    ]  # fmt: skip
    x, y = torch.tensor(np.asarray(x)), torch.tensor(np.asarray(y)).long()

    def loss_of(net, z):
        (w1, b1), (w2, b2) = net
        logits = torch.relu(z @ w1 + b1) @ w2 + b2
        return torch.nn.functional.cross_entropy(logits, y, reduction="none")

    def objective(z):
        values = torch.stack([loss_of(net, z) for net in weights])
        if reduce == "mean":
            return values.mean(dim=0)
        if reduce == "last":
            return values[-1]
        least = torch.full((len(y),), np.inf)
        for value in values:
            least = torch.where(value < least, value, least)
        return least

    z, kept = x.clone(), x.clone()
    height = torch.full((len(y),), -np.inf)
    for _ in range(steps + 1):
        z = z.detach().requires_grad_(True)
        value = objective(z)
        (gradient,) = torch.autograd.grad(value.sum(), z)
        with torch.no_grad():
            better = value > height
            kept[better], height[better] = z[better], value[better]
            last = z
            z = torch.clamp(z + size * gradient.sign(), x - eps, x + eps).clamp(0, 1)
    return (kept if best else last.detach()).numpy()


@pytest.mark.parametrize(
    ("reduce", "legs", "iterate"),
    [("last", "one", "best"), ("mean", "one", "best"), ("min", "one", "best"),
     ("min", "models", "last")],
)  # fmt: skip
def test_space_attacks_are_plain_loops_over_the_models(given, reduce, legs, iterate):
    x, y = given
    members, eps, steps = nets(), 0.1, 20
    inner = PGD(steps=steps, step_size=0.01, iterate=iterate)
    how = games.SpaceAttack(inner=inner, reduce=reduce, legs=legs, random_start=False)
    bank = filled(members, 5)
    found = jax.jit(
        lambda bank: games.raise_objective(
            how, games.Fixed(members[0]), (), bank, x, y, eps=eps, key=jax.random.key(0)
        )
    )(bank)
    turns_ = steps * (len(members) if legs == "models" else 1)
    expected = plain_loop(members, x, y, eps, turns_, 0.01, reduce, iterate == "best")
    np.testing.assert_allclose(found.x_adv, expected, atol=1e-5)
    assert not found.fault.any()


@pytest.mark.fast
def test_a_bank_answers_and_differentiates_as_its_models_do(given):
    x, y = given
    members = nets(4)
    victim = games.victim(games.Fixed(members[0]), (), filled(members, 6), first=1)
    said = victim(x)
    expected = np.stack([model(x) for model in members[1:]], axis=1)
    np.testing.assert_allclose(said.out[:, 1:4], expected, atol=1e-6)
    assert said.asked[0].tolist() == [False, True, True, True, False, False]
    objective = games.Objective(losses.cross_entropy, "mean")
    gradient = jax.grad(lambda x: objective(victim(x), y).sum())(x)
    mean = jax.grad(
        lambda x: sum(losses.cross_entropy(model(x), y).sum() for model in members[1:]) / 3
    )(x)
    np.testing.assert_allclose(gradient, mean, atol=1e-6)
    with pytest.raises(ValueError, match="by its inputs only"):
        jax.grad(lambda victim: victim(x).out.sum(), allow_int=True)(victim)


def test_a_bank_has_room_for_so_many():
    bank = filled(nets(2))
    with pytest.raises(ValueError, match="full"):
        games.add_model(bank, nets(1)[0])
    full = jax.jit(games.add_model)(bank, nets(1)[0])
    assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(full.models))


def test_memory_of_the_gradient_is_flat_in_the_number_of_models():
    members = nets(1, (784, 128, 128, 10))
    x, y = jnp.zeros((128, 784)), jnp.zeros(128, jnp.int32)
    objective = games.Objective(losses.cross_entropy, "mean")

    @jax.jit
    def gradient(bank, x):
        victim = games.victim(games.Fixed(members[0]), (), bank)
        return jax.grad(lambda x: objective(victim(x), y).sum())(x)

    needs = []
    for capacity in (2, 20):
        bank = filled(members, capacity)
        needs.append(gradient.lower(bank, x).compile().memory_analysis().temp_size_in_bytes)
    outputs = 18 * 128 * 10 * 4  # What the models say, of which a few copies are kept.
    assert needs[1] - needs[0] <= 8 * outputs
    assert needs[1] < 2.5 * needs[0]


@pytest.mark.fast
def test_reductions():
    rng = np.random.default_rng(1)
    out = jnp.asarray(rng.normal(size=(5, 4, 3)), jnp.float32)
    asked = jnp.broadcast_to(jnp.array([False, True, True, False]), (5, 4))
    y, none = jnp.array([0, 1, 2, 0, 1]), jnp.full(5, -1)
    said = Answers(out, asked, none)
    ways = ("last", "mean", "min", "softmin")
    value = dict(zip(ways, jax.jit(lambda: [
        games.Objective(losses.margin, how, 0.5)(said, y) for how in ways
    ])()))  # fmt: skip
    each = np.stack([losses.margin(out[:, j], y) for j in (1, 2)])
    np.testing.assert_allclose(value["last"], each[1], atol=1e-6)
    np.testing.assert_allclose(value["mean"], each.mean(0), atol=1e-6)
    np.testing.assert_allclose(value["min"], each.min(0), atol=1e-6)
    soft = -0.5 * np.log(np.exp(-each / 0.5).mean(0))
    np.testing.assert_allclose(value["softmin"], soft, atol=1e-5)
    assert np.all(value["min"] <= value["softmin"] + 1e-6)
    assert np.all(value["softmin"] <= value["mean"] + 1e-6)
    aimed = games.Objective(losses.margin, "last")(said._replace(rival=(y + 1) % 3), y)
    np.testing.assert_allclose(aimed, losses.targeted_margin(out[:, 2], y, (y + 1) % 3), atol=1e-6)
    # Ties: the whole gradient belongs to the first model.
    same = jnp.broadcast_to(out[:, :1], out.shape)
    pull = jax.grad(lambda out: games.Objective(losses.margin, "min")(
        Answers(out, jnp.ones((5, 4), bool), none), y).sum())(same)  # fmt: skip
    assert np.all(np.asarray(pull[:, 1:]) == 0)
    assert np.any(np.asarray(pull[:, 0]) != 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Shaky:
    """A linear model whose weights get private noise; counts how often it is traced.

    Once adapted it is NaN for inputs that are bright in their first pixel.
    """

    per_sample: ClassVar[bool] = False
    uses_inputs: ClassVar[bool] = False
    rejects: ClassVar[bool] = False
    traced: ClassVar[list[int]] = []

    w: Any
    noise: Any = 1.0
    bright: Any = jnp.inf
    always: Any = 0.0
    """Above 0: without adaptation too."""

    def prepare(self, key, x, y):
        return ()

    def begin(self, memory):
        return jnp.zeros(())

    def base(self, memory, state, n):
        return self.w, jnp.asarray(self.always, jnp.float32)

    def adapt(self, key, memory, state, x):
        noise = self.noise * jax.random.normal(key, self.w.shape)
        return (self.w + noise, jnp.ones(())), state + 1

    def between(self, key, memory, state):
        return state

    def predict(self, memory, adapted, x):
        self.traced.append(len(x))
        w, on = adapted
        bad = (x[:, :1] > self.bright) & (on > 0)
        return jnp.where(bad, jnp.nan, x.reshape(len(x), -1) @ w)


FINE = (float("inf"), 0.0)


@pytest.fixture(scope="module")
def shaky():
    rng = np.random.default_rng(2)
    x = jnp.asarray(rng.uniform(0.2, 0.8, (8, 6)), jnp.float32)
    w = jnp.asarray(rng.normal(size=(6, 3)), jnp.float32)
    y = jnp.argmax(x @ w, axis=-1).astype(jnp.int32)
    return Shaky(w, 0.3, *FINE), x, y


INNER = PGD(steps=8, step_size=0.03)
ATTACK = games.gmsa_avg(INNER, 3)
HOW = {"memory": (), "eps": 0.1}
ROUNDS = HOW | {"size": 4}


@pytest.mark.fast
def test_ten_rounds_compile_once(shaky, key):
    defense, x, y = shaky
    attack, seen = games.gmsa_avg(INNER, 10), []

    def look(state):
        seen.append((int(state.round), int(state.iteration), len(Shaky.traced)))

    x, y = jnp.tile(x[:5], (2, 1)), jnp.tile(y[:5], 2)
    Shaky.traced.clear()
    games.play(defense, attack, x, y, key=key, size=1, draws=1, callback=look, **HOW)
    assert len(seen) == 10 * 11
    first = seen[10][2]  # After the first round, everything has been compiled.
    assert seen[10][:2] == (1, 0)
    assert {count for *_, count in seen[10:]} == {first}
    # Within it, the attack is compiled in the first iteration, whatever the bank holds.
    assert {count for *_, count in seen[:10]} == {seen[0][2]}


def same(one, other):
    for name, leaf in dataclasses.asdict(one).items():
        np.testing.assert_array_equal(leaf, getattr(other, name), err_msg=name)


def test_a_game_goes_on_where_it_was_killed(shaky, key, tmp_path):
    defense, x, y = shaky
    attack, how = ATTACK, ROUNDS | {"key": key, "draws": 2}
    whole = games.play(defense, attack, x, y, **how)
    kept = how | {"checkpoint": tmp_path / "game", "every": 0.0}

    class KilledError(Exception):
        pass

    def kill(state):
        raise KilledError

    for _ in range(2 * 4 - 1):  # Every turn is the last one of a process.
        with pytest.raises(KilledError):
            games.play(defense, attack, x, y, callback=kill, **kept)
    with pytest.raises(KilledError):
        games.play(defense, attack, x, y, callback=kill, **kept)
    same(whole, games.play(defense, attack, x, y, **kept))
    with pytest.raises(ValueError, match="other settings"):
        games.play(defense, attack, x, y, **(kept | {"eps": 0.11}))
    with pytest.raises(ValueError, match="other settings"):
        games.play(defense, attack, x, y, **(kept | {"key": jax.random.key(9)}))
    with pytest.raises(ValueError, match="ended in round 0"):
        games.play(defense, attack, x, y, callback=lambda state: True, **how)


def test_what_leaks_helps(shaky):
    defense, x, y = shaky
    x, y = jnp.tile(x, (4, 1)) + 0.01 * jnp.arange(32)[:, None] / 32, jnp.tile(y, 4)
    defense, attack, hits = Shaky(defense.w, 1.0, *FINE), games.fpa(INNER, 2), {}
    for leak in ("none", "seed"):
        how = HOW | {"leak": leak, "draws": 1}
        keys = map(jax.random.key, range(8))
        rows = [games.play(defense, attack, x, y, key=key, **how).correct for key in keys]
        hits[leak] = np.mean(rows)
    assert hits["seed"] <= hits["none"] - 0.05
    with pytest.raises(ValueError, match="draws=1"):
        games.play(defense, attack, x, y, key=jax.random.key(0), leak="seed", **HOW)


def test_the_attacker_is_given_what_it_may_see(shaky, key, monkeypatch):
    defense, x, y = shaky

    class SeenError(Exception):
        pass

    def look(attacker, state, inputs, iteration, leak):
        raise SeenError(attacker, state, inputs, leak)

    monkeypatch.setattr(attackers, "iterate", look)
    secret = jax.random.key_data(jax.random.split(key)[1])
    for leak, keys, states in (("none", 0, 0), ("state", 0, 1), ("seed", 1, 1)):
        with pytest.raises(SeenError) as seen:
            games.play(defense, ATTACK, x, y, key=key, leak=leak, draws=1, **ROUNDS)
        attacker, state, inputs, leaked = seen.value.args
        assert ((leaked.key is not None), (leaked.state is not None)) == (bool(keys), bool(states))
        # Nothing else is given that holds the defender's states or the key of all private keys.
        assert (type(attacker), type(state), type(inputs)) == (Attacker, AttackerState, RoundInputs)
        held = [leaf for leaf in jax.tree.leaves((attacker, leaked)) if hasattr(leaf, "dtype")]
        held = [leaf for leaf in held if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)]
        assert len(held) == 1 + keys
        for leaf in held:  # The round's key at most, not the one that all others come from.
            assert not np.array_equal(jax.random.key_data(leaf), secret)


@pytest.mark.fast
def test_keys_are_split_at_the_top(shaky, key):
    """More draws do not change the attack, nor the draws that there were."""
    defense, x, y = shaky
    few, more = (games.play(defense, ATTACK, x, y, key=key, draws=n, **ROUNDS) for n in (2, 7))
    np.testing.assert_array_equal(few.x_adv, more.x_adv)
    np.testing.assert_array_equal(few.correct, more.correct[:2])
    np.testing.assert_array_equal(few.correct_clean, more.correct_clean[:2])
    # What any of many draws breaks grows with them, on clean inputs as well: never the headline.
    assert more.worst_of.value <= more.one_shot.value
    assert more.worst_of_clean.value <= more.one_shot_clean.value
    assert few.worst_of_clean.value >= more.worst_of_clean.value
    np.testing.assert_allclose(more.one_shot.value, more.correct.mean())
    assert more.majority.value == (more.correct.mean(0) > 0.5).mean()
    assert games.worst({"few": few, "more": more})[0] in ("few", "more")
    assert games.cost_multiple(defense, (), x, key=key, repeats=1) > 0
    with pytest.raises(ValueError, match="no report"):
        games.worst({})


def test_more_private_keys_never_raise_a_success_that_is_not_there(key):
    """Errors by chance alone, which no attack can cause: eps is 0."""
    rng = np.random.default_rng(3)
    w = jnp.asarray(rng.normal(size=(6, 3)), jnp.float32)
    x = jnp.asarray(rng.uniform(0.2, 0.8, (32, 6)), jnp.float32)
    y = jnp.argmax(x @ w, axis=-1).astype(jnp.int32)
    many = games.play(
        Shaky(w, 0.4, *FINE), ATTACK, x, y, draws=15, key=key, **(ROUNDS | {"eps": 0.0})
    )
    np.testing.assert_array_equal(many.correct, many.correct_clean)
    for draws in range(1, 16):  # Whatever the draws, the attack gains nothing.
        some = dataclasses.replace(
            many, correct=many.correct[:draws], correct_clean=many.correct_clean[:draws]
        )
        assert some.one_shot == some.one_shot_clean
        assert some.worst_of == some.worst_of_clean
    assert many.worst_of.value < many.one_shot.value - 0.05  # Which is why it is not the headline.
    assert many.majority.value >= many.one_shot.value


def test_the_state_goes_on_and_leaks(shaky, key):
    defense, x, y = shaky

    def states(leak):
        seen = []
        games.play(
            defense, ATTACK, x, y, leak=leak, key=key, draws=2,
            callback=lambda s: seen.append((*map(float, s.defender), float(s.attacker.mirror))),
            **ROUNDS,
        )  # fmt: skip
        return seen

    for leak in ("none", "state"):
        seen = states(leak)
        assert seen[-1] == (2.0, 2.0, 2.0)  # One adaptation a round, whatever the draws.
        assert seen[3] == (1.0, 1.0, 1.0)


def test_the_bank_is_attacked_at_least_as_well_as_by_transfer(given, key):
    (x, y), inner = given, APGD(steps=8)
    members = nets(3)
    defense = Members(jax.tree.map(lambda *rows: jnp.stack(rows), *members))
    how = {"memory": (), "eps": 0.1, "key": key, "draws": 1}
    attack, seen = games.gmsa_avg(inner, 3), []
    games.play(defense, attack, x, y, callback=seen.append, **how)
    last = seen[-2]  # Before the referee: the last iteration's bank, and what was raised there.
    bank = last.attacker.bank._replace(filled=last.attacker.bank.filled - 1)
    moved = last.attacker.first  # The set of transfer: F_0 alone was attacked.
    there = games.objective_at(attack, defense, (), bank, moved, y)
    assert last.record.raised[0, -1] >= float(there.mean()) - 1e-6
    least = games.objective_at(games.gmsa_min(inner), defense, (), bank, moved, y)
    assert np.all(np.asarray(least) <= np.asarray(there) + 1e-6)
    # Sample by sample too, by an inner attack that is too weak to get there by itself.
    weak = dataclasses.replace(attack, inner=PGD(steps=1, step_size=1e-3))
    for retain in (True, False):
        own = dataclasses.replace(weak, retain=retain)
        player = Attacker(own, Defender(defense, (), False), jnp.float32(0.1), key, 0.05)
        again = attackers.move(player, bank, RoundInputs(0, x, y), key, moved, np.asarray(True))
        assert bool(np.all(again.value >= np.asarray(there) - 1e-6)) == retain


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Members(Shaky):
    """One of a few nets, by the private key."""

    def base(self, memory, state, n):
        return jax.tree.map(lambda leaf: leaf[0], self.w)

    def adapt(self, key, memory, state, x):
        number = jax.random.randint(key, (), 0, 3)
        return jax.tree.map(lambda leaf: leaf[number], self.w), state

    def predict(self, memory, adapted, x):
        return adapted(x)


def test_searches_that_stop_at_a_fall_go_on(given, key):
    """Cross-entropy is above 0 everywhere: no search may take that for a success."""
    (x, y), (net, *_) = given, nets(1)
    bank, attack = filled([net]), games.SpaceAttack(inner=Square(queries=60), random_start=False)
    moved = jax.jit(
        lambda bank: games.raise_objective(
            attack, games.Fixed(net), (), bank, x, y, eps=0.2, key=key
        )
    )(bank)
    before = np.asarray(losses.cross_entropy(net(x), y))
    assert np.all(moved.value >= before)
    fgsm = x + 0.2 * jnp.sign(jax.grad(lambda x: losses.cross_entropy(net(x), y).sum())(x))
    reach = np.asarray(losses.cross_entropy(net(jnp.clip(fgsm, 0, 1)), y)) - before
    assert np.median((moved.value - before) / reach) > 0.3


def test_first_falls_and_clean_fallbacks_understate(shaky, key):
    defense, x, y = shaky
    still, y = dataclasses.replace(defense, noise=0.0), y.at[0].add(1) % 3
    how = ROUNDS | {"key": key, "draws": 1}
    best = games.play(still, ATTACK, x, y, **how)
    first = games.play(still, games.transfer(INNER, keep="first"), x, y, **how)
    np.testing.assert_array_equal(best.static, first.static)
    assert np.all(first.cost[first.static] == 0)  # Unbroken: returned clean.
    assert first.cost[0] == 0  # Wrong from the start.
    fell = ~first.static
    assert fell[1:].any()
    margins = [losses.margin(jnp.asarray(r.x_adv) @ still.w, y) for r in (best, first)]
    assert np.all(np.asarray(margins[0]) >= np.asarray(margins[1]) - 1e-6)
    assert np.all(best.cost > 0)
    parity = dataclasses.replace(ATTACK, clean_fallback=True)
    start = attackers.no_best(parity, x)
    moved = BankFound(
        x + 0.01, jnp.ones(8), jnp.zeros(8, bool), jnp.ones(8, int), jnp.zeros(8, int)
    )
    kept = attackers.choose(parity, start, moved, Simulation(0.0, 9.0), 0)
    np.testing.assert_array_equal(kept.x, x)  # No simulated error: the clean set.
    assert int(attackers.choose(parity, start, moved, Simulation(0.1, 0.0), 0).number) == 0
    usual = attackers.no_best(ATTACK, x)
    assert int(attackers.choose(ATTACK, usual, moved, Simulation(0.0, -np.inf), 0).number) == 0


@pytest.mark.parametrize("errors", [0.1, 0.3, 1 / 3, 0.5, 2 / 3, 0.7])
def test_of_equal_error_rates_the_larger_loss_is_chosen(errors):
    """Whichever way float32 rounds the rate."""
    none, first = jnp.zeros(8, int), attackers.no_best(ATTACK, jnp.zeros((8, 2)))
    moved = BankFound(first.x, jnp.zeros(8), none > 0, none, none)
    first = attackers.choose(ATTACK, first, moved, Simulation(errors, 1.0), 0)
    for number, loss in enumerate((0.5, 2.0)):
        second = attackers.choose(ATTACK, first, moved, Simulation(errors, loss), 1)
        assert int(second.number) == number


def test_what_is_not_finite_is_never_right(shaky, key):
    defense, x, y = shaky
    x = x.at[:, 0].set(0.45)
    y = jnp.argmax(x @ defense.w, axis=-1).astype(jnp.int32)
    with pytest.raises(ValueError, match="not finite"):
        games.play(Shaky(defense.w, 0.0, 0.4, 1.0), ATTACK, x, y, key=key, **ROUNDS)
    # Fine before adaptation, never after it: no accuracy on anything, and marked.
    with pytest.warns(RobustnessWarning, match="^play: 8 samples met an output") as seen:
        found = games.play(Shaky(defense.w, 0.0, 0.3, 0.0), ATTACK, x, y, key=key, **ROUNDS)
    assert Path(seen[0].filename) == Path(__file__)
    assert found.static_clean.all()
    assert not found.correct.any()
    assert not found.correct_clean.any()
    assert found.fault.all()
    assert np.all(found.cost <= 0.1 + 1e-6)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda out, x: out + 0 * jnp.sqrt(0 * x.sum()), "was not finite"),
        (lambda out, x: jnp.round(8 * out), "100% zero gradients; gradients vanish"),
    ],
)
def test_a_game_whose_attack_was_blind_says_so(given, key, change, text):
    x, _ = given
    net = nets(1)[0]
    model = Model(lambda net, x: change(net(x), x), net)
    y = jnp.argmax(model(x), axis=1)
    how = HOW | {"eps": 0.4}
    with pytest.warns(RobustnessWarning, match=text):
        found = games.play(
            games.Fixed(model), games.gmsa_avg(PGD(steps=3), 2), x, y, key=key, **how
        )
    assert text in found.remarks[0]
    with warnings.catch_warnings(action="error"):
        plain = games.play(games.Fixed(net), games.gmsa_avg(PGD(steps=3), 2), x, y, key=key, **how)
    assert plain.correct.mean() < found.correct.mean()
    assert plain.remarks == []


def test_scores_that_are_nan_do_not_help_the_defence():
    facts = np.zeros((1, 4), bool)
    score = np.array([[0.0, np.nan, 2.0, np.nan]])
    fields = {field.name: np.zeros(4) for field in dataclasses.fields(games.GameReport)}
    found = games.GameReport(**fields | {"correct": facts, "score": score, "score_clean": score})
    rates = found.rejection(1.0)
    assert (rates.err, rates.rejected, rates.rejected_attacked) == (0.75, 0.75, 0.25)
    assert rates.err_accepted == 1
    nothing = dataclasses.replace(found, score=np.full((1, 4), 2.0)).rejection(1.0)
    assert nothing.rejected_attacked == 1
    assert np.isnan(nothing.err_accepted)


@pytest.mark.fast
def test_two_classes_one_sample_zero_gradients(key):
    flat = games.Fixed(Model(lambda w, x: w + 0 * x[:, :2], jnp.array([1.0, 0.0])))
    attack = games.gmsa_min(PGD(steps=3), 2, rivals=1, restarts=2)
    found = games.play(flat, attack, jnp.full((1, 2), 0.5), [0], key=key, draws=1, **HOW)
    assert found.correct.all()
    assert found.cost[0] > 0  # Where nothing helps the point is a random one, not the clean.
    wrong = games.play(flat, attack, jnp.full((1, 2), 0.5), [1], key=key, draws=1, **HOW)
    assert not wrong.correct.any()


def test_pools_are_sorted_and_rounds_divide(shaky, key):
    defense, x, y = shaky
    attack, how = ATTACK, ROUNDS | {"key": key, "draws": 1}
    found = games.play(defense, attack, x, y, order="labels", **how)
    assert sorted(found.index.tolist()) == list(range(8))
    for part in (slice(0, 8),):
        assert set(found.index[part].tolist()) == set(range(part.start, part.stop))
        assert np.all(np.diff(found.y[part]) >= 0)
    np.testing.assert_array_equal(found.y, np.asarray(y)[found.index])
    wrong = [
        ({"size": 3}, "do not divide"),
        ({"order": "labels", "pool": 3}, "pools of 3"),
        ({"pool": 4}, "order='labels'"),
        ({"order": "random"}, "order must be"),
        ({"leak": "all"}, "leak must be"),
        ({"draws": 0}, "draws must be"),
        ({"eps": -1.0}, "eps must be"),
        ({"eps": np.nan}, "eps must be"),
        ({"key": 0}, "jax.random.key"),
    ]
    for change, words in wrong:
        with pytest.raises(ValueError, match=words):
            games.play(defense, attack, x, y, **(how | change))
    with pytest.raises(ValueError, match="outside of jit"):
        jax.jit(lambda x: games.play(defense, attack, x, y, **how))(x)
    with pytest.raises(ValueError, match="outside the box"):
        games.play(defense, attack, x + 1, y, **how)
    for other in (INNER, games.SpaceAttack(inner=None)):
        with pytest.raises(ValueError, match="on model spaces"):
            games.play(defense, other, x, y, **how)
    with pytest.raises(ValueError, match="reduce must be"):
        games.SpaceAttack(reduce="max")
    with pytest.raises(ValueError, match="set rivals"):
        games.SpaceAttack(inner=APGD(targets=3))
    with pytest.raises(ValueError, match="inside a ball"):
        games.SpaceAttack(inner=DDN(Lp(2)))


def test_batches_of_a_round_change_nothing(normed_game, key):
    play = normed_game
    whole, parts = play(None), play(3)
    np.testing.assert_allclose(whole.x_adv, parts.x_adv, atol=1e-5)
    np.testing.assert_array_equal(whole.correct, parts.correct)


@pytest.fixture
def normed_game(key):
    """A defence with parameters of every sample, and clean company."""
    net = models.norm_mlp((6, 5, 3), key=key)
    x = jax.random.uniform(key, (4, 6))
    y = jnp.argmax(net(x), axis=-1).astype(jnp.int32)

    def play(size):
        attack = dataclasses.replace(ATTACK, iterations=2, batch_size=size)
        how = {"memory": (), "eps": 0.1, "key": key, "draws": 1, "company": True}
        return games.play(games.DENT(net), attack, x, y, **how)

    return play


def test_points_outside_are_refused(shaky, key):
    defense, x, _ = shaky
    attack, defender = games.transfer(INNER), Defender(defense, (), False)
    referee = Referee(defender, attack, jnp.float32(0.1), key, 1)
    with pytest.raises(ValueError, match="outside of their ball"):
        measured_costs(referee, x, x.at[3].add(0.2))
    with pytest.raises(ValueError, match="outside of their ball"):
        measured_costs(referee, x, x.at[3, 0].set(jnp.nan))


def test_shares_and_thresholds():
    facts = np.arange(40) < 31
    low, high = metrics.clopper_pearson(31, 40)
    np.testing.assert_allclose(games.share_with_interval(facts[None]), (31 / 40, low, high))
    assert games.share_with_interval(np.ones((3, 5))).high == 1.0
    assert 0.4 < games.share_with_interval(np.ones((3, 5))).low < 0.5
    wide = np.stack([facts, ~facts, facts])
    assert games.share_with_interval(wide).high - games.share_with_interval(wide).low > high - low
    scores = np.array([3.0, 1.0, 2.0, 2.0])
    assert threshold_for(scores, 0.25) == 2.0
    assert threshold_for(scores, 0.0) == 3.0
    assert threshold_for(scores, 1.0) == -np.inf
    assert threshold_for(scores, 0.5) == 2.0  # At 1 there would be three of four refused.


def test_batches_are_permutations(key):
    rows = np.asarray(batches(key, 10, 3, 7))
    assert rows.shape == (7, 3)
    for first in (0, 3):
        assert len(set(rows[first : first + 3].ravel().tolist())) == 9
    assert logits_of((1, 2)) == 1
