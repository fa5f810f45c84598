// The notation of schemes, and which elements belong together: the same rules, the same messages
// and the same numbers as scheme.py and explain.py. The tests hold one against the other.

const FIELDS = {
  affine: "", center: true, scale: "auto", correction: 0, eps: 1e-5, eps_placement: "variance",
  weight_offset: 0, rounding: "once", statistics: "batch", momentum: 0.1, running_correction: 1,
};
const CHOICES = {
  scale: ["auto", "std", "l2", "var", "sqrt_std"],
  eps_placement: ["variance", "std", "max"],
  rounding: ["once", "before_affine"],
  statistics: ["batch", "running"],
};
const NUMBERS = ["correction", "eps", "weight_offset", "momentum", "running_correction"];
const MOST_ELEMENTS = 2 ** 44;

class ArgumentError extends Error {}

// A message of three lines with a caret under the culprit.
function caret(text, position, rule, remedy = "") {
  const below = `${rule}.\n  ${text}\n  ${" ".repeat(position)}^`;
  return new ArgumentError(remedy ? `${below}\n${remedy}` : below);
}

const isName = (token) => /^[A-Za-z_][A-Za-z0-9_]*$/.test(token);
const product = (numbers) => numbers.reduce((a, b) => a * b, 1);
const quoted = (word) => `'${word}'`;

// ---------------------------------------------------------------------------------------------
// Numbers as Python writes them

function exponential(mantissa, exponent) {
  const size = String(Math.abs(exponent)).padStart(2, "0");
  return `${mantissa}e${exponent < 0 ? "-" : "+"}${size}`;
}

// repr of a float, without ".0" at whole numbers.
function represented(value) {
  if (value === null) return "none";
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "nan" : value > 0 ? "inf" : "-inf";
  const [mantissa, exponent] = value.toExponential().split("e");
  const power = Number(exponent);
  return value !== 0 && (power < -4 || power >= 16) ? exponential(mantissa, power) : String(value);
}

// The format "g": so many significant digits, no zeros at the end.
function general(value, digits = 6) {
  if (!Number.isFinite(value)) return represented(value);
  if (value === 0) return "0";
  const [mantissa, exponent] = value.toExponential(digits - 1).split("e");
  const power = Number(exponent);
  const short = (text) => (text.includes(".") ? text.replace(/\.?0+$/, "") : text);
  if (power < -4 || power >= digits) return exponential(short(mantissa), power);
  return short(value.toFixed(Math.max(0, digits - 1 - power)));
}

function tuple(numbers) {
  return numbers.length === 1 ? `(${numbers[0]},)` : `(${numbers.join(", ")})`;
}

// ---------------------------------------------------------------------------------------------
// The text

const TOKEN =
  /[ \t\n\r\f\v]*(?:(\.\.\.)|([A-Za-z_][A-Za-z0-9_]*)|([0-9]+)|([[\]()=])|([^ \t\n\r\f\v]))/uy;

class Parser {
  constructor(text, end) {
    this.text = text;
    this.end = end;
    this.tokens = [];
    this.at = 0;
    this.seen = new Set();
    const source = text.slice(0, end);
    TOKEN.lastIndex = 0;
    for (let match = TOKEN.exec(source); match; match = TOKEN.exec(source)) {
      const position = TOKEN.lastIndex;
      const token = match.slice(1).find((group) => group !== undefined);
      if (match[5] !== undefined) {
        this.fail(position - token.length, "Axes are named by words, '...', brackets and sizes");
      }
      this.tokens.push([token, position - token.length]);
    }
  }

  fail(position, rule, remedy = "") { throw caret(this.text, position, rule, remedy); }
  peek() { return this.at < this.tokens.length ? this.tokens[this.at][0] : ""; }
  here() { return this.at < this.tokens.length ? this.tokens[this.at][1] : this.end; }
  take() { return this.tokens[this.at++]; }

  axes() {
    const found = [];
    while (this.peek()) {
      if (this.peek() === "[") found.push(...this.bracket((reduced) => [this.atom(reduced)]));
      else found.push(this.atom(false));
    }
    if (!found.some((axis) => axis.some((part) => part.reduced))) {
      this.fail(this.end, "The elements that share a mean stand in brackets",
        "Put at least one axis in brackets, as in '... [d]'.");
    }
    return found;
  }

  bracket(inner) {
    const [, opened] = this.take();
    const found = [];
    while (this.peek() !== "]") {
      if (!this.peek()) this.fail(opened, "A bracket must be closed", "Add ']'.");
      if (this.peek() === "[") this.nested();
      found.push(...inner(true));
    }
    this.take();
    if (!found.length) {
      this.fail(opened, "A bracket must not be empty", "Name the axes that share a mean.");
    }
    return found;
  }

  nested() { this.fail(this.here(), "Brackets are never nested", "All brackets are one set."); }

  atom(reduced) {
    const token = this.peek();
    const position = this.here();
    if (token === "(") return this.parentheses(reduced);
    if (token === "...") {
      this.take();
      return [this.once("...", position, null, reduced)];
    }
    if (!isName(token)) this.fail(position, "An axis is a name, '...' or parts in parentheses");
    this.take();
    if (this.peek() === "=") {
      this.fail(this.here(), "Sizes stand in parentheses", `Write '(${token}=...)' for this axis.`);
    }
    return [this.once(token, position, null, reduced)];
  }

  parentheses(reduced) {
    const [, opened] = this.take();
    const found = [];
    while (this.peek() !== ")") {
      if (!this.peek() || this.peek() === "]") {
        this.fail(opened, "A parenthesis must be closed", "Add ')'.");
      }
      if (this.peek() === "(") {
        this.fail(this.here(), "Parentheses are never nested", "List all parts in one.");
      }
      if (this.peek() === "[") {
        if (reduced) this.nested();
        found.push(...this.bracket((shared) => [this.size(shared)]));
      } else {
        found.push(this.size(reduced));
      }
    }
    this.take();
    if (!found.length) {
      this.fail(opened, "Parentheses must not be empty", "Name the parts of the axis.");
    }
    return found;
  }

  size(reduced) {
    const token = this.peek();
    const position = this.here();
    if (token === "...") {
      this.fail(position, "'...' never stands in parentheses", "It means whole axes.");
    }
    if (!isName(token)) {
      this.fail(position, "A part of an axis is a name, with '=size' if it is known");
    }
    this.take();
    let number = null;
    if (this.peek() === "=") {
      this.take();
      if (!/^[0-9]{1,18}$/.test(this.peek())) {
        this.fail(this.here(), "A size is a whole number", `Write '${token}=4'.`);
      }
      number = Number(this.take()[0]);
    }
    return this.once(token, position, number, reduced);
  }

  once(name, position, size, reduced) {
    if (this.seen.has(name)) {
      this.fail(position, `Each name stands once, and '${name}' came before`, "Rename one.");
    }
    this.seen.add(name);
    return { name, size, reduced };
  }
}

function bracketed(words) {
  let text = "";
  let inside = false;
  for (const [word, reduced] of words) {
    if (inside && !reduced) text += "]";
    if (text) text += " ";
    if (reduced && !inside) text += "[";
    text += word;
    inside = reduced;
  }
  return inside ? `${text}]` : text;
}

function formatAxes(axes) {
  return bracketed(axes.map((axis) => {
    const whole = axis.every((part) => part.reduced);
    if (axis.length === 1 && axis[0].size === null) return [axis[0].name, whole];
    const parts = axis.map((part) => [
      part.size === null ? part.name : `${part.name}=${part.size}`, part.reduced && !whole,
    ]);
    return [`(${bracketed(parts)})`, whole];
  }));
}

function readValue(key, value) {
  if (key === "affine") return value;
  const word = value.toLowerCase();
  if (key === "center") return { true: true, false: false }[word];
  if (key in CHOICES) return word;
  if (word === "none" && (key === "eps" || key === "momentum")) return null;
  if (/^[+-]?(inf|infinity|nan)$/.test(word)) {
    return word.endsWith("nan") ? NaN : word.startsWith("-") ? -Infinity : Infinity;
  }
  return /^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?$/.test(word) ? Number(word) : undefined;
}

// The scheme that a text says. Throws an ArgumentError that points at the culprit.
function readScheme(text) {
  const [head, ...rest] = text.split(";");
  const scheme = { ...FIELDS };
  const seen = new Set();
  let position = head.length;
  for (const item of rest) {
    const start = position + 1 + item.length - item.trimStart().length;
    position += 1 + item.length;
    if (!item.trim()) continue;
    const equals = item.indexOf("=");
    const key = (equals < 0 ? item : item.slice(0, equals)).trim();
    if (!Object.hasOwn(FIELDS, key) || equals < 0 || seen.has(key)) {
      throw caret(text, start, "After ';' come fields as key=value, each once",
        `The fields are ${Object.keys(FIELDS).join(", ")}.`);
    }
    seen.add(key);
    const said = item.slice(equals + 1).trim();
    const value = readValue(key, said);
    if (value === undefined) throw caret(text, start, `'${said}' is not a value of ${key}`);
    scheme[key] = value;
  }
  scheme.parsed = new Parser(text, head.length).axes();
  scheme.axes = formatAxes(scheme.parsed);
  for (const [name, allowed] of Object.entries(CHOICES)) {
    if (!allowed.includes(scheme[name])) {
      throw new ArgumentError(`${name} is one of ${allowed.map(quoted).join(", ")}. `
        + `${quoted(scheme[name])} came. Choose one of them.`);
    }
  }
  for (const name of NUMBERS) {
    if (scheme[name] !== null && !Number.isFinite(scheme[name])) {
      throw new ArgumentError(`${name} is a finite number. ${represented(scheme[name])} came. `
        + "Give a finite number.");
    }
  }
  if (scheme.center && scheme.scale === "std") scheme.scale = "auto";
  scheme.affine = checkAffine(scheme);
  scheme.text = writeScheme(scheme);
  return scheme;
}

function checkAffine(scheme) {
  const names = scheme.parsed.flat().map((part) => part.name);
  const words = scheme.affine.split(/\s+/).filter(Boolean);
  let where = -1;
  for (const word of words) {
    if (word === "..." || !names.includes(word)) {
      const named = names.filter((name) => name !== "...").map(quoted).join(", ");
      throw new ArgumentError(`affine names axes of the scheme. '${word}' is none of `
        + `'${scheme.axes}'. Use ${named || "a named axis"}.`);
    }
    if (names.indexOf(word) <= where) {
      const sorted = [...new Set(words)].sort((a, b) => names.indexOf(a) - names.indexOf(b));
      throw new ArgumentError("affine names axes once and in the tensor's order. "
        + `'${scheme.affine}' came for '${scheme.axes}'. Write '${sorted.join(" ")}'.`);
    }
    where = names.indexOf(word);
  }
  return words.join(" ");
}

function writeScheme(scheme) {
  const words = [scheme.axes];
  for (const [key, usual] of Object.entries(FIELDS)) {
    const value = scheme[key];
    if (value === usual) continue;
    words.push(`${key}=${typeof value === "number" ? represented(value) : String(value ?? "none")}`);
  }
  return words.join("; ");
}

// The sizes of a shape such as 2,3,4 or (2, 3, 4).
function readShape(text) {
  const came = text.trim();
  const inner = came.replace(/^[()[\] ]+|[()[\] ]+$/g, "");
  if (!/^([0-9]+(\s*[,x]\s*|\s+|$))*$/.test(inner)) {
    throw new ArgumentError(
      `A shape is a list of whole numbers. '${came}' came. Write it as 2,3,4.`);
  }
  const shape = (inner.match(/[0-9]+/g) ?? []).map(Number);
  if (product(shape.map((size) => Math.max(size, 1))) > MOST_ELEMENTS) {
    throw new ArgumentError(`A shape may have up to 2**44 elements. '${came}' came. `
      + "Give the shape of a tensor that a machine can hold.");
  }
  return shape;
}

// ---------------------------------------------------------------------------------------------
// What a scheme means for a shape

function sizesOf(scheme, shape) {
  const named = scheme.parsed.filter((axis) => axis[0].name !== "...").length;
  const extra = shape.length - named;
  const open = named < scheme.parsed.length;
  if (extra < 0 || (extra && !open)) {
    const given = shape.length === 1 ? `${shape[0]},` : shape.join(", ");
    throw new ArgumentError(`'${scheme.axes}' names ${open ? "at least " : ""}${named} `
      + `${named === 1 ? "axis" : "axes"}. The input has ${shape.length}, shape (${given}). `
      + "Name every axis of the input, or use '...' for the rest.");
  }
  const axes = scheme.parsed.flatMap((axis) => (axis[0].name !== "..." ? [axis]
    : Array.from({ length: extra }, (_, i) => [{ ...axis[0], name: `...${i + 1}` }])));
  const expanded = axes.flatMap((axis, i) => split(scheme, axis, shape[i], shape));
  const parts = axes.flat();
  const words = scheme.affine.split(" ");
  const all = parts.map((_, i) => i);
  const kept = all.filter((i) => !parts[i].reduced);
  const affine = all.filter((i) => words.includes(parts[i].name));
  const running = kept.filter((i) => affine.includes(i));
  // Running statistics are kept along the channels alone.
  const told = scheme.statistics !== "running" ? kept : running.length ? running : kept;
  let next = 0;
  const dimensions = axes.map((axis) => axis.map(() => next++));
  const shared = product(all.filter((i) => !kept.includes(i)).map((i) => expanded[i]));
  if (scheme.correction > 0 && shared !== 0 && shared <= scheme.correction) {
    throw new ArgumentError(`The variance's divisor n - correction is positive. ${shared} elements `
      + `share a mean in shape ${tuple(shape)} under '${scheme.text}'. `
      + "Use a smaller correction or larger groups.");
  }
  return {
    scheme, shape, axes, parts, expanded, dimensions, told, affine,
    names: partNames(parts),
    statisticsShape: told.map((i) => expanded[i]),
    groupCount: product(told.map((i) => expanded[i])),
    groupSize: product(all.filter((i) => !told.includes(i)).map((i) => expanded[i])),
    affineShape: dimensions.map((own) => own.filter((i) => affine.includes(i)))
      .filter((own) => own.length).map((own) => product(own.map((i) => expanded[i]))),
  };
}

function split(scheme, axis, size, shape) {
  const unknown = axis.filter((part) => part.size === null);
  const known = product(axis.filter((part) => part.size !== null).map((part) => part.size));
  if (unknown.length > 1) {
    throw new ArgumentError("In parentheses at most one size may be unknown. "
      + `${unknown.map((part) => quoted(part.name)).join(" and ")} are in '${scheme.text}'. `
      + `Write '${unknown[0].name}=...'.`);
  }
  if (unknown.length ? !known || size % known : known !== size) {
    const wanted = unknown.length ? `a multiple of ${known}` : String(known);
    throw new ArgumentError(`'${formatAxes([axis])}' in '${scheme.text}' is an axis of ${wanted} `
      + `elements. It has ${size} in shape ${tuple(shape)}. Change the sizes, or the input.`);
  }
  return axis.map((part) => part.size ?? size / known);
}

// A short name for every part; the axes of '...' are called i, j, k, ...
function partNames(parts) {
  const taken = new Set(parts.map((part) => part.name));
  const free = [..."ijklmopqrtuvxyz"].filter((letter) => !taken.has(letter));
  for (let number = 1; free.length < parts.length; number += 1) {
    if (!taken.has(`i${number}`)) free.push(`i${number}`);
  }
  return parts.map((part) => (part.name.startsWith("...") ? free.shift() : part.name));
}

// The place of an element along every dimension, split axes as several.
function digitsOf(sizes, index) {
  const digits = [];
  sizes.dimensions.forEach((own, axis) => {
    let place = index[axis];
    let weight = product(own.map((i) => sizes.expanded[i]));
    for (const i of own) {
      weight /= sizes.expanded[i];
      digits.push(Math.floor(place / weight));
      place %= weight;
    }
  });
  return digits;
}

// The number of an element's group, row-major over the dimensions that tell groups apart.
function numberOf(sizes, told, index) {
  const digits = digitsOf(sizes, index);
  return told.reduce((number, i) => number * sizes.expanded[i] + digits[i], 0);
}

// The numbers of all elements, in the tensor's order.
function groupIndex(sizes, told = sizes.told) {
  const found = [];
  const index = sizes.shape.map(() => 0);
  for (let left = product(sizes.shape); left > 0; left -= 1) {
    found.push(numberOf(sizes, told, index));
    for (let axis = index.length - 1; axis >= 0; axis -= 1) {
      index[axis] += 1;
      if (index[axis] < sizes.shape[axis]) break;
      index[axis] = 0;
    }
  }
  return found;
}

// The normal form of a partition: two are the same sets of elements iff these are equal.
function partition(sizes, told = sizes.told) {
  return JSON.stringify(sizes.dimensions.map((own) => {
    const factors = [];
    for (const i of own) {
      const factor = [sizes.expanded[i], told.includes(i)];
      const last = factors.at(-1);
      if (factor[0] === 1) continue;
      if (last && last[1] === factor[1]) last[0] *= factor[0];
      else factors.push(factor);
    }
    return factors;
  }));
}

// Which of weight and bias there may be: RMSNorm is not used with a bias.
function parametersOf(scheme) {
  if (!scheme.affine) return [];
  return scheme.center ? ["weight", "bias"] : ["weight"];
}

// The formula with this shape's numbers, one equation a line.
function formula(sizes, parameters = parametersOf(sizes.scheme)) {
  const { scheme, names, told } = sizes;
  const at = (symbol, dimensions) => (dimensions.length
    ? `${symbol}[${dimensions.map((i) => names[i]).join(", ")}]` : symbol);
  const mean = at("mean", told);
  const variance = at("var", told);
  const shared = names.filter((_, i) => !told.includes(i)).join(", ");
  const over = shared ? ` over ${shared}` : "";
  const eps = scheme.eps === null ? "eps" : general(scheme.eps);
  const spread = scheme.center || scheme.scale === "std" ? variance : at("meansquare", told);
  const root = {
    l2: `sqrt(${at("sumsquare", told)}`, var: `(${variance}`, sqrt_std: `sqrt(sqrt(${variance})`,
  }[scheme.scale] ?? `sqrt(${spread}`;
  const plus = eps.startsWith("-") ? `- ${eps.slice(1)}` : `+ ${eps}`;
  const below = {
    variance: `${root} ${plus})`, std: `(${root}) ${plus})`, max: `max(${root}), ${eps})`,
  }[scheme.eps_placement];
  let result = scheme.center ? `(x - ${mean}) / ${below}` : `x / ${below}`;
  if (scheme.affine) {
    const weight = at("weight", sizes.affine);
    const offset = scheme.weight_offset ? `(${general(scheme.weight_offset)} + ${weight})` : weight;
    if (scheme.rounding === "before_affine") result = `round(${result})`;
    if (parameters.includes("weight")) result += ` * ${offset}`;
    if (parameters.includes("bias")) result += ` + ${at("bias", sizes.affine)}`;
  }
  const lines = [`y = ${result}`];
  if (scheme.statistics === "running") {
    lines.push(`${mean}, ${variance}: running averages of earlier batches, not of this one`);
    return lines;
  }
  const divisor = (correction) => {
    if (sizes.groupSize === 0) return correction ? `(n - ${general(correction)})` : "n";
    return represented(sizes.groupSize - correction);
  };
  if (scheme.center || scheme.scale === "std") {
    lines.push(`${mean} = 1/${divisor(0)} * sum of x${over}`,
      `${variance} = 1/${divisor(scheme.correction)} * sum of (x - ${mean})^2${over}`);
  } else if (scheme.scale === "l2") {
    lines.push(`${at("sumsquare", told)} = sum of x^2${over}`);
  } else {
    lines.push(`${spread} = 1/${divisor(scheme.correction)} * sum of x^2${over}`);
  }
  if (scheme.eps === null) {
    lines.push("eps = the machine epsilon of the type that is computed in (float32: 1.19e-07)");
  }
  return lines;
}

// ---------------------------------------------------------------------------------------------
// The named norms that take a tensor of this shape

function divisors(number) {
  const found = [];
  for (let d = 1; d * d <= number; d += 1) {
    if (number % d === 0) found.push(d, number / d);
  }
  return [...new Set(found)].sort((a, b) => a - b);
}

function namedNorms(shape) {
  const ndim = shape.length;
  const found = [];
  if (shape.includes(0)) return found;
  const usual = { 1: ["d"], 2: ["s", "d"], 3: ["c", "h", "w"] };
  for (let count = 1; count <= ndim; count += 1) {
    const sizes = shape.slice(ndim - count);
    const names = (usual[count] ?? sizes.map((_, i) => `d${i + 1}`)).join(" ");
    const said = count === 1 ? sizes[0] : tuple(sizes);
    found.push([`LayerNorm(${said})`, `... [${names}]; affine=${names}`]);
    if (count === 1) {
      found.push([`RMSNorm(${said})`, "... [d]; affine=d; center=false; eps=none"]);
    }
  }
  if (ndim >= 2) found.push(["BatchNorm", "[n] c [...]; affine=c"]);
  if (ndim === 3) found.push(["batch norm of the picture for text", "[b] s [d]; affine=s"]);
  if (ndim >= 3) {
    found.push(["InstanceNorm", "n c [...]; affine=c"]);
    found.push(["LayerNorm2d", "n [c] ...; affine=c; eps=1e-6"]);
  }
  if (ndim >= 2) {
    for (const groups of divisors(shape[1])) {
      found.push([`GroupNorm(${groups})`, `n (g=${groups} [c]) [...]; affine=g c`]);
    }
  }
  return found.map(([name, text]) => ({ name, text: readScheme(text).text }));
}
