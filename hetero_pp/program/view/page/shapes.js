// Shapes of the picture of a topology.

import { cut, svg } from "./dom.js";

export const rect = (box, name, radius = 8) =>
  svg("rect", { x: box.x, y: box.y, width: box.width, height: box.height, rx: radius, class: name });
export const text = (x, y, name, words = "", anchor = "start") =>
  svg("text", { x, y, class: name, "text-anchor": anchor }, words);
// An item that is reached with the arrow keys.
export const button = (item, label) => ({
  role: "button",
  tabindex: -1,
  "data-item": item,
  "aria-label": label,
  class: "item",
});

// Writes words into a text of the picture, cut to `room`. A text that is not shown yet is measured when it is written
// again.
export function fit(node, words, room) {
  const whole = cut(words);
  if (node.whole === whole && node.room === room) return;
  node.textContent = whole;
  const length = whole ? node.getComputedTextLength() : room;
  if (!length) return;
  Object.assign(node, { whole, room });
  for (let kept = whole.length - 1; kept > 0 && node.getComputedTextLength() > room; kept -= 1)
    node.textContent = `${whole.slice(0, kept).trimEnd()}…`;
}
