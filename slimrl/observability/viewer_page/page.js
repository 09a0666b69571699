"use strict";

// A sample is shown as text only, never as markup: what a model wrote may well be HTML.
const samples = JSON.parse(document.getElementById("samples").textContent);
const pictures = JSON.parse(document.getElementById("all-pictures").textContent);
const byName = new Map(samples.map((sample) => [sample.name, sample]));
const panel = document.getElementById("sample");

function fact(name, value) {
  const row = document.createElement("div");
  row.append(Object.assign(document.createElement("dt"), { textContent: name }));
  row.append(Object.assign(document.createElement("dd"), { textContent: value }));
  return row;
}

function picture([caption, number]) {
  const figure = document.createElement("figure");
  figure.append(Object.assign(document.createElement("img"), { src: pictures[number], alt: caption }));
  figure.append(Object.assign(document.createElement("figcaption"), { textContent: caption }));
  return figure;
}

// From nothing at probability 1 to full red at 0.01 and below.
function redness(logProb) {
  return Math.min(1, Math.max(0, -logProb / Math.log(100))) * 0.75;
}

function note(text, style) {
  return Object.assign(document.createElement("span"), { textContent: text, className: style });
}

function piece([text, logProbs, trained, version]) {
  const span = document.createElement("span");
  span.textContent = text;
  if (logProbs.length) {
    const least = Math.min(...logProbs);
    span.style.backgroundColor = `rgb(220 38 38 / ${redness(least).toFixed(3)})`;
    span.title = logProbs.map((value) => `log-probability ${value.toFixed(4)}, probability ${Math.exp(value).toFixed(4)}`).join("\n");
  }
  if (!trained) {
    span.className = "untrained";
    span.title += "\nnot trained on";
  }
  return version === undefined ? [span] : [note(version || "none", "version"), span];
}

function show(name) {
  const sample = byName.get(name);
  if (sample === undefined) {
    return;
  }
  document.getElementById("sample-title").textContent = `Sample ${sample.name}`;
  document.getElementById("facts").replaceChildren(...Object.entries(sample.facts).map(([key, value]) => fact(key, value)));
  document.getElementById("prompt").textContent = sample.prompt;
  document.getElementById("pictures").replaceChildren(...sample.pictures.map(picture));
  document.getElementById("response").replaceChildren(...sample.response.flatMap(piece));
  if (sample.truncated) {
    document.getElementById("response").append(note(" … cut off at the longest response", "cut"));
  }
  document.getElementById("of-versions").hidden = !sample.response.some((entry) => entry.length > 3);
  panel.hidden = false;
  panel.scrollTop = 0;
  history.replaceState(null, "", `#${encodeURIComponent(name)}`);
}

function rowsShown() {
  return [...document.querySelectorAll("#rollouts tbody tr")].filter((row) => row.cells.length > 1);
}

function nameOf(row) {
  return row.cells[0].textContent.trim();
}

function mark(chosen) {
  document.querySelectorAll("tr.chosen").forEach((row) => row.classList.remove("chosen"));
  if (chosen !== undefined) {
    chosen.classList.add("chosen");
    chosen.scrollIntoView({ block: "nearest" });
  }
}

function choose(row) {
  mark(row);
  show(nameOf(row));
}

document.getElementById("list").addEventListener("click", (event) => {
  const row = event.target.closest("#rollouts tbody tr");
  if (row !== null && row.cells.length > 1) {
    choose(row);
  }
});

document.addEventListener("keydown", (event) => {
  const step = { ArrowUp: -1, ArrowDown: 1 }[event.key];
  if (step === undefined || event.target.closest("select")) {
    return;
  }
  const rows = rowsShown();
  const row = rows[rows.findIndex((other) => other.classList.contains("chosen")) + step];
  if (row !== undefined) {
    choose(row);
    event.preventDefault();
  }
});

// All words of the search must be in a sample, anywhere: the table itself holds only the ends of long texts.
const find = document.getElementById("find");
const texts = new Map();

function textOf(name, columns) {
  if (!texts.has(name)) {
    const { prompt, response } = byName.get(name);
    texts.set(name, [...columns, prompt, response.map(([text]) => text).join("")].join("\n").toLowerCase());
  }
  return texts.get(name);
}

const library = Object.keys(window).find((name) => name.startsWith("_itables_"));
window[library].then(({ jQuery }) => {
  jQuery.fn.dataTable.ext.search.push((settings, columns) => {
    const words = find.value.toLowerCase().split(/\s+/).filter(Boolean);
    return words.length === 0 || words.every((word) => textOf(columns[0], columns).includes(word));
  });
  jQuery("#list").on("draw.dt", () => {
    const shown = document.getElementById("sample-title").textContent.replace(/^Sample /, "");
    const row = rowsShown().find((other) => nameOf(other) === shown);
    if (row !== undefined) {
      row.classList.add("chosen");
    }
  });
  find.addEventListener("input", () => jQuery("#rollouts").DataTable().draw());
});

if (location.hash) {
  show(decodeURIComponent(location.hash.slice(1)));
} else if (samples.length) {
  show(samples[0].name);
}
