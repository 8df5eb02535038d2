r"""Reads properties in VNN-LIB: boxes of inputs, and outputs that must not happen.

A file of VNN-LIB 1.0 declares ``X_0 ... `` and ``Y_0 ...`` and asserts comparisons of linear terms,
``and`` and ``or``. Its assertions describe a violation; they are expanded into a disjunction of
boxes of inputs with linear inequalities on outputs. Brackets are followed without recursion, and
everything is counted before it is stored.

Queries of VNN-LIB 2.0 are brought to this form first (:mod:`wdjax.files.vnnlib_typed`).

Source: the VNN-LIB standard, and the forms that VNN-COMP's benchmarks use.
"""

import collections
import gzip
import itertools
import re
import zlib
from collections.abc import Iterator
from fractions import Fraction
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from wdjax.files import vnnlib_typed

Numbers = npt.NDArray[Any]
Term = dict[str, Fraction]
"""A linear term: coefficients by variable; the constant under ``""``. They are exact until they
enter a box or an inequality: in floats ``1e20 - 3`` is ``1e20``, and the 3 would be lost."""
Row = tuple[Term, ...]
"""Terms that are all at most 0: a conjunction."""

_BYTES = 1 << 25
_DEPTH = 64
_WORD = 1 << 12
_WORDS = 1 << 22
_CASES = 1 << 14
"""Largest numbers of bytes, of open brackets, of characters of a word, of words and brackets of an
outermost form, and of alternatives."""
_ATOMS = 1 << 21
"""Largest number of comparisons in all alternatives together."""
_LARGEST = 1 << 100
"""The largest absolute value of a number."""
_BITS = 1 << 14
"""The largest numbers of binary digits of a fraction's numerator and denominator: those of a sum of
thousands of fractions would fill hours."""
_ENTRIES = 1 << 21
"""Largest number of inputs, and of outputs, of a query of VNN-LIB 2.0."""

_TOKEN = re.compile(rb"[()]|[^ \t\r\n();]+|;[^\n]*")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_NAME = re.compile(r"([XY])_(0|[1-9][0-9]{0,8})")


class BoxCase(NamedTuple):
    """A box of inputs, and the outputs ``A y <= b`` that are forbidden there."""

    lower: Numbers
    """``[N]`` float64"""
    upper: Numbers
    members: tuple[tuple[Numbers, Numbers], ...]
    """``A``, ``[R, K]``, and ``b``, ``[R]``, of each conjunction, float64."""


def read(path: str | PathLike[str]) -> tuple[BoxCase, ...]:
    """The cases of a ``.vnnlib`` or ``.vnnlib.gz``; one of them is violated if the property is.

    Raises:
      ValueError: the file is no VNN-LIB 1.0 or 2.0, too large, or has an empty or unbounded box;
        or a query of 2.0 is about several networks, or has strict comparisons.
      OSError: the file cannot be read.
      ImportError: VNN-LIB 2.0 without the package ``vnnlib`` (extra ``[vnnlib]``).

    Cost: some 2 MB a second.

    >>> import tempfile
    >>> text = "(declare-const X_0 Real) (declare-const Y_0 Real) (assert (>= X_0 0.5))"
    >>> text += "(assert (<= X_0 1e0)) (assert (>= Y_0 3)) ; y must not reach 3"
    >>> with tempfile.NamedTemporaryFile("w", suffix=".vnnlib") as file:
    ...     _ = file.write(text), file.flush()
    ...     ((low, high, ((a, b),)),) = read(file.name)
    >>> low.tolist(), high.tolist(), a.tolist(), b.tolist()
    ([0.5], [1.0], [[-1.0]], [-3.0])
    """
    path = Path(path)
    try:
        return parsed(_content(path))
    except _FaultError as fault:
        raise ValueError(f"{path} is not read as VNN-LIB: {fault}.") from None


def parsed(text: bytes) -> tuple[BoxCase, ...]:
    """:func:`read` from the file's content."""
    counts, plain, choices = {"X": 0, "Y": 0}, list[Term](), list[list[Row]]()
    known: set[str] = set()
    for form in _version_1(text):
        match form:
            case ["declare-const", str(name), "Real"]:
                _declare(name, known, counts)
            case ["assert", list(condition)]:
                found = _alternatives(condition, known)
                if len(found) == 1:
                    plain.extend(found[0])
                else:
                    choices.append(found)
            case _:
                raise _FaultError(f"the form {_shown(form)}; there are declare-const and assert")
    for kind, what in (("X", "input"), ("Y", "output")):
        if not counts[kind]:
            raise _FaultError(f"no {what} {kind}_0 is declared")
        if (last := f"{kind}_{counts[kind] - 1}") not in known:
            raise _FaultError(f"{counts[kind]} variables {kind} are declared, but not {last}")
    return _cases(plain, _product(choices, len(plain)), counts["X"], counts["Y"])


class _FaultError(ValueError):
    """What is wrong with a file."""


def _content(path: Path) -> bytes:
    """The file's bytes, unpacked, of which there are at most ``_BYTES``."""
    if not path.is_file():
        raise ValueError(f"{path} is no file; name a property, .vnnlib or .vnnlib.gz.")
    with path.open("rb") as file:
        content = file.read(_BYTES + 1)
    if content[:2] == b"\x1f\x8b":
        try:
            with gzip.open(path) as packed:
                content = packed.read(_BYTES + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise _FaultError(f"its gzip data are damaged: {error}") from None
    elif content[:1] == b"\x80":
        raise _FaultError(
            "it is a pickle, a cache of another program, which may hold anything; name the "
            ".vnnlib it was made of"
        )
    if len(content) > _BYTES:
        raise _FaultError(f"it is larger than {_BYTES >> 20} MB")
    return content


def _version_1(text: bytes) -> Iterator[list[Any]]:
    """The outermost forms in terms of VNN-LIB 1.0, of either version."""
    forms = _forms(text)
    first = list(itertools.islice(forms, 1))
    if not first or first[0][:1] != ["vnnlib-version"]:
        yield from itertools.chain(first, forms)
        return
    collections.deque(forms, 0)  # Counts all brackets before the parser of 2.0 follows them.
    try:
        yield from vnnlib_typed.forms(text, _ENTRIES)
    except ValueError as error:
        raise _FaultError(str(error)) from None


def _forms(text: bytes) -> Iterator[list[Any]]:
    """The outermost bracketed forms, as nested lists of words."""
    stack: list[list[Any]] = []
    words = 0
    for token in _TOKEN.finditer(text):
        word = token[0]
        if word[:1] == b";":
            continue
        words += 1
        if words > _WORDS:
            raise _FaultError(f"more than {_WORDS} words in one pair of brackets")
        if word == b"(":
            if len(stack) == _DEPTH:
                raise _FaultError(f"more than {_DEPTH} brackets are open")
            stack.append([])
        elif not stack:
            raise _FaultError(f"{_shown(word)} stands outside of brackets")
        elif word != b")":
            if len(word) > _WORD:
                raise _FaultError(f"a word of {len(word)} characters")
            stack[-1].append(word.decode("ascii", "backslashreplace"))
        else:
            done = stack.pop()
            if stack:
                stack[-1].append(done)
            else:
                words = 0
                yield done
    if stack:
        raise _FaultError(f"{len(stack)} brackets are not closed at its end")


def _declare(name: str, known: set[str], counts: dict[str, int]) -> None:
    found = _NAME.fullmatch(name)
    if found is None:
        raise _FaultError(f"the name {_shown(name)}; there are X_0, X_1 ... and Y_0, Y_1 ...")
    if name in known:
        raise _FaultError(f"{name} is declared twice")
    known.add(name)
    counts[found[1]] += 1


def _alternatives(condition: list[Any], known: set[str]) -> list[Row]:
    """A condition as a disjunction of conjunctions. Its nesting is at most ``_DEPTH``."""
    match condition:
        case ["or", *parts] if parts:
            found = [row for part in parts for row in _alternatives(_form(part), known)]
            _check_size(len(found), sum(map(len, found)))
            return found
        case ["and", *parts] if parts:
            choices = [_alternatives(_form(part), known) for part in parts]
            alone = tuple(term for each in choices if len(each) == 1 for term in each[0])
            several = [each for each in choices if len(each) > 1]
            return [(*alone, *row) for row in _product(several, len(alone))]
        case ["<=" | ">=" | "=" as sign, one, other]:
            left, right = _linear(one, known), _linear(other, known)
            pairs = [(left, right)] * (sign != ">=") + [(right, left)] * (sign != "<=")
            return [tuple(_plus(*pair, Fraction(-1)) for pair in pairs)]
    raise _FaultError(f"the condition {_shown(condition)}; there are <=, >=, =, and, or")


def _form(part: Any) -> list[Any]:
    if not isinstance(part, list):
        raise _FaultError(f"{_shown(part)} stands where a condition is expected")
    return part


def _product(choices: list[list[Row]], common: int) -> list[Row]:
    """All combinations of one alternative of each; ``common`` terms are in every one of them."""
    found: list[Row] = [()]
    for rows in choices:
        terms = len(rows) * sum(map(len, found)) + len(found) * sum(map(len, rows))
        _check_size(len(found) * len(rows), terms)
        found = [(*one, *other) for one in found for other in rows]
    _check_size(len(found), common)
    return found


def _check_size(cases: int, atoms: int) -> None:
    if cases > _CASES or atoms > _ATOMS:
        raise _FaultError(
            f"its conditions have {cases} alternatives with {atoms} comparisons, more than "
            f"{_CASES} or {_ATOMS}"
        )


def _linear(term: Any, known: set[str]) -> Term:
    """A linear term of variables, numbers, ``+``, ``-``, ``*`` and ``/``."""
    match term:
        case str(word) if word in known:
            return {word: Fraction(1)}
        case str(word) if _NUMBER.fullmatch(word):
            return {"": _number(word)}
        case ["+", *parts] if parts:
            found = _linear(parts[0], known)
            for part in parts[1:]:
                found = _plus(found, _linear(part, known), Fraction(1))
            return found
        case ["-", one]:
            return _plus({}, _linear(one, known), Fraction(-1))
        case ["-", one, *parts]:
            found = _linear(one, known)
            for part in parts:
                found = _plus(found, _linear(part, known), Fraction(-1))
            return found
        case ["*" | "/" as sign, one, other]:
            left, right = _linear(one, known), _linear(other, known)
            if sign == "*" and not set(left) - {""}:
                left, right = right, left
            factor = right.get("", Fraction(0))
            if not set(right) - {""} and (sign == "*" or factor):
                return _plus({}, left, factor if sign == "*" else 1 / factor)
    known_ = "a declared variable, a finite number or a linear term"
    raise _FaultError(f"{_shown(term)} stands where {known_} is expected")


def _number(word: str) -> Fraction:
    """A number's exact value; its size is looked at first, since 1e999999999 would fill memory."""
    near = float(word)
    if not abs(near) <= _LARGEST:
        raise _FaultError(f"a number is {near:g}; the largest allowed is 2^100")
    if near:
        return Fraction(word)
    if word.lower().partition("e")[0].strip("+-.0"):
        raise _FaultError(f"the number {_shown(word)} is not 0, but too small for a float")
    return Fraction(0)


def _plus(one: Term, other: Term, factor: Fraction) -> Term:
    """``one + factor * other``, without the variables that cancel."""
    found = dict(one)
    for name, value in other.items():
        found[name] = total = found.get(name, 0) + factor * value
        if max(total.numerator.bit_length(), total.denominator.bit_length()) > _BITS:
            raise _FaultError(f"a number has more than {_BITS} binary digits")
    return {name: value for name, value in found.items() if value or not name}


def _rounded(value: Fraction) -> float:
    """The nearest float."""
    if abs(value) > _LARGEST:
        raise _FaultError("a sum, product or quotient exceeds 2^100, the largest allowed")
    near = float(value)
    if value and not near:
        raise _FaultError("a product or quotient is not 0, but too small for a float")
    return near


def _cases(plain: list[Term], rows: list[Row], inputs: int, outputs: int) -> tuple[BoxCase, ...]:
    """One case for every box of inputs; alternatives with equal boxes become members of one."""
    lower, upper = np.full(inputs, -np.inf), np.full(inputs, np.inf)
    common = [term for term in plain if not _bounds(term, lower, upper)]
    if len(rows) * (inputs + outputs) > 4 * _ATOMS:
        raise _FaultError(f"{len(rows)} alternatives of {inputs} inputs and {outputs} outputs")
    found: dict[bytes, tuple[Numbers, Numbers, list[tuple[Numbers, Numbers]]]] = {}
    for row in rows:
        low, high = lower.copy(), upper.copy()
        terms = common + [term for term in row if not _bounds(term, low, high)]
        if np.any(low > high) and (found or row is not rows[-1]):
            continue  # No input satisfies this alternative.
        _check_box(low, high)
        if not terms:
            raise _FaultError("an alternative says nothing of the outputs")
        member = _inequalities(terms, outputs)
        box = found.setdefault(low.tobytes() + high.tobytes(), (low, high, []))
        box[2].append(member)
    return tuple(BoxCase(low, high, tuple(members)) for low, high, members in found.values())


def _bounds(term: Term, lower: Numbers, upper: Numbers) -> bool:
    """Cuts the box by a term that is at most 0, if it has one input only; whether it has."""
    names = [name for name in term if name]
    if not any(name[0] == "X" for name in names):
        return False
    if len(names) > 1:
        raise _FaultError(
            f"a comparison of {' and '.join(names[:4])}; an input is compared with numbers"
        )
    index, factor = int(names[0][2:]), term[names[0]]
    end = _rounded(-term.get("", Fraction(0)) / factor)
    if factor > 0:
        upper[index] = min(upper[index], end)
    else:
        lower[index] = max(lower[index], end)
    return True


def _check_box(lower: Numbers, upper: Numbers) -> None:
    for wrong, what in (
        (np.isinf(lower) | np.isinf(upper), "no bound"),
        (lower > upper, "no value"),
    ):
        if np.any(wrong):
            index = int(np.argmax(wrong))
            side = "below" if np.isinf(lower[index]) else "above"
            why = f"{side}" if what == "no bound" else f"in [{lower[index]:g}, {upper[index]:g}]"
            raise _FaultError(f"X_{index} has {what} {why}")


def _inequalities(terms: list[Term], outputs: int) -> tuple[Numbers, Numbers]:
    a, b = np.zeros((len(terms), outputs)), np.zeros(len(terms))
    for row, term in enumerate(terms):
        b[row] = _rounded(-term.get("", Fraction(0)))
        for name, value in term.items():
            if name:
                a[row, int(name[2:])] = _rounded(value)
    return a, b


def _shown(what: Any) -> str:
    """A part of the file for a message, shortened and escaped."""
    text = what if isinstance(what, str | bytes) else _flat(what)
    return ascii(text if len(text) <= 60 else text[:50])


def _flat(form: Any, depth: int = 3) -> str:
    if isinstance(form, str):
        return form[:30]
    inner = "..." if not depth else " ".join(_flat(part, depth - 1) for part in form[:6])
    return f"({inner})"
