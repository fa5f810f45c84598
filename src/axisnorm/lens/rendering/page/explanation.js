// The page of an explanation: one tensor under one norm, which may be changed.

const field = (id) => document.getElementById(id);
const state = { scheme: readScheme(DATA.text), shape: DATA.shape, word: "mean", kept: false };

const view = new TensorView({
  root: field("tensor"), label: "The tensor", chosen: (index, stays) => choose(index, stays),
});

const MOST_GROUPS = 12;

// Pointing shows an element until the pointer leaves; a click or Enter keeps it.
function choose(index, stays) {
  if (stays) {
    const again = state.kept && index && String(index) === String(state.kept);
    state.kept = again || !index ? false : index;
  }
  const shown = index ?? (state.kept || null);
  view.light(shown);
  describe(shown);
}

function valuesOf(shape) {
  if (!DATA.x || String(shape) !== String(DATA.shape)) return null;
  return (index) => DATA.x[index.reduce((flat, i, axis) => flat * shape[axis] + i, 0)];
}

// The mean of one group, and what eps is added to, where its numbers are known.
function statisticsOf(sizes, number) {
  const { scheme } = sizes;
  if (scheme.text === DATA.text && String(sizes.shape) === String(DATA.shape) && DATA.mean) {
    return { mean: DATA.mean[number], spread: DATA.spread[number] };
  }
  if (!valuesOf(sizes.shape) || scheme.statistics === "running") return null;
  const members = groupIndex(sizes).flatMap((group, i) => (group === number ? [DATA.x[i]] : []));
  const first = members[0];
  const mean = first + members.reduce((sum, x) => sum + (x - first), 0) / members.length;
  const around = scheme.center || scheme.scale === "std" ? mean : 0;
  const squares = members.reduce((sum, x) => sum + (x - around) ** 2, 0);
  const divisor = scheme.scale === "l2" ? 1 : members.length - scheme.correction;
  return { mean, spread: squares / divisor };
}

const SYMBOLS = { variance: "var", "mean square": "meansquare", "sum of squares": "sumsquare" };

// What eps is added to, before any root.
function spreadOf(scheme) {
  if (scheme.scale === "l2") return "sum of squares";
  return scheme.center || scheme.scale === "std" ? "variance" : "mean square";
}

const place = (numbers) => (numbers.length ? `[${numbers.join(", ")}]` : "");

function describe(index) {
  const { sizes } = state;
  const rows = [];
  let said = "";
  if (index && sizes) {
    const { scheme, names } = sizes;
    const digits = digitsOf(sizes, index);
    const at = (dimensions) => place(dimensions.map((i) => digits[i]));
    const number = numberOf(sizes, sizes.told, index);
    const value = valuesOf(sizes.shape)?.(index);
    const known = statisticsOf(sizes, number);
    const letter = state.word === "mean" ? view.names.get(number)?.letter : null;
    rows.push(["element", `x${place(index)}${value === undefined ? "" : ` = ${general(value)}`}`]);
    const along = place(sizes.told.map((i) => names[i]));
    rows.push(["group", `${letter ? `${letter}, ` : ""}${along ? `${along} = ${at(sizes.told)}, ` : ""}`
      + `${number + 1} of ${sizes.groupCount.toLocaleString("en")}`]);
    rows.push(["size", counted(sizes.groupSize, "element")]);
    const spread = spreadOf(scheme);
    if (scheme.center) rows.push(["mean", known ? general(known.mean) : `mean${at(sizes.told)}`]);
    rows.push([spread, known ? general(known.spread) : `${SYMBOLS[spread]}${at(sizes.told)}`]);
    said = `group ${letter ?? number + 1}, ${rows.slice(2).map((row) => row.join(" ")).join(", ")}`;
    const sharers = product(sizes.shape) / product(sizes.affineShape);
    rows.push([there(scheme).join(", ") || "weight, bias", scheme.affine
      ? `weight${at(sizes.affine)}, shared by ${counted(sharers, "element")}` : "none"]);
    if (state.word === "weight") said = `weight ${at(sizes.affine)}, ${counted(sharers, "element")}`;
  }
  field("info").replaceChildren(...(rows.length
    ? rows.flatMap(([name, text]) => [h("dt", {}, name), h("dd", {}, text)])
    : [h("dd", { class: "hint" }, "Point at an element, or walk through the slices with the arrow "
      + "keys: its whole group lights up.")]));
  field("status").textContent = said;
}

// Which of weight and bias there are: a module that was asked about may have one of them.
function there(scheme) {
  return scheme.text === DATA.text ? DATA.parameters : parametersOf(scheme);
}

const sentence = (words) => words.slice(0, 1).toUpperCase() + words.slice(1);

function facts(sizes) {
  const { scheme } = sizes;
  const word = scheme.scale === "l2" ? "length" : scheme.center ? "mean"
    : scheme.scale === "std" ? "variance" : "root mean square";
  const running = scheme.statistics === "running" ? "running " : "";
  const each = sizes.groupCount === 1 ? "over" : "each over";
  return `${counted(sizes.groupCount, running + word)}, ${each} `
    + `${counted(sizes.groupSize, "element")}. ${scheme.affine
      ? `${sentence(there(scheme).join(" and "))}: shape ${tuple(sizes.affineShape)}.` : "No weight, no bias."}`;
}

function draw() {
  const sizes = sizesOf(state.scheme, state.shape);
  state.sizes = sizes;
  state.kept = false;
  const affine = Boolean(state.scheme.affine);
  if (!affine) state.word = "mean";
  for (const radio of document.querySelectorAll("[name=word]")) {
    radio.checked = radio.value === state.word;
    radio.disabled = radio.value === "weight" && !affine;
  }
  view.show({ sizes, word: state.word, values: valuesOf(state.shape) });
  field("facts").textContent = facts(sizes);
  field("formula").textContent = formula(sizes, there(state.scheme)).join("\n");
  const notes = [];
  if (view.sampled) notes.push("Dots stand for elements that are left out.");
  if (view.names && !view.few) notes.push("More groups than colours: one of them is lit.");
  field("note").textContent = notes.join(" ");
  describe(null);
  norms(sizes);
}

// The named norms of this shape; those with the same statistics are marked.
function norms(sizes) {
  const own = partition(sizes);
  const list = namedNorms(sizes.shape);
  field("norms").closest("fieldset").hidden = !list.length;
  const chips = list.map(({ name, text }) => {
    const scheme = readScheme(text);
    const same = scheme.center === sizes.scheme.center && sizes.scheme.statistics === "batch"
      && partition(sizesOf(scheme, sizes.shape)) === own;
    const radio = h("input", { type: "radio", name: "norm", value: text });
    radio.checked = text === sizes.scheme.text;
    return h("label", { class: same ? "chip same" : "chip" }, radio, h("span", {}, name,
      same ? h("i", { "aria-hidden": "true" }, " =") : null,
      same ? h("span", { class: "hidden" }, " (the same statistics)") : null));
  });
  // Numbers with many divisors: one list instead of a wall of them.
  const grouped = list.filter(({ name }) => name.startsWith("GroupNorm"));
  if (grouped.length > MOST_GROUPS) {
    const first = chips.findIndex((_, i) => list[i].name.startsWith("GroupNorm"));
    chips.splice(first, grouped.length, h("label", { class: "choice" }, "GroupNorm of ",
      h("select", { name: "groups" }, h("option", { value: "" }, "…"), ...grouped.map(({ name, text }) => h(
        "option", { value: text, selected: text === sizes.scheme.text },
        `${name.slice(10, -1)} groups`,
      )))));
  }
  const focused = document.activeElement?.name === "norm" ? document.activeElement.value : null;
  const listed = document.activeElement?.name === "groups";
  field("norms").replaceChildren(...chips);
  for (const radio of document.querySelectorAll("[name=norm]")) {
    if (radio.value === focused) radio.focus();
  }
  if (listed) document.querySelector("[name=groups]")?.focus();
}

// A norm as its constructor is written: one of those that are named at this shape.
function constructed(name, sizes) {
  const plain = name.replace(/\s+/g, "").replace(/^(torch\.)?(nn\.)?/, "")
    .replace(/^GroupNorm\((\d+),\d+\)$/, "GroupNorm($1)")
    .replace(/^(Batch|Instance)Norm[123]d\(\d+\)$/, "$1Norm").replace(/^LayerNorm2d\(\d+\)$/, "LayerNorm2d");
  const found = namedNorms(sizes).find((one) => one.name.replace(/\s+/g, "") === plain);
  if (found) return found.text;
  throw new ArgumentError("Here a norm is one of those named below, or a scheme in brackets. "
    + `'${name}' is none at this shape. Choose one, or write its scheme.`);
}

// Take over what was typed, or say what is wrong with it and leave the picture.
function typed() {
  const [scheme, shape, error] = [field("scheme"), field("shape"), field("error")];
  let culprit = scheme;
  try {
    const name = scheme.value.trim();
    if (/^\w+(\.\w+)*$/.test(name) && !Object.hasOwn(DATA.presets, name)) {
      throw new ArgumentError("A scheme has brackets, or is a preset's name. "
        + `There is no such preset as '${name}'.`);
    }
    const called = /^[A-Za-z_.]*Norm(2d|[123]d)?\s*\(/.test(name);
    let read = called ? null : readScheme(DATA.presets[name] ?? scheme.value);
    culprit = shape;
    const sizes = readShape(shape.value);
    culprit = scheme;
    read ??= readScheme(constructed(name, sizes));
    sizesOf(read, sizes);
    Object.assign(state, { scheme: read, shape: sizes });
    culprit = null;
  } catch (problem) {
    if (!(problem instanceof ArgumentError)) throw problem;
    error.textContent = problem.message;
  }
  if (!culprit) error.textContent = "";
  for (const input of [scheme, shape]) {
    input.setAttribute("aria-invalid", String(input === culprit));
  }
  if (!culprit) draw();
}

field("controls").addEventListener("submit", (event) => event.preventDefault());
field("controls").addEventListener("input", (event) => {
  const { name, value } = event.target;
  if (name === "norm" || (name === "groups" && value)) field("scheme").value = value;
  if (name === "word") {
    state.word = value;
    draw();
  } else {
    typed();
  }
});
field("reset").addEventListener("click", () => {
  field("scheme").value = DATA.text;
  field("shape").value = DATA.shape.join(", ");
  typed();
});
draw();
