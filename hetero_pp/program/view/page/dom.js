// Builds elements. All text of a run passes through text nodes or attributes here, never through markup.

const SVG_SPACE = "http://www.w3.org/2000/svg";
const LONGEST = 400; // characters of one text; names and messages of a run may have megabytes

// Returns the text, cut where it would hide everything else.
export function cut(text, length = LONGEST) {
  const whole = String(text);
  return whole.length > length ? whole.slice(0, length - 1) + "…" : whole;
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
    else node.setAttribute(name, value === true ? "" : cut(value, name === "d" ? Infinity : LONGEST));
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined) node.append(child instanceof Node ? child : cut(child));
  }
  return node;
}

export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG_SPACE, tag), attributes, children);
}

// Sets the text of a node unless it is there already, so that nothing is read out or drawn twice.
export function say(node, text) {
  const shown = cut(text);
  if (node.textContent !== shown) node.textContent = shown;
}

export function attribute(node, name, value, longest = LONGEST) {
  const text = cut(value, longest);
  if (node.getAttribute(name) !== text) node.setAttribute(name, text);
}

export function show(node, isShown) {
  if (node.hidden === isShown) node.hidden = !isShown;
}

// A table with a caption and column headers; the first cell of a row is its header.
export function table(caption, columns, rows) {
  return el(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
    el(
      "table",
      {},
      el("caption", {}, caption),
      el(
        "thead",
        {},
        el(
          "tr",
          {},
          columns.map((column) => el("th", { scope: "col" }, column)),
        ),
      ),
      el(
        "tbody",
        {},
        rows.map((cells) =>
          el(
            "tr",
            {},
            cells.map((cell, n) => el(n ? "td" : "th", n ? {} : { scope: "row" }, cell ?? "–")),
          ),
        ),
      ),
    ),
  );
}

// A <details> that fills itself when it is opened, and again when its picture changes while it is open.
export function behind(title, build) {
  const body = el("div");
  const node = el("details", { class: "behind", on: { toggle: () => refresh() } }, el("summary", {}, title), body);
  function refresh() {
    if (node.open) body.replaceChildren(build());
  }
  return { node, refresh };
}

export function facts(pairs) {
  const known = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return el(
    "dl",
    {},
    known.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))),
  );
}
