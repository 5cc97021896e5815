"use strict";

// The sort key of a cell: its leading number, else its text. Empty cells come last.
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

// Charts: a picture is a Vega-Lite specification, drawn at the width and in the colours of the page.
const { theme, widest, letter, swatch } = JSON.parse(document.getElementById("setup").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const form = document.querySelector("#answer form");
const drawn = new Map(); // promises of the views of figures

// Unpacks Vega, Vega-Lite and Vega-Embed, which the page embeds compressed.
async function unpack() {
  const data = Uint8Array.from(atob(document.getElementById("library").textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([data]).stream().pipeThrough(new DecompressionStream("gzip"));
  Function(await new Response(stream).text())();
}
const library = unpack();

// The colour of a CSS custom property such as --ink in the current theme.
function colour(name) {
  const probe = document.body.appendChild(document.createElement("i"));
  probe.style.color = `var(${name})`;
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

// The same as ``fitted`` in plot.py.
function fit(picture, width) {
  const facts = picture.usermeta;
  const left = Math.min(facts.left, Math.floor(widest * width));
  const panel = (n) => Math.floor((width - left - picture.spacing * (n - 1)) / n);
  let columns = facts.columns;
  while (columns > 1 && panel(columns) < facts.least) columns -= 1;
  picture.columns = columns;
  picture.spec.width = panel(columns);
  picture.config = JSON.parse(theme.replace(/"(--\w+)"/g, (_, name) => `"${colour(name)}"`));
  picture.config.header.labelLimit = panel(columns) + picture.spacing / 2;
  picture.config.axisYBand = { labelLimit: left - 8 };
  picture.config.legend.columns = Math.max(1, Math.floor(width / letter / (facts.letters + swatch)));
  picture.config.font = getComputedStyle(document.body).fontFamily;
}

async function view(figure) {
  const picture = JSON.parse(figure.querySelector("script").textContent);
  const box = figure.querySelector(".plot");
  fit(picture, box.clientWidth);
  delete picture.title; // the caption shows it
  for (const param of picture.params ?? []) param.value = form.elements[param.name].value;
  await library;
  return (await vegaEmbed(box, picture, { actions: false, renderer: "svg" })).view;
}

function draw(figure) {
  drawn.set(figure, view(figure));
}

// Show the chosen case. If it was not measured, show the measured case that agrees with most filters.
async function choose(changed) {
  const figure = document.querySelector("#answer figure");
  const records = (await drawn.get(figure)).data("records");
  const every = form.elements.peer.options[0].value;
  const wanted = Object.fromEntries(new FormData(form));
  const agrees = (row, name) => wanted[name] === every || row[name === "peer" ? "name" : name] === wanted[name];
  const score = (row) => Object.keys(wanted).filter((name) => agrees(row, name)).length;
  const rows = records.filter((row) => !row.kind && agrees(row, changed));
  const best = rows.reduce((a, b) => (score(b) > score(a) ? b : a));
  for (const name of Object.keys(wanted)) if (name !== "peer") form.elements[name].value = best[name];
  if (!agrees(best, "peer")) form.elements.peer.value = every;
  draw(figure);
}

function unfold(study) {
  for (const figure of study.querySelectorAll("figure")) if (study.open && !drawn.has(figure)) draw(figure);
}

function reveal() {
  const target = document.getElementById(location.hash.slice(1));
  if (target?.matches("details")) target.open = true;
}

for (const study of document.querySelectorAll(".study")) study.addEventListener("toggle", () => unfold(study));
addEventListener("hashchange", reveal);
reveal();
if (form) {
  form.reset(); // browsers keep choices when a page is reloaded
  form.addEventListener("change", (event) => choose(event.target.name));
  draw(document.querySelector("#answer figure"));
}
dark.addEventListener("change", () => [...drawn.keys()].forEach(draw));
let width = innerWidth;
addEventListener("resize", () => {
  if (innerWidth !== width) [...drawn.keys()].forEach(draw);
  width = innerWidth;
});
