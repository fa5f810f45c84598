// Schemes on shapes, drawn small where the page has left room for them.

for (const place of document.querySelectorAll("[data-drawn]")) {
  const { text, shape } = DATA.drawn[Number(place.dataset.drawn)];
  const { cell = 12, labelled } = place.dataset;
  place.append(miniature(sizesOf(readScheme(text), shape), Number(cell), labelled !== undefined));
}
