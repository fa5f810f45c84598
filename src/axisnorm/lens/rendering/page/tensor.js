// One tensor as a box and as slices. Elements of one group have one letter; pointing at an element,
// or walking to it with the keyboard, lights up its whole group.

function h(tag, attributes = {}, ...children) {
  const svg = ["svg", "g", "polygon", "path", "circle", "text", "rect", "line", "title"];
  const element = svg.includes(tag) ? document.createElementNS("http://www.w3.org/2000/svg", tag)
    : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

function* letters(capital = true) {
  const alphabet = [...(capital ? "ABCDEFGHIJKLMNOPQRSTUVWXYZ" : "abcdefghijklmnopqrstuvwxyz")];
  for (let words = [""]; ; ) {
    words = words.flatMap((word) => alphabet.map((letter) => word + letter));
    yield* words;
  }
}

const MOST_NAMES = 6;  // a side of more parts is called by its first and its last

const counted = (number, word) =>
  `${number.toLocaleString("en")} ${word}${number === 1 ? "" : "s"}`;

// ---------------------------------------------------------------------------------------------
// The sample that is drawn. null stands for the elements that are left out.

const range = (count) => Array.from({ length: count }, (_, i) => i);

function sample(size, first, whole) {
  return size <= whole ? range(size) : [...range(first), null, size - 1];
}

function splitSample(parts, limit) {
  const total = product(parts);
  if (total <= limit) return range(total);
  for (const first of [2, 1]) {
    let found = [0];
    let step = 1;
    const fits = [...parts].reverse().every((size, i) => {
      const inner = found;
      found = sample(size, i ? 1 : first, i ? 2 : first + 1).flatMap((block) => (block === null
        ? [null] : inner.map((tick) => (tick === null ? null : tick + block * step))));
      step *= size;
      return found.length <= limit + 4;
    });
    if (fits) return found;
  }
  return sample(total, Math.max(limit - 2, 1), limit);  // too many parts for all of their ends
}

// For each axis the indices that stand in the slices.
function slicesSample(sizes, wide) {
  const ndim = sizes.shape.length;
  return sizes.shape.map((size, axis) => {
    if (axis < ndim - 4) return size === 1 ? [0] : [0, null];
    let [first, whole] = [1, 3];
    if (axis === ndim - 1) [first, whole] = ndim < 3 ? [7, 12] : [wide ? 3 : 2, wide ? 6 : 4];
    else if (axis === ndim - 2) [first, whole] = ndim < 3 ? [4, 8] : [3, 6];
    // A split axis shows two neighbours, which may share, and the end, which may not.
    else if (sizes.axes[axis].length > 1) [first, whole] = [2, 4];
    return sample(size, first, whole);
  });
}

// The three sides of the box. Of more than three axes, neighbours of one role are one side.
function boxOf(all) {
  const { shape } = all[0];
  const ndim = shape.length;
  const roles = all.flatMap((sizes) => [sizes.told, sizes.affine].map((told) => sizes.dimensions.map(
    (own) => JSON.stringify(own.filter((i) => sizes.expanded[i] !== 1).map((i) => told.includes(i))),
  )));
  let sides = shape.map((_, axis) => [axis]);
  if (ndim > 3) {
    const runs = [2, 1, 0].map((start) => range(ndim - 2).map((i) => start + i));
    const breaks = (run) => roles.reduce((sum, of) => sum
      + run.slice(1).filter((axis) => of[axis] !== of[axis - 1]).length, 0);
    const run = runs.reduce((best, next) => (breaks(next) < breaks(best) ? next : best));
    sides = [...shape.keys()].filter((axis) => !run.includes(axis)).map((axis) => [axis]);
    sides = [...sides, run].sort((a, b) => a[0] - b[0]);
  }
  const parts = shape.map((_, axis) => all
    .map((sizes) => sizes.dimensions[axis].map((i) => sizes.expanded[i]).filter((n) => n !== 1))
    .reduce((best, next) => (next.length > best.length ? next : best)));
  const side = (axes, first, whole) => {
    const own = axes.flatMap((axis) => parts[axis]);
    const mixed = axes.length > 1 && roles.some((of) => axes.some((a) => of[a] !== of[axes[0]]));
    const ticks = own.length > 1 && (mixed || axes.length === 1) ? splitSample(own, whole)
      : sample(product(axes.map((axis) => shape[axis])), first, whole);
    const offsets = [0];
    for (const tick of ticks) offsets.push(offsets.at(-1) + (tick === null ? 0.62 : 1));
    return { axes, ticks, offsets, length: offsets.at(-1) };
  };
  const none = { axes: [], ticks: [0], offsets: [0, 1], length: 1 };
  if (sides.length < 3) {
    return {
      depth: null,
      rows: sides.length === 2 ? side(sides[0], 4, 6) : none,
      columns: sides.length ? side(sides.at(-1), 6, 10) : none,
    };
  }
  const down = sides[2].length > 1 ? 2 : 1;
  return {
    depth: side(sides[0], 2, 4), rows: side(sides[down], 3, 5), columns: side(sides[3 - down], 4, 8),
  };
}

function elementAt(shape, box, ticks) {
  const index = shape.map(() => 0);
  for (const [name, tick] of Object.entries(ticks)) {
    if (tick === null) return null;
    let rest = tick;
    for (const axis of [...(box[name]?.axes ?? [])].reverse()) {
      index[axis] = rest % shape[axis];
      rest = Math.floor(rest / shape[axis]);
    }
  }
  return index;
}

// ---------------------------------------------------------------------------------------------
// The view

class TensorView {
  // `word` is "mean" or "weight": which partition is shown. `chosen` is told of elements that are
  // pointed at, with whether they stay.
  constructor({ root, label, chosen }) {
    this.label = label;
    this.chosen = chosen;
    this.root = root;
    this.box = h("div", { class: "box" });
    this.slices = h("div", { class: "slices", role: "group" });
    root.classList.add("tensor");
    root.replaceChildren(this.box, this.slices);
    this.keys = this.keys.bind(this);
    for (const place of [this.box, this.slices]) {
      place.addEventListener("pointerover", (event) => this.pointed(event, false));
      place.addEventListener("click", (event) => this.pointed(event, true));
      place.addEventListener("pointerleave", () => this.chosen(null, false));
    }
    this.slices.addEventListener("focusin", (event) => this.entered(event));
    this.slices.addEventListener("focusout", () => this.chosen(null, false));
    this.slices.addEventListener("keydown", this.keys);
  }

  pointed(event, stays) {
    const cell = event.target.closest("[data-index]");
    if (cell) this.chosen(cell.dataset.index.split(",").filter(Boolean).map(Number), stays);
  }

  // One cell at a time is in the order of the Tab key: the one that had the focus last.
  entered(event) {
    this.slices.querySelector('[tabindex="0"]')?.setAttribute("tabindex", "-1");
    event.target.setAttribute("tabindex", "0");
    this.pointed(event, false);
  }

  show({ sizes, word, boxes = [sizes], values = null }) {
    Object.assign(this, { sizes, word, values });
    this.told = word === "mean" ? sizes.told : sizes.affine;
    this.cells = [];
    if (sizes.shape.includes(0)) {
      const empty = sizes.dimensions.filter((_, axis) => sizes.shape[axis] === 0)
        .map((own) => own.map((i) => sizes.names[i]).join(" "));
      this.box.replaceChildren();
      this.slices.replaceChildren(
        h("p", {}, `Nothing to draw: axis ${empty.join(", ")} has no elements.`));
      this.sampled = false;
      return;
    }
    const box = boxOf(boxes);
    const drawn = slicesSample(sizes, sizes.shape.length <= 3);
    this.names = this.named(box, drawn);
    this.few = this.names.size <= FILLS.length;
    this.sampled = [box.depth, box.rows, box.columns].some((side) => side?.ticks.includes(null))
      || drawn.some((indices) => indices.includes(null));
    // Of one or two axes the slice is the whole picture.
    this.box.replaceChildren(...(box.depth ? [this.drawBox(box)] : []));
    this.slices.replaceChildren(...this.drawSlices(drawn));
    this.slices.setAttribute("aria-label", `${this.label}: arrow keys walk from element to element, `
      + "Page Up and Page Down from slice to slice, Enter keeps a group lit, Escape lets it go");
    this.light(null);
  }

  named(box, drawn) {
    const found = new Set();
    const add = (index) => found.add(numberOf(this.sizes, this.told, index));
    for (const depth of box.depth?.ticks ?? [0]) {
      for (const rows of box.rows.ticks) {
        for (const columns of box.columns.ticks) {
          const index = elementAt(this.sizes.shape, box, { depth, rows, columns });
          if (index) add(index);
        }
      }
    }
    const walk = (index, rest) => {
      if (!rest.length) add(index);
      else for (const i of rest[0]) if (i !== null) walk([...index, i], rest.slice(1));
    };
    walk([], drawn);
    const next = letters(this.word === "mean");
    return new Map([...found].sort((a, b) => a - b).map((number, place) => [
      number, { letter: next.next().value, fill: FILLS[place % FILLS.length] }]));
  }

  // What a cell of either picture carries.
  marks(index) {
    const number = numberOf(this.sizes, this.told, index);
    const style = this.few ? `--fill: ${this.names.get(number).fill}` : null;
    return {
      number, letter: this.names.get(number).letter,
      attributes: { "data-index": index.join(","), "data-group": number, style },
    };
  }

  where(index) {
    const { dimensions, names } = this.sizes;
    return dimensions.map((own, axis) => `${own.map((i) => names[i]).join(" ")} ${index[axis]}`)
      .join(", ");
  }

  // The box, as in the picture of Wu and He: its front is the first slice.
  drawBox(box, { labelled = true, cell = 30 } = {}) {
    const [dx, dy] = [0.58, -0.44];
    const { rows, columns, depth } = box;
    const text = (side, arrow) => `${this.sideText(side)} ${arrow}`;
    const wide = (string) => (string ? clipped(string).length * 6.7 + 8 : 0);
    const far = depth ? depth.length * cell : 0;
    const across = columns.length * cell;
    const tall = rows.length * cell;
    const labels = !labelled ? { rows: "", columns: "", depth: "" } : {
      rows: rows.axes.length ? text(rows, "↓") : "",
      columns: columns.axes.length ? text(columns, "→") : "",
      depth: depth ? text(depth, "↗") : "",
    };
    const left = Math.max(labels.rows ? wide(labels.rows) : 2, wide(labels.columns) / 2 - across / 2);
    const right = Math.max(far * dx, labels.depth ? (far * dx) / 2 + wide(labels.depth) + 6 : 2,
      wide(labels.columns) / 2 - across / 2);
    const up = -far * dy + 3;
    const [width, height] = [left + across + right + 2, up + tall + (labels.columns ? 24 : 3)];
    const svg = h("svg", {
      viewBox: `0 0 ${width.toFixed(1)} ${height.toFixed(1)}`, width: width.toFixed(0),
      role: "img", "aria-label": [`${this.label} as a box`, ...Object.values(labels)
        .filter(Boolean).map((label) => label.slice(0, -2))].join(", "),
    });
    const at = (u, v, w) => [left + u * cell + w * cell * dx, up + v * cell + w * cell * dy];
    const face = (name, downs, acrosses, place, element, basis) => {
      const numbers = new Map();
      const group = h("g", { class: `face ${name}` });
      const marks = [];
      downs.ticks.forEach((down, r) => acrosses.ticks.forEach((over, c) => {
        const index = element(down, over);
        const [r0, r1, c0, c1] = [downs.offsets[r], downs.offsets[r + 1], acrosses.offsets[c],
          acrosses.offsets[c + 1]];
        const corners = [place(c0, r0), place(c1, r0), place(c1, r1), place(c0, r1)];
        const points = corners.map((corner) => corner.map((n) => n.toFixed(1)).join(",")).join(" ");
        if (!index) {
          group.append(h("polygon", { points, class: "gap" }));
          return;
        }
        const { number, letter, attributes } = this.marks(index);
        numbers.set(`${r},${c}`, number);
        const polygon = h("polygon", { points, class: "cell", ...attributes });
        const [x, y] = place((c0 + c1) / 2, (r0 + r1) / 2).map((n) => n.toFixed(1));
        const glyph = h("text", {
          transform: `matrix(${basis.join(" ")} ${x} ${y})`, dy: "0.36em", class: "letter",
          "font-size": (cell * (letter.length > 1 ? 11 : 15)) / 30,
        }, letter);
        this.cells.push(polygon, glyph);
        Object.assign(glyph.dataset, { group: number });
        group.append(polygon);
        marks.push(glyph);
      }));
      const line = (a, b) => `M${a.map((n) => n.toFixed(1))}L${b.map((n) => n.toFixed(1))}`;
      const [bottom, end] = [downs.length, acrosses.length];
      let path = `M${place(0, 0)}L${place(end, 0)}L${place(end, bottom)}L${place(0, bottom)}Z`;
      for (const [key, number] of numbers) {
        const [r, c] = key.split(",").map(Number);
        const differs = (other) => numbers.has(other) && numbers.get(other) !== number;
        const [d, a] = [downs.offsets, acrosses.offsets];
        if (differs(`${r},${c + 1}`)) path += line(place(a[c + 1], d[r]), place(a[c + 1], d[r + 1]));
        if (differs(`${r + 1},${c}`)) path += line(place(a[c], d[r + 1]), place(a[c + 1], d[r + 1]));
      }
      for (const [side, along] of [[downs, false], [acrosses, true]]) {
        const middle = (along ? downs : acrosses).length / 2;
        side.ticks.forEach((tick, i) => {
          if (tick !== null) return;
          const center = (side.offsets[i] + side.offsets[i + 1]) / 2;
          for (const step of [-0.16, 0, 0.16]) {
            const [cx, cy] = along ? place(center + step, middle) : place(middle, center + step);
            group.append(h("circle", { cx: cx.toFixed(1), cy: cy.toFixed(1), r: (1.6 * cell) / 30, class: "dot" }));
          }
        });
      }
      group.append(...marks, h("path", { d: path, class: "edges" }));
      svg.append(group);
    };
    const { shape } = this.sizes;
    const element = (ticks) => elementAt(shape, box, ticks);
    if (depth) {
      const back = { ...depth, ticks: [...depth.ticks].reverse() };
      back.offsets = [...depth.offsets].reverse().map((offset) => depth.length - offset);
      face("top", back, columns, (u, w) => at(u, 0, depth.length - w),
        (d, c) => element({ depth: d, rows: rows.ticks[0], columns: c }), [1, 0, -dx, -dy]);
      face("right", rows, depth, (w, v) => at(columns.length, v, w),
        (r, d) => element({ depth: d, rows: r, columns: columns.ticks.at(-1) }), [dx, dy, 0, 1]);
    }
    face("front", rows, columns, (u, v) => at(u, v, 0),
      (r, c) => element({ depth: depth?.ticks[0] ?? 0, rows: r, columns: c }), [1, 0, 0, 1]);
    const label = (x, y, anchor, string) => string
      && svg.append(h("text", { x, y, "text-anchor": anchor, class: "label" }, clipped(string)));
    label(left - 8, up + tall / 2 + 4, "end", labels.rows);
    label(left + across / 2, up + tall + 17, "middle", labels.columns);
    label(left + across + (far * dx) / 2 + 10, up + tall + (far * dy) / 2 + 6, "start", labels.depth);
    return svg;
  }

  // The notation of a side's axes with their sizes: [h w] = 5 x 7.
  sideText(side) {
    const { dimensions, names, expanded } = this.sizes;
    const all = side.axes.flatMap((axis) => dimensions[axis]);
    const count = (number) => number.toLocaleString("en");
    if (all.length > MOST_NAMES) {
      return `${names[all[0]]} ${names[all[1]]} ... ${names[all.at(-1)]} = ${
        count(product(all.map((i) => expanded[i])))}`;
    }
    let text = "";
    let inside = false;
    for (const axis of side.axes) {
      const own = dimensions[axis];
      own.forEach((i, place) => {
        const shared = this.word === "mean" && !this.told.includes(i);
        if (inside && !shared) text += "]";
        if (text) text += " ";
        if (own.length > 1 && place === 0) text += "(";
        text += (shared && !inside ? "[" : "") + names[i];
        inside = shared;
        if (own.length > 1 && place === own.length - 1) {
          text += inside ? "])" : ")";
          inside = false;
        }
      });
    }
    return `${text}${inside ? "]" : ""} = ${all.map((i) => count(expanded[i])).join(" x ")}`;
  }

  // The slices: the last two axes are rows and columns.
  drawSlices(drawn) {
    const ndim = drawn.length;
    const [rows, columns] = [ndim > 1 ? drawn[ndim - 2] : [0], ndim ? drawn[ndim - 1] : [0]];
    const leads = [[]];
    for (const indices of drawn.slice(0, Math.max(ndim - 2, 0))) {
      leads.push(...leads.splice(0).flatMap((lead) => (lead.includes(null) ? [lead]
        : indices.map((i) => [...lead, i]))));
    }
    const said = (axis) => this.sizes.dimensions[axis].map((i) => this.sizes.names[i]).join(" ");
    let first = true;
    // Slices that differ along the axis before the last two stand in one line.
    const lines = new Map();
    for (const lead of leads) {
      const key = String(lead.slice(0, Math.max(ndim - 3, 0)).map((i) => i ?? "left out"));
      if (!lines.has(key)) lines.set(key, []);
      lines.get(key).push(lead);
    }
    const slice = (lead) => {
      const name = lead.map((i, axis) => `${said(axis)} = ${i}`).join(", ");
      const table = h("table", { role: "grid", "aria-label": name || this.label });
      if (name) table.append(h("caption", {}, name));
      const head = h("tr", {}, ndim > 1 ? h("td", { class: "corner", "aria-hidden": "true" }) : null);
      if (ndim) {
        for (const column of columns) head.append(this.heading(column, said(ndim - 1), "col"));
        table.append(h("thead", {}, head));
      }
      const body = h("tbody");
      const grid = rows.map((row) => {
        const line = h("tr", {}, ndim > 1 ? this.heading(row, said(ndim - 2), "row") : null);
        const cells = columns.map((column) => {
          if (row === null || column === null) {
            const cell = h("td", { class: "gap", "aria-hidden": "true" }, row === null ? "⋮" : "…");
            line.append(cell);
            return null;
          }
          const place = ndim > 1 ? [...lead, row, column] : ndim ? [column] : [];
          const cell = this.cell(place, first);
          first = false;
          line.append(cell);
          return cell;
        });
        body.append(line);
        return cells;
      });
      edges(grid);
      table.append(body);
      return table;
    };
    const dots = () => h("span", { class: "more", "aria-hidden": "true" }, "…");
    const left = (line) => line?.[0].slice(0, Math.max(ndim - 3, 0)).includes(null);
    return [...lines.values()].filter((line, i, all) => !(left(line) && left(all[i - 1]))).map((line) => {
      if (left(line)) return dots();
      return h("div", { class: "line" },
        ...line.map((lead) => (lead.includes(null) ? dots() : slice(lead))));
    });
  }

  heading(index, name, scope) {
    if (index === null) return h("td", { class: "gap", "aria-hidden": "true" }, "");
    return h("th", { scope, "aria-label": `${name} ${index}` }, String(index));
  }

  cell(index, first) {
    const { letter, attributes } = this.marks(index);
    const value = this.values?.(index);
    const shared = this.word === "mean" ? "group" : "weight";
    const label = `${this.where(index)}${index.length ? ": " : ""}${shared} ${letter}`
      + `${value === undefined ? "" : `, value ${general(value, 4)}`}`;
    const cell = h("td", {
      class: "cell", role: "gridcell", tabindex: first ? 0 : -1, "aria-label": label, ...attributes,
    }, h("b", {}, letter), value === undefined ? null : h("small", {}, general(value, 3)));
    this.cells.push(cell);
    return cell;
  }

  // Light up the group of an element; with none, that of the first where groups have no colours.
  light(index) {
    if (!this.cells.length) return;
    const number = index ? numberOf(this.sizes, this.told, index) : null;
    const lit = number ?? (this.few ? null : this.names.keys().next().value);
    this.root.classList.toggle("lit", lit !== null);
    this.root.classList.toggle("many", !this.few);
    const same = index?.join(",");
    for (const cell of this.cells) {
      cell.classList.toggle("on", lit !== null && Number(cell.dataset.group) === lit);
      cell.classList.toggle("here", same !== undefined && cell.dataset.index === same);
    }
  }

  keys(event) {
    const cell = event.target.closest("td.cell");
    if (!cell) return;
    const table = cell.closest("table");
    const rows = [...table.tBodies[0].rows].map((row) => [...row.querySelectorAll("td.cell")])
      .filter((row) => row.length);
    const r = rows.findIndex((row) => row.includes(cell));
    const c = rows[r].indexOf(cell);
    const tables = [...this.slices.querySelectorAll("table")];
    const slice = (step) => {
      const other = tables[tables.indexOf(table) + step];
      return other && [...other.tBodies[0].rows].map((row) => [...row.querySelectorAll("td.cell")])
        .filter((row) => row.length)[r]?.[c];
    };
    const moves = {
      ArrowLeft: () => rows[r][c - 1], ArrowRight: () => rows[r][c + 1],
      ArrowUp: () => rows[r - 1]?.[c], ArrowDown: () => rows[r + 1]?.[c],
      Home: () => rows[r][0], End: () => rows[r].at(-1),
      PageUp: () => slice(-1), PageDown: () => slice(1),
    };
    if (event.key === "Escape") this.chosen(null, true);
    else if (event.key === "Enter" || event.key === " ") this.pointed(event, true);
    else if (event.key in moves) {
      const next = moves[event.key]();
      if (next) next.focus();
    } else return;
    event.preventDefault();
  }
}

// A box, without names in a table.
function miniature(sizes, cell, labelled) {
  const view = Object.assign(Object.create(TensorView.prototype), {
    root: h("span", { class: "tensor mini" }), label: "Which elements share their statistics",
    sizes, word: "mean", told: sizes.told, cells: [],
  });
  const box = boxOf([sizes]);
  view.names = view.named(box, sizes.shape.map(() => [0]));
  view.few = view.names.size <= FILLS.length;
  view.root.append(h("span", { class: "box" }, view.drawBox(box, { labelled, cell })));
  view.light(null);
  return view.root;
}

// Long names would leave the box no room.
function clipped(label) {
  return label.length > 44 ? `${label.slice(0, 21)}…${label.slice(-22)}` : label;
}

// Thick edges around the slice and between neighbours of different groups.
function edges(grid) {
  const differs = (cell, other) => other === undefined
    || Boolean(other && other.dataset.group !== cell.dataset.group);
  grid.forEach((row, r) => row.forEach((cell, c) => {
    if (!cell) return;
    cell.classList.toggle("edge-left", c === 0);
    cell.classList.toggle("edge-above", r === 0);
    cell.classList.toggle("edge-right", differs(cell, row[c + 1]));
    cell.classList.toggle("edge-below", differs(cell, grid[r + 1] ? grid[r + 1][c] : undefined));
  }));
}
