// Tables that are sorted by the buttons in their heads: upwards, downwards, as they came.

for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const came = [...body.rows];
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    head.querySelector("button")?.addEventListener("click", () => {
      const next = { none: "ascending", ascending: "descending", descending: "none" };
      const order = next[head.getAttribute("aria-sort") ?? "none"];
      for (const other of heads) other.removeAttribute("aria-sort");
      if (order !== "none") head.setAttribute("aria-sort", order);
      body.append(...(order === "none" ? came : sorted(came, column, order === "ascending" ? 1 : -1)));
    });
  });
}

function sorted(rows, column, sign) {
  const key = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent.trim();
  const compare = (a, b) => {
    if (a === "" || b === "") return (a === "") - (b === "");  // what is not known stands last
    const [x, y] = [Number(a), Number(b)];
    return sign * (Number.isNaN(x) || Number.isNaN(y)
      ? a.localeCompare(b, "en", { numeric: true }) : x - y);
  };
  return [...rows].sort((one, other) => compare(key(one), key(other)));
}
