// A picture that zooms and pans, by mouse and by keyboard, and whose items are reached with the arrow keys.

import { button, el, svg } from "./dom.js";

const STEP = 1.3;
const DEEPEST = 8;
const MARGIN = 4;
const DRAG_PIXELS = 4;
const ABOUT =
  "Picture of the topology. Arrow keys go from item to item, Enter opens one, plus and minus zoom, Shift and arrow keys " +
  "move the picture.";
const TURNS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

export class ZoomedPicture {
  constructor(holder, choose) {
    this.choose = choose;
    const on = {
      keydown: (event) => this.onKey(event),
      pointerdown: (event) => this.onDrag(event),
      click: (event) => this.onClick(event),
      focusin: (event) => this.rove(event.target.closest("[data-item]")),
    };
    this.node = svg("svg.zoomed", { role: "group", "aria-label": ABOUT, on });
    this.node.addEventListener("wheel", (event) => this.onWheel(event), { passive: false });
    this.buttons = el(
      "div.buttons",
      button("−", "Zoom out", () => this.zoom(1 / STEP)),
      button("+", "Zoom in", () => this.zoom(STEP)),
      button("Fit", "Show the whole picture", () => this.fit()),
    );
    holder.append(this.node);
  }

  // Shows new content that is `width` by `height` large. The zoom stays if the size did.
  show(width, height, content) {
    const isNew = width !== this.width || height !== this.height;
    const focused = this.node.contains(document.activeElement) ? document.activeElement.dataset.item : null;
    [this.width, this.height] = [width, height];
    this.node.replaceChildren(...content);
    if (isNew) this.fit();
    this.rove(this.item(focused) ?? this.node.querySelector("[data-item]"));
    if (focused) this.item(focused)?.focus();
  }

  item(name) {
    return name ? [...this.node.querySelectorAll("[data-item]")].find((node) => node.dataset.item === name) : null;
  }

  fit() {
    this.box = { x: -MARGIN, y: -MARGIN, width: this.width + 2 * MARGIN, height: this.height + 2 * MARGIN };
    const room = this.node.parentElement.clientWidth || this.box.width;
    const scale = Math.min(1.1, room / this.box.width);
    this.node.style.height = `${Math.ceil(this.box.height * scale)}px`;
    this.apply();
  }

  apply() {
    const { x, y, width, height } = this.box;
    this.node.setAttribute("viewBox", `${x} ${y} ${width} ${height}`);
  }

  // Zooms by `factor` around a point, given as shares of the width and height.
  zoom(factor, [across, down] = [0.5, 0.5]) {
    const width = Math.min(Math.max(this.box.width / factor, this.width / DEEPEST), this.width + 2 * MARGIN);
    const height = (width / this.box.width) * this.box.height;
    const x = this.box.x + (this.box.width - width) * across;
    this.box = { x, y: this.box.y + (this.box.height - height) * down, width, height };
    this.apply();
  }

  mark(name) {
    for (const node of this.node.querySelectorAll(".chosen")) node.classList.remove("chosen");
    this.item(name)?.classList.add("chosen");
  }

  // One item is in the tab order; arrow keys reach the others.
  rove(node) {
    if (!node || node.tabIndex === 0) return;
    for (const other of this.node.querySelectorAll('[data-item][tabindex="0"]')) other.setAttribute("tabindex", -1);
    if (node.getAttribute("role") === "button") node.setAttribute("tabindex", 0);
  }

  onKey(event) {
    const turn = TURNS[event.key];
    const current = event.target.closest("[data-item]");
    if (turn && event.shiftKey) {
      this.box.x += 0.15 * turn[0] * this.box.width;
      this.box.y += 0.15 * turn[1] * this.box.height;
      this.apply();
    } else if (turn && current) this.nearest(current, turn)?.focus();
    else if (event.key === "+" || event.key === "=") this.zoom(STEP);
    else if (event.key === "-") this.zoom(1 / STEP);
    else if (event.key === "0") this.fit();
    else if ((event.key === "Enter" || event.key === " ") && current) this.choose(current.dataset.item);
    else return;
    event.preventDefault();
  }

  // Returns the item that is nearest in a direction; sideways distance counts double.
  nearest(from, [dx, dy]) {
    const middle = (node) => {
      const box = (node.querySelector(".card, .hit, text") ?? node).getBoundingClientRect();
      return [box.x + box.width / 2, box.y + box.height / 2];
    };
    const [x, y] = middle(from);
    let best = null;
    for (const node of this.node.querySelectorAll('[data-item][role="button"]')) {
      const [toX, toY] = middle(node);
      const ahead = (toX - x) * dx + (toY - y) * dy;
      const aside = Math.abs((toX - x) * dy) + Math.abs((toY - y) * dx);
      if (node === from || ahead < 2) continue;
      const distance = ahead + 2 * aside;
      if (!best || distance < best.distance) best = { node, distance };
    }
    return best?.node;
  }

  onWheel(event) {
    if (!event.ctrlKey && !event.metaKey) return; // the page scrolls
    event.preventDefault();
    const box = this.node.getBoundingClientRect();
    const at = [(event.clientX - box.x) / box.width, (event.clientY - box.y) / box.height];
    this.zoom(event.deltaY < 0 ? STEP : 1 / STEP, at);
  }

  onDrag(down) {
    if (down.button !== 0 || this.box.width >= this.width) return; // nothing is hidden, so there is nothing to drag
    const start = { ...this.box };
    const scale = this.box.width / this.node.clientWidth;
    const move = (event) => {
      this.box.x = start.x - (event.clientX - down.clientX) * scale;
      this.box.y = start.y - (event.clientY - down.clientY) * scale;
      this.dragged ||= Math.hypot(event.clientX - down.clientX, event.clientY - down.clientY) > DRAG_PIXELS;
      this.apply();
    };
    const up = () => {
      window.removeEventListener("pointermove", move);
      window.removeEventListener("pointerup", up);
    };
    window.addEventListener("pointermove", move);
    window.addEventListener("pointerup", up);
  }

  onClick(event) {
    const isDrag = this.dragged;
    this.dragged = false;
    const item = event.target.closest("[data-item]");
    if (!isDrag && item) this.choose(item.dataset.item);
  }
}
