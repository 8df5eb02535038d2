"""The page and its figures: for phones, the dark, colour-blind readers and no network."""

import base64
import csv
import html.parser
import io
import itertools
import json
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wdjax
from wdjax import attacks, certify, precision, transport
from wdjax.report import audit, audited, changes, page, plots, rounded, summary, worst

PHONE = 390 - 2 * 16
"""CSS pixels beside the page's padding."""


@pytest.fixture(scope="module")
def shown():
    model = wdjax.Model(
        lambda w, x: x.reshape(len(x), -1) @ w, jnp.eye(16)[:, :2] - jnp.eye(16, k=-1)[:, :2]
    )
    x = jax.random.uniform(jax.random.key(0), (6, 4, 4, 1))
    y = jnp.argmax(model(x), -1)
    ball = wdjax.Lp()
    found = audit.sandwich(
        model,
        x,
        y,
        eps_list=[0.0, 0.05, 0.2],
        attacks={"one step": attacks.fgsm(ball), "a <walk>": attacks.WDAPlusPlus(ball)},
        certificates={"nothing": lambda model, x, y: np.zeros(len(y))},
        loss_bounds={"a large one": lambda model, x, y, *, eps, order: np.full_like(eps, 99)},
        key=jax.random.key(1),
    )
    names = ("first", "second")
    content = {
        "models": [
            {"model": name, "trained": "By hand."} | summary.describe(found) for name in names
        ],
        "versions": {"jax": jax.__version__},
        "data": "points",
        "seed": 0,
        "remarks": ["eps is > the <width> of the box"],
        "coverage": {"n": 6, "of": 10, "missing_parts": [2, 5]},
    }
    drawn = {name: page.draw(found, x, y, model, name) for name in names}
    earlier = changes.Changes("first", "old & <gone>", (), (), content["models"][0])
    return found, page.render(content, drawn, [earlier]), content["models"][0], drawn["first"]


@pytest.fixture(scope="module")
def script():
    """The functions of the page's script."""
    engine = pytest.importorskip("quickjs", reason="quickjs runs the page's script; extra [test]")
    context = engine.Context()
    context.eval((Path(wdjax.__file__).parent / "page.js").read_text("utf-8"))

    def run(code, **values):
        for name, value in values.items():
            context.eval(f"var {name} = {json.dumps(value)}")
        return json.loads(context.eval(f"JSON.stringify({code})"))

    return run


VOID = {"meta", "br", "img", "input", "path", "use", "image", "rect"}


class Reader(html.parser.HTMLParser):
    """Every tag with those around it, and every name."""

    def __init__(self, text):
        super().__init__()
        self.inside, self.seen, self.names = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs), tuple(self.inside)))
        self.names += [value for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.inside.append((tag, dict(attrs).get("class")))

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.inside.pop()[0] == tag

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs), tuple(self.inside)))
        self.names += [value for name, value in attrs if name == "id"]


def test_the_page_stands_alone_and_is_well_formed(shown):
    text = shown[1]
    read = Reader(text)
    assert not read.inside
    assert len(read.names) == len(set(read.names))
    assert "http" not in text
    assert not re.search(r"\$\w|None|nan\b", re.sub(r"<script.*</script>", "", text, flags=re.S))
    for _, attrs, _ in read.seen:
        for name in ("src", "href"):
            assert attrs.get(name, "#").startswith(("#", "data:"))
    used = set(re.findall(r'url\(#([\w-]+)\)|href="#([\w-]+)"', text))
    assert {name for pair in used for name in pair if name} <= set(read.names)


def test_the_page_says_what_is_said_of_all_models(shown):
    text = shown[1].partition("<nav")[0]
    assert re.findall(r'<li class="fails">(.*?)</li>', text) == [
        "about 6 of 10 samples: without the parts 2, 5",
        "eps is &gt; the &lt;width&gt; of the box",
    ]


def test_proved_bounds_are_rounded_to_the_side_on_which_they_hold(shown):
    model = json.loads(json.dumps(shown[2]))
    for curves in model["balls"].values():
        curves |= {"certified_accuracy": [2 / 3, 0.99996, 0.5], "attacked_accuracy": [1, 1, 1 / 3]}
    certificate = {"certified_accuracy": {ball: [2 / 3, 0.99996, 0.5] for ball in model["balls"]}}
    model["certificates"] = {"one": certificate}
    whole = {"models": [model]}
    said = audited.table(whole)
    assert "<=    1.000    1.000    0.334" in said
    assert ">=    0.666    0.999    0.500" in said
    content = whole | {"versions": {}, "data": "points", "remarks": []}
    proved = f'<td data-value="{2 / 3!r}">0.666</td><td data-value="0.99996">0.999</td>'
    assert page.render(content, {}).count(proved) == 6
    assert changes.cells(rounded.AtLeast(2 / 3), 1 / 3)[0] == "0.6666"


def test_the_script_rounds_proved_shares_down(script):
    assert script("[percent(v, true), percent(v)]", v=2 / 3) == ["66.66 %", "66.67 %"]


def test_the_script_rounds_proved_radii_down(script):
    for radius in (0, 1e-7, 2 / 3, 0.06249999, 0.99996, 9999.6, *np.geomspace(1e-9, 1e4, 99)):
        found, plain = script("[digits(v, true), digits(v)]", v=radius)
        assert found <= radius <= plain * 1.0006
        assert found >= radius * (1 - 1e-3)
    assert script("digits(v, true)", v=0.99996) == 0.9999


def test_the_page_holds_the_report_and_names_everything(shown):
    _, text, model, _ = shown
    report, earlier = (
        json.loads(re.search(f'id="{name}">(.*?)</script>', text, re.DOTALL)[1])
        for name in ("report", "earlier")
    )
    assert report["models"][0] == json.loads(json.dumps(model))
    assert earlier == {"first": {key: report["models"][0][key] for key in report["models"][0]
                                 if key in ("eps_list", "balls", "samples")}}  # fmt: skip
    assert "Since old &amp; &lt;gone&gt;" in text
    drawn = [attrs.get("aria-label") for tag, attrs, _ in Reader(text).seen if tag == "svg"]
    assert None not in drawn
    assert len(drawn) == len(set(drawn))
    rows = re.findall(r"<tr>(<t.).*?</tr>", text, re.DOTALL)
    assert set(rows) == {"<th"}
    headed = re.findall(r'<tr><th scope="(\w+)"', text)
    assert len(headed) == len(rows)
    links = re.findall(r'href="#([^"]+)"', text)
    assert len(links) > 15
    assert {f'id="{link}"' in text for link in links} == {True}


def test_the_page_spends_budgets_as_python_does(script):
    rng = np.random.default_rng(0)
    far = rng.exponential(size=(40, 12)).round(2)
    far[rng.random(far.shape) < 0.2] = 0.0
    far[rng.random(far.shape) < 0.2] = np.inf
    far[0], far[1], far[2, 0] = np.inf, 0.0, 1e200
    sizes = rng.choice([1, 12], len(far))
    for values, size in zip(far, sizes):
        distance = np.sort(values[:size])
        budgets = np.array([0.0, 1e-3, rng.exponential(), min(distance[0], 30.0), 30.0])
        spend = "list.map(e => [attacked, certified].map(f => f(far, e, p)))"
        for order in (1, 1.5, 2, math.inf):
            setting = f"far = far.map(v => v ?? Infinity), p = p ?? Infinity, {spend}"
            given = {"far": [summary.number(v) for v in distance], "list": budgets.tolist()}
            ours = np.array(script(f"({setting})", p=summary.number(order), **given))
            with precision.float64():
                weight = np.asarray(transport.allocate(distance, budgets, order))
            theirs = certify.certified_accuracy(distance, budgets, order)
            np.testing.assert_allclose(ours[:, 0], 1 - weight.mean(1), rtol=0, atol=1e-9)
            np.testing.assert_allclose(ours[:, 1], theirs, rtol=0, atol=1e-9)


def test_the_page_repeats_the_audit_and_its_sides_never_cross(shown, script):
    model = shown[2]
    for ball, curves in model["balls"].items():
        at = "[both.attacked, both.certified].map(f => f(e))"
        code = f"(both = sides(model, {ball!r}), list.map(e => {at}))"
        script("0", both=0)
        between = np.linspace(0, 0.3, 40).tolist()
        ours = np.array(script(code, model=model, list=model["eps_list"] + between))
        given = curves["attacked_accuracy"], curves["certified_accuracy"]
        np.testing.assert_allclose(ours[:3], np.transpose(given), atol=1e-6)
        assert np.all(np.diff(ours[3:], axis=0) <= 1e-12)
        assert np.all(ours[:, 0] >= ours[:, 1])
    absent = model | {"samples": model["samples"] | {"flip_distance": None}}
    assert script("sides(model, 'omega_1')", model=absent)["attacked"] is None


def test_samples_are_downloaded_as_csv(shown, script):
    model = shown[2]
    rows = list(csv.DictReader(io.StringIO(script("csv(model.samples)", model=model))))
    known = model["samples"]
    assert [row["correct"] == "1" for row in rows] == known["correct"]
    for title, values in (
        ("flip distance", known["flip_distance"]),
        ("flip distance by a <walk>", known["flip_distances"]["a <walk>"]),
        ("certified radius by nothing", known["certified_radii"]["nothing"]),
    ):
        assert [float(row[title]) for row in rows] == [
            math.inf if value is None else value for value in values
        ]


def test_worst_samples_are_shown_as_they_are(shown):
    from matplotlib import image

    found, text, model, (_, samples) = shown
    distance, points = found.nearest()
    assert [sample.number for sample in samples] == np.argsort(distance, kind="stable").tolist()
    assert [sample.said for sample in samples] == [
        None if math.isinf(distance[sample.number]) else 1 - sample.label for sample in samples
    ]
    first = samples[0]
    pictures = [
        image.imread(io.BytesIO(base64.b64decode(data)))
        for data in re.findall(r"base64,([^\"]+)", first.shown)
    ]
    assert len(pictures) == 3
    np.testing.assert_allclose(
        pictures[1][..., 0], points[first.number, ..., 0], atol=1 / 255 + 1e-6
    )
    said = worst.as_html(first, model)
    assert said in text
    assert f"nearest flip {distance[first.number]:.4g}" in said
    assert "certified radius 0" in said
    assert "mistake found by a &lt;walk&gt;" in said


def test_worst_samples_leave_out_mistakes_and_stay_small():
    rng = np.random.default_rng(0)
    x = rng.uniform(size=(30, 70, 70, 3)).astype(np.float32)
    flat = x.reshape(30, -1)[:, :6]
    options = {"attacks": {"fgsm": attacks.fgsm()}, "certificates": {}, "loss_bounds": {}}
    model = wdjax.Model(lambda w, x: x.reshape(len(x), -1)[:, :6] @ w, jnp.eye(6)[:, :2])
    y = np.array(np.argmax(model(x), -1))
    y[3] = 1 - y[3]
    for given in (x, flat):
        found = audit.sandwich(model, given, y, eps_list=[0.2], key=jax.random.key(0), **options)
        chosen = worst.worst(found, given, y, model)
        assert 3 not in [sample.number for sample in chosen]
        assert len(chosen) == (6 if given is x else 24)
        near = [found.nearest()[0][sample.number] for sample in chosen]
        assert near == sorted(near)
        assert sum(len(sample.shown) for sample in chosen) < 600_000
    number, rows = chosen[0].number, re.findall(r"<tr>.*?</tr>", chosen[0].shown)[1:]
    change = {int(row[0]): float(row[3]) for row in (re.findall(r">([-\d.e]+)<", r) for r in rows)}
    truth = found.nearest()[1][number] - flat[number]
    assert change == {i: float(f"{truth[i]:.4g}") for i in np.flatnonzero(truth)}


def test_nothing_is_wider_than_a_phone(shown):
    read = Reader(shown[1])
    assert ("meta", "viewport") in {(tag, attrs.get("name")) for tag, attrs, _ in read.seen}
    for tag, attrs, inside in read.seen:
        if tag == "table":
            assert inside[-1] == ("div", "scroll")
        if tag == "svg":
            assert inside[-1][0] == "figure"
            assert "width" not in attrs
            assert "viewbox" in attrs
    assert "figure svg { display: block; width: 100%" in shown[1]
    assert ".scroll { overflow-x: auto" in shown[1]


def test_text_is_large_enough_on_a_phone(shown):
    sizes = re.findall(r"font-size: ([\d.]+)(rem|em)", shown[1])
    assert sizes
    assert all(float(size) * 16 >= 12 for size, _ in sizes)
    drawings = re.findall(r"<svg.*?</svg>", shown[1], re.DOTALL)
    written = [svg for svg in drawings if "<text" in svg]
    assert len(written) == len(drawings) - 2  # Curves of the solvers are explained below them.
    for svg in written:
        width = float(re.search(r'viewBox="0 0 ([\d.]+)', svg)[1])
        fonts = [float(size) for size in re.findall(r"font(?:-size)?: ([\d.]+)px", svg)]
        assert fonts
        assert min(fonts) * PHONE / width >= 12
        assert fonts.count(fonts[0]) == len(fonts)


def test_figures_follow_the_dark(shown):
    text = shown[1]
    assert "@media (prefers-color-scheme: dark)" in text
    svgs = "".join(re.findall(r"<svg.*?</svg>", text, re.DOTALL))
    assert "var(--ink)" in svgs
    for colour in (plots.INK, plots.FAINT, plots.UNKNOWN, "#ffffff"):
        assert colour not in svgs
    # Text has a colour of its own: the default of SVG is black.
    assert all("var(--ink)" in text for text in re.findall(r"<text [^>]*>", svgs))
    schemes = re.findall(r"--paper: (#\w+); --ink: (#\w+); --soft: (#\w+)", text)
    assert len(schemes) == 2
    for paper, ink, soft in schemes:
        assert contrast(paper, ink) > 10
        assert contrast(paper, soft) > 4.5
        assert min(contrast(paper, colour) for colour in plots.PALETTE) > 2


def test_words_are_explained(shown):
    text = shown[1]
    for word in ("eps", "Omega_p", "kappa", "Slack", "Expected loss", "Ball", "one step"):
        assert f"<dt>{word}</dt>" in text
    assert "<dt>a &lt;walk&gt;</dt><dd>WDA++: walk every sample" in text
    assert "By hand." in text
    assert text.count("<figcaption>") == text.count("<figure>") == text.count('role="img"') + 36
    assert text.count('aria-sort="none"><button') == 4 * 4


def linear(colour):
    """sRGB to linear light."""
    parts = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def contrast(one, other):
    """The ratio of WCAG 2."""
    dark, light = sorted(float(linear(c) @ [0.2126, 0.7152, 0.0722]) + 0.05 for c in (one, other))
    return light / dark


def lab(light):
    """CIE L*a*b* of linear sRGB, by a white of D65."""
    xyz = np.array(
        [
            [0.4124564, 0.3575761, 0.1804375],
            [0.2126729, 0.7151522, 0.0721750],
            [0.0193339, 0.1191920, 0.9503041],
        ]
    ) @ np.clip(light, 0, 1)
    t = xyz / [0.95047, 1.0, 1.08883]
    f = np.where(t > (6 / 29) ** 3, np.cbrt(t), t / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


# Machado et al. [machado2009], severity 1, on linear light.
EYES = {
    "deuteranope": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "protanope": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
}


@pytest.mark.parametrize("eye", EYES)
@pytest.mark.parametrize("ink", [plots.INK, "#e8eaed"])
def test_colours_differ_for_a_red_green_blind_reader(eye, ink):
    looks = plots.styles(map(str, range(42)))
    assert len({(look["color"], look["marker"]) for look in looks.values()}) == 42
    colours = [*plots.PALETTE, ink]
    seen = {colour: lab(np.array(EYES[eye]) @ linear(colour)) for colour in colours}
    gaps = {
        pair: np.linalg.norm(seen[pair[0]] - seen[pair[1]])
        for pair in itertools.combinations(colours, 2)
    }
    assert min(gaps.values()) > 10, min(gaps, key=gaps.get)


def test_curves_of_an_audit_differ_in_colour_and_marker(shown):
    for axis in plots.accuracy(shown[0]).axes:
        lines = axis.get_lines()
        assert len({line.get_color() for line in lines}) == len(lines)
        assert len({line.get_marker() for line in lines}) == len(lines)


def test_budgets_of_who_pays_differ_in_colour():
    model = wdjax.Model(lambda w, x: x * w, jnp.array([1.0, -1.0]))
    options = {"attacks": {"fgsm": attacks.fgsm()}, "certificates": {}, "loss_bounds": {}}
    x, y, key = jnp.array([[0.5, 0.4]]), jnp.array([0]), jax.random.key(0)
    many = audit.sandwich(model, x, y, eps_list=np.linspace(0, 0.1, 10), key=key, **options)
    (axis,) = plots.allocation(many).axes
    colours = [line.get_color() for line in axis.get_lines()]
    assert len(colours) == len(set(colours)) == len(plots.PALETTE)


def test_an_audit_without_attacks_or_flips_is_drawn():
    model = wdjax.Model(lambda w, x: x.reshape(len(x), -1) @ w, jnp.zeros((4, 2)).at[:, 0].set(9.0))
    x, y = jnp.full((1, 2, 2, 1), 0.5), jnp.array([0])
    options = {"attacks": {"fgsm": attacks.fgsm()}, "certificates": {}, "loss_bounds": {}}
    found = audit.sandwich(model, x, y, eps_list=[0.0], key=jax.random.key(0), **options)
    assert found.nearest()[0].tolist() == [math.inf]
    drawn = page.pictures(found, x, y, model, "one")
    assert "no flip found" in drawn[-1].svg
    assert len(drawn) == 9


def test_an_earlier_report_that_no_page_can_hold_is_refused(shown, tmp_path):
    path, model = tmp_path / "report.json", json.loads(json.dumps(shown[2]))
    whole = {"schema": summary.SCHEMA, "command": "audit", "models": [model]}
    path.write_text(json.dumps(whole))
    assert changes.read(path) == whole
    for text, why in (
        ('{"models": [{"samples": {"flip_distance": [NaN]}}]}', "it holds NaN, which JSON lacks"),
        (json.dumps(whole | {"models": []}), "it is of no model"),
        (json.dumps(whole | {"models": [model | {"clean_loss": "one"}]}), "report.json cannot be"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=why):
            changes.read(path)
