// Forms that show some of the rows of a table: by kind, by code, by words that stand in them.

for (const form of document.querySelectorAll("form[data-rows]")) {
  const rows = [...document.getElementById(form.dataset.rows).tBodies[0].rows];
  const boxes = [...form.querySelectorAll("[name=kind]")];
  const [code, words, status] = ["[name=code]", "[name=words]", "[role=status]"]
    .map((selector) => form.querySelector(selector));
  const show = () => {
    const kinds = boxes.filter((box) => box.checked).map((box) => box.value);
    const wanted = words ? words.value.toLowerCase().split(/\s+/).filter(Boolean) : [];
    let count = 0;
    for (const row of rows) {
      const fits = (!boxes.length || kinds.includes(row.dataset.kind))
        && (!code?.value || code.value === row.dataset.code)
        && wanted.every((word) => row.dataset.words.includes(word));
      row.hidden = !fits;
      count += fits;
    }
    status.textContent = count === rows.length ? "" : `${count} of ${rows.length} rows shown.`;
  };
  form.addEventListener("input", show);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.hidden = false;
}

// On paper nothing can be opened.
addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("details:not([open])")) {
    details.open = true;
    addEventListener("afterprint", () => { details.open = false; }, { once: true });
  }
});
