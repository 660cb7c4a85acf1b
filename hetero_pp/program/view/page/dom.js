// Builds elements. All text of a run passes through text nodes or attributes here, never through markup.

const SVG_SPACE = "http://www.w3.org/2000/svg";
const LONGEST = 400; // characters of one text; names and messages of a run may have megabytes

// Returns the text, cut where it would hide everything else.
export function cut(text, length = LONGEST) {
  const whole = String(text);
  return whole.length > length ? whole.slice(0, length - 1) + "…" : whole;
}

// Makes a node from `tag.class.class`, attributes (which may be left out) and children, of which null is left out.
const maker = (create) => (name, ...rest) => {
  const [tag, ...classes] = name.split(".");
  const node = create(tag);
  const isPlain = rest[0] !== null && typeof rest[0] === "object" && !(rest[0] instanceof Node) && !Array.isArray(rest[0]);
  const attributes = isPlain ? rest.shift() : {};
  if (classes.length) node.setAttribute("class", classes.join(" "));
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "on") for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
    else node.setAttribute(key, value === true ? "" : cut(value, key === "d" ? Infinity : LONGEST));
  }
  for (const child of rest.flat(Infinity))
    if (child !== null && child !== undefined) node.append(child instanceof Node ? child : cut(child));
  return node;
};

export const el = maker((tag) => document.createElement(tag));
export const svg = maker((tag) => document.createElementNS(SVG_SPACE, tag));
export const byId = (id) => document.getElementById(id);

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

export const button = (label, title, press) =>
  el("button", { type: "button", title, "aria-label": title, on: { click: press } }, label);

export const textButton = (label, press, more = {}) =>
  el("button.link", { type: "button", ...more, on: { click: press } }, label);

// A list of choices {value: words}, of which one is chosen; `pick` is told the value.
export const selection = (about, choices, chosen, pick) =>
  el(
    "select",
    { "aria-label": about, on: { change: (event) => pick(event.target.value) } },
    Object.entries(choices).map(([value, label]) => el("option", { value, selected: value === chosen }, label)),
  );

// The square that explains a colour of a picture.
export const swatch = (name) => {
  const size = { width: 14, height: 14 };
  return svg("svg", { ...size, "aria-hidden": "true" }, svg(`rect.${name}`, size));
};

// A row of radio buttons; `pick` is told the value.
export const picker = (name, title, choices, chosen, pick) =>
  el(
    "fieldset.picker",
    el("legend", title),
    Object.entries(choices).map(([value, label]) => {
      const on = { change: () => pick(value) };
      return el("label", el("input", { type: "radio", name, value, checked: value === chosen, on }), el("span", label));
    }),
  );

// A table with a caption and column headers; the first cell of a row is its header.
export const table = (caption, columns, rows) =>
  el(
    "div.scroll",
    { tabindex: 0, role: "region", "aria-label": caption },
    el(
      "table",
      el("caption", caption),
      el("thead", el("tr", columns.map((column) => el("th", { scope: "col" }, column)))),
      el(
        "tbody",
        rows.map(([head, ...cells]) =>
          el("tr", el("th", { scope: "row" }, head ?? "–"), cells.map((cell) => el("td", cell ?? "–"))),
        ),
      ),
    ),
  );

// A <details> that fills itself when it is opened, and again when its picture changes while it is open.
export function behind(title, build) {
  const body = el("div");
  const node = el("details.behind", { on: { toggle: () => refresh() } }, el("summary", title), body);
  function refresh() {
    if (node.open) body.replaceChildren(build());
  }
  return { node, refresh };
}

export function facts(pairs) {
  const known = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return el("dl", known.map(([name, value]) => el("div", el("dt", name), el("dd", value))));
}
