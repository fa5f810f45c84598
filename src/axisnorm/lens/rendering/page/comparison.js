// The page of a comparison: two norms over one tensor. What is pointed at in one lights up in both.

const field = (id) => document.getElementById(id);
const state = { word: "mean", kept: false };
const sides = ["a", "b"].map((name) => {
  const sizes = sizesOf(readScheme(DATA[name]), DATA.shape);
  const view = new TensorView({
    root: field(`tensor-${name}`), label: `The tensor under ${name}`,
    chosen: (index, stays) => choose(index, stays),
  });
  return { name, sizes, view };
});

function choose(index, stays) {
  if (stays) {
    const again = state.kept && index && String(index) === String(state.kept);
    state.kept = again || !index ? false : index;
  }
  const shown = index ?? (state.kept || null);
  for (const { view } of sides) view.light(shown);
  describe(shown);
}

const place = (numbers) => (numbers.length ? `[${numbers.join(", ")}]` : "");

function described({ sizes, view }, index) {
  const digits = digitsOf(sizes, index);
  const told = state.word === "mean" ? sizes.told : sizes.affine;
  if (state.word === "weight" && !sizes.scheme.affine) return "no weight, no bias";
  const number = numberOf(sizes, told, index);
  const along = place(told.map((i) => sizes.names[i]));
  const size = product(sizes.shape) / product(told.map((i) => sizes.expanded[i]));
  const what = state.word === "mean" ? "group" : "weight";
  return `${what} ${view.names.get(number)?.letter ?? number + 1}`
    + `${along ? `, ${along} = ${place(told.map((i) => digits[i]))}` : ""}, ${counted(size, "element")}`;
}

function describe(index) {
  const rows = index ? [["element", `x${place(index)}`],
    ...sides.map((side) => [side.name, described(side, index)])] : [];
  field("info").replaceChildren(...(rows.length
    ? rows.flatMap(([name, text]) => [h("dt", {}, name), h("dd", {}, text)])
    : [h("dd", { class: "hint" }, "Point at an element, or walk through the slices with the arrow "
      + "keys: its group lights up under both norms.")]));
  field("status").textContent = rows.slice(1).map((row) => row.join(": ")).join("; ");
}

function draw() {
  state.kept = false;
  for (const { name, sizes, view } of sides) {
    const affine = state.word === "mean" || sizes.scheme.affine;
    view.root.hidden = !affine;
    field(`none-${name}`).hidden = Boolean(affine);
    view.show({ sizes, word: state.word, boxes: sides.map((side) => side.sizes) });
  }
  const notes = [];
  if (sides.some(({ view }) => view.sampled)) {
    notes.push("Dots stand for elements that are left out.");
  }
  if (sides.some(({ view }) => view.names && !view.few)) {
    notes.push("Where there are more groups than colours, one of them is lit.");
  }
  field("note").textContent = notes.join(" ");
  describe(null);
}

field("controls").addEventListener("submit", (event) => event.preventDefault());
field("controls").addEventListener("input", (event) => {
  state.word = event.target.value;
  draw();
});
draw();
