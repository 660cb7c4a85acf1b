// Shapes of the picture of a topology.

import { svg } from "./dom.js";

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
