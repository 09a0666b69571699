"use strict";

// A sample is shown as text only, never as markup: what a model wrote may well be HTML.
const samples = JSON.parse(document.getElementById("samples").textContent);
const byName = new Map(samples.map((sample) => [sample.name, sample]));
const panel = document.getElementById("sample");

function fact(name, value) {
  const row = document.createElement("div");
  row.append(Object.assign(document.createElement("dt"), { textContent: name }));
  row.append(Object.assign(document.createElement("dd"), { textContent: value }));
  return row;
}

// From nothing at probability 1 to full red at 0.01 and below.
function redness(logProb) {
  return Math.min(1, Math.max(0, -logProb / Math.log(100))) * 0.75;
}

function piece([text, logProbs, trained]) {
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
  return span;
}

function show(name) {
  const sample = byName.get(name);
  if (sample === undefined) {
    return;
  }
  document.getElementById("sample-title").textContent = `Sample ${sample.name}`;
  document.getElementById("facts").replaceChildren(...Object.entries(sample.facts).map(([key, value]) => fact(key, value)));
  document.getElementById("prompt").textContent = sample.prompt;
  document.getElementById("response").replaceChildren(...sample.response.map(piece));
  panel.hidden = false;
  panel.scrollTop = 0;
  history.replaceState(null, "", `#${encodeURIComponent(name)}`);
}

document.getElementById("list").addEventListener("click", (event) => {
  const row = event.target.closest("tbody tr");
  if (row === null || !row.cells.length) {
    return;
  }
  document.querySelectorAll("tr.chosen").forEach((other) => other.classList.remove("chosen"));
  row.classList.add("chosen");
  show(row.cells[0].textContent.trim());
});

if (location.hash) {
  show(decodeURIComponent(location.hash.slice(1)));
} else if (samples.length) {
  show(samples[0].name);
}
