"""The attacks that the command line knows: a new one is one row."""

from collections.abc import Callable

from wdjax import attacks
from wdjax.balls import Lp
from wdjax.core import Attack

ATTACKS: dict[str, Callable[[Lp], Attack]] = {
    "fgsm": attacks.fgsm,
    "pgd": attacks.PGD,
    "wda": attacks.WDA,
    "wda++": attacks.WDAPlusPlus,
}
"""What ``--attacks`` calls it, and what makes it for a ball. ``--help`` prints the first paragraph
of the docstring."""
