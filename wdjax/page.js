"use strict";

/* The share of all mass that a budget moves, the cheapest flips first and the last one in part:
   max mean(w) subject to mean(w cost^order) <= eps^order, as transport.allocate solves it.
   Distances ascend; Infinity is never reached. */
function moved(distances, eps, order, discount = 0) {
  let left = distances.length, mass = 0;
  for (const far of distances) {
    const price = far === 0 ? 0 : (far / eps) ** order * (1 - discount);
    mass += price === 0 ? 1 : Math.min(Math.max(left, 0) / price, 1);
    left -= price;
  }
  return mass / distances.length;
}

const share = (values, holds) => values.filter(holds).length / values.length;

/* Accuracy that is left when flips at these distances are bought. */
function attacked(flips, eps, order) {
  return order === Infinity ? share(flips, far => far > eps) : 1 - moved(flips, eps, order);
}

/* Accuracy that no adversary can undercut, as certify.certified_accuracy rounds it down. */
function certified(radii, eps, order) {
  const rounding = 1e-9;
  if (order === Infinity) return share(radii, radius => radius >= eps && radius > 0);
  if (eps === 0) return share(radii, radius => radius > 0);
  return Math.max(1 - moved(radii, eps, order, rounding) - rounding, 0);
}

const BALLS = {omega_1: 1, omega_2: 2, omega_inf: Infinity};

/* Both sides of one model's sandwich as functions of eps, null for a side that is not known. Every
   ball lies in the larger one of the same order, so an attack of the audit holds beyond its eps. */
function sides(model, ball) {
  const order = BALLS[ball], ascending = values =>
    values && values.map(value => value ?? Infinity).sort((a, b) => a - b);
  const flips = ascending(model.samples.flip_distance);
  const radii = ascending(model.samples.certified_radius);
  const measured = model.balls[ball].attacked_accuracy;
  return {
    attacked: flips && (eps => Math.min(attacked(flips, eps, order),
      ...measured.filter((_, place) => model.eps_list[place] <= eps))),
    certified: radii && (eps => certified(radii, eps, order)),
  };
}

/* Columns of the table of all samples, each a name and a value for every sample. */
function columns(samples) {
  const found = [["sample", samples.correct.map((_, index) => index)],
    ["correct", samples.correct.map(Number)]];
  const far = values => values.map(value => value ?? Infinity);
  for (const [key, all, each] of [["flip distance", "flip_distance", "flip_distances"],
    ["certified radius", "certified_radius", "certified_radii"]]) {
    if (samples[all]) found.push([key, far(samples[all])]);
    for (const [name, values] of Object.entries(samples[each] ?? {}))
      found.push([`${key} by ${name}`, far(values)]);
  }
  return found;
}

function csv(samples) {
  const found = columns(samples), quoted = word => `"${word.replaceAll('"', '""')}"`;
  const rows = samples.correct.map((_, index) => found.map(([, values]) =>
    values[index] === Infinity ? "inf" : values[index]).join(","));
  return [found.map(([name]) => quoted(name)).join(","), ...rows, ""].join("\n");
}

/* A share; one that is proved is rounded down. */
function percent(value, proved = false) {
  if (value === null) return "unknown";
  const shown = proved ? Math.floor(1e4 * value + 1e-9) / 100 : 100 * value;
  return `${shown.toFixed(2)} %`;
}

/* A number with four digits; one that is proved is rounded down. */
function digits(value, proved = false) {
  const shown = +value.toPrecision(4);
  if (!proved || shown <= value) return shown;
  return +(shown - 10 ** (Math.floor(Math.log10(value)) - 3)).toPrecision(4);
}

/* An element with properties, attributes and children. */
function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function download(link, kind, text) {
  link.href = URL.createObjectURL(new Blob([text], {type: kind}));
  link.hidden = false;
}

function sort(button) {
  const head = button.closest("th"), body = head.closest("table").tBodies[0];
  const down = head.getAttribute("aria-sort") !== "ascending";
  for (const other of head.parentElement.children) other.setAttribute("aria-sort", "none");
  head.setAttribute("aria-sort", down ? "ascending" : "descending");
  const value = row => {
    const cell = row.cells[head.cellIndex] ?? row.cells[1];
    return cell.dataset.value ?? (head.cellIndex ? -1 : cell.innerText);
  };
  const compare = (a, b) => head.cellIndex ? a - b || 0 : a.localeCompare(b, "en", {numeric: true});
  const rows = [...body.rows].sort((a, b) => (down ? 1 : -1) * compare(value(a), value(b)));
  body.append(...rows);
}

/* Fills the table of all samples, the nearest mistakes first. */
function fill(details, model) {
  const found = columns(model.samples), table = details.querySelector("table");
  const first = found.find(([name]) => /distance|radius/.test(name))?.[1] ?? found[1][1];
  const order = [...found[0][1]].sort((a, b) => first[a] - first[b] || a - b);
  table.append(
    element("thead", {}, element("tr", {}, ...found.map(([name]) => element("th",
      {scope: "col", "aria-sort": "none"}, element("button", {type: "button"}, name))))),
    element("tbody", {}, ...order.map(index => element("tr", {}, ...found.map(([name, values], place) => {
      const value = values[index];
      const shown = place === 1 ? (value ? "yes" : "no")
        : value === Infinity ? "none" : digits(value, name.startsWith("certified"));
      return element(place ? "td" : "th", {"data-value": value, ...(place ? {} : {scope: "row"})}, shown);
    })))));
}

/* The curves of both sides as points "x,y" of a drawing 100 wide and 50 high. */
function curve(side, most) {
  return Array.from({length: 201}, (_, at) => `${at / 2},${50 - 50 * side(most * at / 200)}`).join(" ");
}

function solver(form, model, earlier) {
  const [slider, number] = form.querySelectorAll("input[type=range], input[type=number]");
  const most = Number(slider.max), picture = form.querySelector("svg");
  const show = eps => {
    const ball = form.querySelector("input:checked").value;
    for (const [name, one] of [["now", model], ["before", earlier]]) {
      if (!one) continue;
      const both = sides(one, ball);
      for (const side of ["attacked", "certified"]) {
        const value = both[side] && both[side](eps);
        form.querySelector(`td[data-of="${name} ${side}"]`).textContent = percent(value, side === "certified");
        picture.querySelector(`.${name}.${side}`)
          .setAttribute("points", both[side] ? curve(both[side], most) : "");
      }
    }
    picture.querySelector("line").setAttribute("transform", `translate(${100 * Math.min(eps / most, 1)})`);
  };
  slider.oninput = () => { number.value = slider.value; show(Number(slider.value)); };
  number.oninput = () => {
    if (!number.validity.valid || number.value === "") return;
    slider.value = number.value;
    show(Number(number.value));
  };
  form.onchange = event => event.target.type === "radio" && show(Number(number.value));
  form.onsubmit = event => event.preventDefault();
  form.hidden = false;
  show(Number(number.value));
}

function start() {
  const whole = document.getElementById("report").textContent, report = JSON.parse(whole);
  const earlier = JSON.parse(document.getElementById("earlier").textContent);
  download(document.getElementById("json"), "application/json", whole);
  for (const section of document.querySelectorAll("[data-model]")) {
    const model = report.models[section.dataset.model];
    const form = section.querySelector("form"), details = section.querySelector("details.all");
    if (form) solver(form, model, earlier[model.model]);
    download(section.querySelector("a.csv"), "text/csv", csv(model.samples));
    details.hidden = false;
    details.addEventListener("toggle", () => fill(details, model), {once: true});
  }
  document.addEventListener("click", event => {
    const button = event.target.closest("th button");
    if (button) sort(button);
  });
  addEventListener("beforeprint", () => {
    for (const details of document.querySelectorAll("details.sample")) details.open = true;
  });
}

if (typeof document !== "undefined") start();
