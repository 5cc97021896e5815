"use strict";

// The sort key of a cell: its leading number, else its text; empty cells come last.
function key(row, column) {
  const text = row.cells[column].textContent.trim();
  const number = Number.parseFloat(text);
  return { text, number, empty: text === "" || text === "-" };
}

function compare(a, b) {
  const numbers = Number.isFinite(a.number) && Number.isFinite(b.number);
  if (numbers && a.number !== b.number) return a.number - b.number;
  if (Number.isFinite(a.number) !== Number.isFinite(b.number)) return Number.isFinite(a.number) ? -1 : 1;
  return a.text.localeCompare(b.text, "en", { numeric: true });
}

function sort(head) {
  const table = head.closest("table");
  const rising = head.getAttribute("aria-sort") !== "ascending";
  for (const other of table.querySelectorAll("th")) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", rising ? "ascending" : "descending");
  const body = table.tBodies[0];
  const rows = [...body.rows].map((row) => ({ row, key: key(row, head.cellIndex) }));
  rows.sort((a, b) => {
    if (a.key.empty !== b.key.empty) return a.key.empty ? 1 : -1;
    return rising ? compare(a.key, b.key) : compare(b.key, a.key);
  });
  body.append(...rows.map(({ row }) => row));
}

for (const button of document.querySelectorAll("thead button")) {
  button.addEventListener("click", () => sort(button.closest("th")));
}
