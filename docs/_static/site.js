// Mends what the theme lacks for keyboards and screen readers. Makes the tables of the pages of results sortable, and filters claims by their verdict.
// A row without a first cell belongs to the row above it: both move and hide together.
"use strict";

const header = (table) => Array.from(table.querySelectorAll("thead th"));
const text = (row, column) => row.cells[column].textContent.trim();

function groups(table) {
  const found = [];
  for (const row of table.tBodies[0].rows) {
    if (text(row, 0) === "" && found.length) found.at(-1).push(row);
    else found.push([row]);
  }
  return found;
}

function compare(one, other) {
  const [a, b] = [one, other].map((value) => Number.parseFloat(value.replace(/,/g, "")));
  if (Number.isNaN(a) || Number.isNaN(b)) return one.localeCompare(other, "en", { numeric: true });
  return a - b;
}

function sort(table, column, cell) {
  const descending = cell.getAttribute("aria-sort") === "ascending";
  const filled = groups(table).filter(([row]) => text(row, column) !== "");
  const empty = groups(table).filter(([row]) => text(row, column) === "");
  filled.sort(([a], [b]) => compare(text(a, column), text(b, column)) * (descending ? -1 : 1));
  table.tBodies[0].append(...[...filled, ...empty].flat());
  for (const other of header(table)) other.removeAttribute("aria-sort");
  cell.setAttribute("aria-sort", descending ? "descending" : "ascending");
}

function makeSortable(table) {
  header(table).forEach((cell, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...cell.childNodes);
    button.addEventListener("click", () => sort(table, column, cell));
    cell.append(button);
  });
}

function addFilter(tables, before) {
  const claims = tables.flatMap((table) => {
    const column = header(table).findIndex((cell) => cell.textContent.trim() === "verdict");
    return column < 0 ? [] : groups(table).map((rows) => ({ rows, verdict: text(rows[0], column) }));
  });
  const verdicts = [...new Set(claims.map((claim) => claim.verdict))].sort();
  if (verdicts.length < 2) return;
  const set = document.createElement("fieldset");
  const legend = document.createElement("legend");
  set.className = "verdicts";
  legend.textContent = "Show claims with the verdict";
  set.append(legend);
  const boxes = verdicts.map((verdict) => {
    const label = document.createElement("label");
    const box = document.createElement("input");
    box.type = "checkbox";
    box.checked = true;
    box.value = verdict;
    label.append(box, ` ${verdict} (${claims.filter((claim) => claim.verdict === verdict).length})`);
    set.append(label);
    return box;
  });
  set.addEventListener("change", () => {
    const shown = new Set(boxes.filter((box) => box.checked).map((box) => box.value));
    for (const { rows, verdict } of claims) for (const row of rows) row.hidden = !shown.has(verdict);
  });
  before.before(set);
}

for (const caption of document.querySelectorAll(".caption[role=heading]")) caption.setAttribute("aria-level", "2");
for (const block of document.querySelectorAll("pre")) block.tabIndex = 0;

const isOfResults = /\/results\/[\w-]+(\.html|\/)?$/.test(location.pathname);
const tables = Array.from(document.querySelectorAll("article table.docutils"));
if (isOfResults && tables.length) {
  tables.forEach(makeSortable);
  addFilter(tables, document.querySelector("article h2").closest("section"));
}
