"""Plants one fault at a time in a copy of the package: `make test` must find each of them.

    python bench/mutations.py [NAME ...]

Every row is a wrong sign, a wrong norm, a missing projection or an index that is one off, and tests
of which one has to fail. A row that survives is a hole in the tests. Each takes up to a minute.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

HOME = Path(__file__).parents[1]


class Fault(NamedTuple):
    """A line of a file of the package, what it is changed to, and tests of which one must fail."""

    file: str
    line: str
    wrong: str
    tests: str


FAULTS = {
    "program-of-another-class": Fault(
        "distinct.py",
        "return self._compiled(*given, structure=_hash(given, options), **options)",
        "return self._compiled(*given, structure=0, **options)",
        "tests/test_distinct.py",
    ),
    "wda-climbs-down": Fault(
        "attacks/wda.py",
        "self.ball.ascend(x, gradient, size)",
        "self.ball.ascend(x, -gradient, size)",
        "wdjax/attacks/wda.py tests/test_contract.py",
    ),
    "wda-leaves-the-ball": Fault(
        "attacks/wda.py",
        "return self.ball.project(self.ball.ascend(x, gradient, size), samples.x, samples.radius)",
        "return self.ball.clip(self.ball.ascend(x, gradient, size))",
        "tests/test_contract.py",
    ),
    "wda-one-rival-less": Fault(
        "attacks/wda.py",
        "return min(usual if self.rivals is None else self.rivals, classes - 1)",
        "return max(1, min(usual if self.rivals is None else self.rivals, classes - 2))",
        "tests/test_rivals.py",
    ),
    "pgd-step-for-the-wrong-norm": Fault(
        "attacks/pgd.py",
        "share = _SHARE.get(self.ball.norm, 2.5 / self.steps)",
        "share = _SHARE.get(self.ball.norm, 2.5 / self.steps) / 10",
        "wdjax/attacks/pgd.py tests/test_fixed_budget.py tests/test_own_attack.py",
    ),
    "ddn-grows-on-flips": Fault(
        "attacks/ddn.py",
        "jnp.where(info.value > 0, 1 - self.shrink, 1 + self.shrink)",
        "jnp.where(info.value > 0, 1 + self.shrink, 1 - self.shrink)",
        "tests/test_step_by_step.py",
    ),
    "deepfool-by-the-primal-norm": Fault(
        "attacks/deepfool.py",
        "steep = norms.lp_norm(gradient, norms.dual(norm))",
        "steep = norms.lp_norm(gradient, norm)",
        "tests/test_step_by_step.py",
    ),
    "fab-moves-from-the-sample": Fault(
        "attacks/fab.py",
        "gaps = jnp.concatenate([plane.gap, plane.gap + away])",
        "gaps = jnp.concatenate([plane.gap, plane.gap - away])",
        "tests/test_fixed_budget.py::test_fab_moves_onto_the_linearised_boundary_wherever_it_is",
    ),
    "apgd-never-halves": Fault(
        "attacks/apgd.py",
        "back = norms.spread(halve, state.x)",
        "back = norms.spread(halve & ~halve, state.x)",
        "tests/test_fixed_budget.py::test_apgd_goes_on_from_the_best_point_where_progress_stalls",
    ),
    "square-keeps-the-worse": Fault(
        "attacks/square.py",
        "better = ((loss > state.loss) | fallen) & ~info.fault",
        "better = ((loss < state.loss) | fallen) & ~info.fault",
        "tests/test_fixed_budget.py::test_more_queries_never_lower_the_margin",
    ),
    "margin-to-the-label": Fault(
        "losses.py",
        "return jnp.max(_without(logits, y), axis=-1) - _logit(logits, y)",
        "return jnp.max(logits, axis=-1) - _logit(logits, y)",
        "tests/test_losses.py",
    ),
    "ties-count-as-flips": Fault(
        "losses.py",
        "jnp.where(earlier, logits >= label, logits > label)",
        "jnp.where(earlier, logits > label, logits >= label)",
        "tests/test_losses.py",
    ),
    "l1-projection-one-step-short": Fault(
        "norms.py",
        "return jnp.clip(size - jnp.where(fits, 0.0, lam), 0.0, room)",
        "return jnp.clip(size - jnp.where(fits, 0.0, 0.9 * lam), 0.0, room)",
        "tests/test_norms.py",
    ),
    "spending-dearest-first": Fault(
        "transport.py",
        "ranking = xp.argsort(price, stable=True)",
        "ranking = xp.argsort(-price, stable=True)",
        "tests/test_transport.py",
    ),
    "spending-one-sample-more": Fault(
        "transport.py",
        "xp.concatenate([xp.zeros(1, paid.dtype), paid[:-1]])",
        "xp.concatenate([xp.zeros(2, paid.dtype), paid[:-2]])",
        "tests/test_transport.py",
    ),
    "accuracy-without-the-last-part": Fault(
        "certify/wdro.py",
        "- min(left / cost[whole], 1.0)) / radius.size",
        "- 0.0) / radius.size",
        "tests/test_certify.py",
    ),
    "interval-of-the-half-ball": Fault(
        "bounds/network.py",
        "half = jnp.maximum(value.upper - middle, middle - value.lower)",
        "half = 0.5 * jnp.maximum(value.upper - middle, middle - value.lower)",
        "tests/test_certify_soundness.py",
    ),
    "crown-takes-the-wrong-line": Fault(
        "bounds/passes.py",
        "back = (positive * below + negative * above).reshape(a.a.shape)",
        "back = (positive * above + negative * below).reshape(a.a.shape)",
        "tests/test_certify_crown.py tests/test_certify_soundness.py tests/test_certify.py",
    ),
    "a-loop-is-left-too-late": Fault(
        "bounds/scans.py",
        "before = at > until if self.reverse else at < until",
        "before = at >= until if self.reverse else at <= until",
        "tests/test_certify_scans.py",
    ),
    "programs-do-not-round": Fault(
        "bounds/network.py",
        "total = 1.01 * unit * (terms + rules.affine(eqn) + 8)",
        "total = 0.0 * unit * (terms + rules.affine(eqn) + 8)",
        "tests/test_certify_soundness.py",
    ),
    "winograd-rounds-its-own-products-only": Fault(
        "bounds/affine_rules.py",
        "return lambda t: bind(wider, [t, wide])",
        "return None",
        "tests/test_certify_primitives.py",
    ),
    "the-last-update-stays-everywhere": Fault(
        "bounds/affine_rules.py",
        "return counted > 1",
        "return counted > 9",
        "tests/test_certify_primitives.py",
    ),
    "sums-from-any-value": Fault(
        "bounds/rewritten.py",
        'return name if zero or name in ("max", "min") else None',
        "return name",
        "tests/test_certify_primitives.py",
    ),
    "clopper-pearson-one-off": Fault(
        "smoothing/binomial.py",
        "np.maximum(s, 1), made - s + 1.0, alpha)",
        "np.maximum(s + 1, 1), np.maximum(made - s, 0.5), alpha)",
        "tests/test_smoothing_bounds.py",
    ),
    "sampled-constant-by-the-primal-norm": Fault(
        "lipschitz/sampled.py",
        "norms.lp_norm(slope, norms.dual(norm))",
        "norms.lp_norm(slope, norm)",
        "tests/test_lipschitz.py",
    ),
    "plans-beyond-the-budget": Fault(
        "image/plans.py",
        "return within(space, uncrowd(space, plan, x), x, weights, budget)",
        "return uncrowd(space, plan, x)",
        "tests/test_image.py",
    ),
    "multipliers-of-signs-turned": Fault(
        "bounds/output_constraint.py",
        "pair - paying * signs",
        "pair + paying * signs",
        "tests/test_bounds_of_parts.py",
    ),
    "subdomains-closed-by-one-function": Fault(
        "certify/subdomains.py",
        "return bool(np.all(one.low[self.wanted] > 0))",
        "return bool(np.any(one.low[self.wanted] > 0))",
        "tests/test_certify_branch.py",
    ),
    "half-of-a-subdomain-forgotten": Fault(
        "certify/subdomains.py",
        "for half, node in zip((below, above), nodes)",
        "for half, node in zip((below,), nodes)",
        "tests/test_certify_branch.py tests/test_properties.py",
    ),
    "a-line-is-not-moved": Fault(
        "proofs/curves.py",
        "self.value(touch) - slope * touch - lost)",
        "self.value(touch) - slope * touch)",
        "tests/test_proofs.py",
    ),
    "a-split-is-kept-by-the-other-half": Fault(
        "proofs/checker.py",
        "(np.maximum, ends[0]) if side > 0 else (np.minimum, ends[1])",
        "(np.maximum, ends[0]) if side < 0 else (np.minimum, ends[1])",
        "tests/test_proofs.py",
    ),
    "multipliers-cost-nothing": Fault(
        "proofs/checker.py",
        "                    plus(part, -end)",
        "                    plus(part, 0 * end)",
        "tests/test_proofs.py",
    ),
    "ends-paid-for-too-little": Fault(
        "bounds/rebounded.py",
        "jnp.maximum(b * lower, b * upper)",
        "jnp.minimum(b * lower, b * upper)",
        "tests/test_bounds_of_parts.py",
    ),
    "upper-line-of-a-maximum-too-low": Fault(
        "bounds/relax.py",
        "jnp.where(unstable, -slope * low, 0.0)",
        "jnp.where(unstable, -0.9 * slope * low, 0.0)",
        "tests/test_certify_primitives.py",
    ),
    "slope-computed-anew-by-each-fusion": Fault(
        "xla_cpu.py",
        "return loops.cond(never, _forgotten, lambda *given: given, *arrays)",
        "return arrays",
        "tests/test_certify_soundness.py::test_certificates_hold_as_users_compile_them",
    ),
    "half-of-a-part-forgotten": Fault(
        "certify/parts.py",
        "self._bounded_anew(list(part.halves(found.entry)), until)",
        "self._bounded_anew(list(part.halves(found.entry)), until)[:1]",
        "tests/test_certify_branch.py tests/test_properties.py",
    ),
}


def survives(fault: Fault, folder: Path) -> bool:
    """Whether all named tests pass in a copy of the project with the fault."""
    for part in ("wdjax", "tests"):
        shutil.copytree(HOME / part, folder / part)
    shutil.copy(HOME / "pyproject.toml", folder)
    place = folder / "wdjax" / fault.file
    source = place.read_text()
    if source.count(fault.line) != 1:
        raise ValueError(f"{fault.file} must hold this line once: {fault.line}")
    place.write_text(source.replace(fault.line, fault.wrong))
    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(HOME / ".jax_cache"))
    environment = os.environ | {"PYTHONPATH": str(folder), "JAX_COMPILATION_CACHE_DIR": cache}
    options = ["-q", "-x", "-p", "no:cacheprovider", "-m", "not slow"]
    command = [sys.executable, "-m", "pytest", *options, *fault.tests.split()]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode not in (0, 1, 5):  # 5: all of the tests are slow ones.
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.returncode != 1


def main() -> None:
    wanted = sys.argv[1:] or list(FAULTS)
    left = []
    for name in wanted:
        begun = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            lives = survives(FAULTS[name], Path(folder))
        left.extend([name] if lives else [])
        word = "SURVIVES" if lives else "found"
        print(f"{name:38} {word:9} {time.perf_counter() - begun:6.1f} s", flush=True)
    print(f"{len(wanted) - len(left)} of {len(wanted)} faults were found.")
    sys.exit(bool(left))


if __name__ == "__main__":
    main()
