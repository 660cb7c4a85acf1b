// The links of a topology: lines that are as thick as they are busy, with their rates and capacities.

import { attribute, cut, say, svg, table } from "./dom.js";
import { between } from "./layout.js";
import { capacity, percent, rate } from "./words.js";

// ---- shapes of the picture ----

export const rect = (box, name, rx = 8) => svg(`rect.${name}`, { x: box.x, y: box.y, width: box.width, height: box.height, rx });
export const text = (x, y, name, words = "", anchor = "start") =>
  svg(["text", ...name.split(" ")].filter(Boolean).join("."), { x, y, "text-anchor": anchor }, words);

// An item that is reached with the arrow keys.
export const itemButton = (item, label) => ({ role: "button", tabindex: -1, "data-item": item, "aria-label": label });

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

// ---- links ----

// Width of a line that is busy for this share of the time.
const stroke = (busy, size) => (size === "small" ? 1 : 1.5) + (size === "small" ? 2.5 : 5) * Math.min(1, busy ?? 0);

// Draws both ways of a connection and three lines of words for each; returns [node, update(ways, label)].
function connection({ x1, y1, x2, y2, isHorizontal }, size, item, limits) {
  const off = size === "full" ? 6 : size === "medium" ? 5 : 3;
  const [dx, dy] = isHorizontal ? [0, off] : [off, 0];
  const arrow = { "marker-end": "url(#arrow)" };
  const there = svg("line.way", { x1: x1 - dx, y1: y1 - dy, x2: x2 - dx, y2: y2 - dy, ...arrow });
  const back = svg("line.way", { x1: x2 + dx, y1: y2 + dy, x2: x1 + dx, y2: y1 + dy, ...arrow });
  const [x, y] = [(x1 + x2) / 2, (y1 + y2) / 2];
  const room = Math.hypot(x2 - x1, y2 - y1);
  const lines = room > 100 ? 2 : room > 30 ? 1 : 0;
  let words = [];
  if (isHorizontal) words = [-13, -26, -39, 22, 35, 48].map((down) => text(x, y + down, "small halo", "", "middle"));
  else if (size !== "small")
    words = [
      ...[-10, 4, 18].map((down) => text(x - 14, y + down, "small halo", "", "end")),
      ...[-10, 4, 18].map((down) => text(x + 14, y + down, "small halo")),
    ];
  const tip = svg("title");
  const node = svg("g.item", itemButton(item, ""), tip, svg("line.hit", { x1, y1, x2, y2 }), there, back, words);
  const update = (ways, label) => {
    [there, back].forEach((line, n) => {
      attribute(line, "stroke-width", stroke(ways[n]?.busy, size).toFixed(1));
      const share = ways[n]?.busy == null ? "" : percent(ways[n].busy);
      const speed = [ways[n]?.rate == null ? "" : rate(ways[n].rate), share].filter(Boolean).join(" · ");
      const capacity = limits[n] == null ? "" : `of ${rate(limits[n])}`;
      const late = ways[n]?.awaited == null ? "" : `awaited ${percent(ways[n].awaited)}`;
      const own = words.slice(3 * n, 3 * n + 3);
      if (!own.length) return;
      if (!isHorizontal || lines === 2) {
        const told = [speed, capacity, late].filter(Boolean);
        if (isHorizontal && !n) told.reverse(); // above the line the first words stand next to it, too
        own.forEach((line, at) => {
          say(line, told[at] ?? "");
          attribute(line, "class", `small halo${told[at] === speed ? "" : " muted"}`);
        });
      } else if (lines === 1) say(own[0], share);
    });
    attribute(node, "aria-label", label);
    say(tip, label);
  };
  return [node, update];
}

function describe(link, flow) {
  const way = (name) =>
    `${rate(flow?.[name]?.rate)} of ${capacity(link.bandwidth?.[name])}, ` +
    `awaited ${percent(flow?.[name]?.awaited)} of the last round`;
  return `link ${link.source} to ${link.target}: there ${way("there")}; back ${way("back")}`;
}

export function linksLayer({ picture, history, updates }) {
  const { members, size } = picture;
  const links = history.topology.links.filter((link) => members.has(link.source) && members.has(link.target));
  const drawn = links.map((link) => {
    const ends = between(members.get(link.source), members.get(link.target));
    const limits = [link.bandwidth?.there, link.bandwidth?.back];
    const [node, update] = connection(ends, size.name, `link:${link.id}`, limits);
    updates.push((now) => {
      const flow = now?.links[link.id];
      update([flow?.there, flow?.back], describe(link, flow));
    });
    return node;
  });
  return svg("g", drawn);
}

// What flows from a replica to the exchange, and back, over all its links: rates are added, and the busiest and the most
// awaited link count.
function flowsOf(history, replica, now) {
  const flows = history.topology.links.flatMap(({ id, source, target }) => {
    const flow = now?.links[id];
    if (target === "exchange" && replica.members.includes(source)) return [[flow?.there, flow?.back]];
    return source === "exchange" && replica.members.includes(target) ? [[flow?.back, flow?.there]] : [];
  });
  return [0, 1].map((way) => {
    const known = flows.map((flow) => flow[way]).filter((flow) => flow?.rate != null);
    if (!known.length) return null;
    const most = (name) => {
      const shares = known.map((flow) => flow[name]).filter((share) => share != null);
      return shares.length ? Math.max(...shares) : null;
    };
    return { rate: known.reduce((sum, flow) => sum + flow.rate, 0), busy: most("busy"), awaited: most("awaited") };
  });
}

export function toExchange(history, replica, now) {
  const [up, down] = flowsOf(history, replica, now);
  const told = (way) => (way?.busy == null ? rate(way?.rate) : percent(way.busy));
  return up || down ? `exchange ↑ ${told(up)} ↓ ${told(down)}` : "";
}

// All links of a replica to the exchange are drawn as one.
export function lanesLayer({ picture, history, updates }) {
  const { hub, isNarrow } = picture;
  const bottom = picture.replicas.at(-1)?.y + 22;
  const bus = isNarrow ? svg("line.bus", { x1: 7, y1: hub.height, x2: 7, y2: bottom }) : null;
  const lanes = picture.replicas
    .filter(({ replica }) => replica.members.length)
    .map((frame) => {
      const y = isNarrow ? frame.y + 22 : frame.y + frame.height / 2;
      const [x1, x2] = frame.x < hub.x ? [frame.x + frame.width, hub.x] : [frame.x, hub.x + hub.width];
      const ends = { ...(isNarrow ? { x1: frame.x, x2: 7 } : { x1, x2 }), y1: y, y2: y, isHorizontal: true };
      const [node, update] = connection(ends, isNarrow ? "small" : picture.size.name, `replica:${frame.id}`, []);
      node.removeAttribute("role"); // the frame is the button, this line belongs to it
      node.removeAttribute("aria-label");
      node.classList.replace("item", "lane");
      node.setAttribute("aria-hidden", "true");
      updates.push((now) => update(flowsOf(history, frame.replica, now), ""));
      return node;
    });
  return svg("g", bus, lanes);
}

export function linksTable(history, frame) {
  const rows = history.topology.links.map((link) => {
    const way = (name) => {
      const flow = frame?.links[link.id]?.[name] ?? {};
      return [rate(flow.rate), capacity(link.bandwidth?.[name]), percent(flow.busy), percent(flow.awaited)];
    };
    return [`${link.source} – ${link.target}`, ...way("there"), ...way("back")];
  });
  const ways = ["there", "back"].flatMap((way) => ["Rate", "Capacity", "Busy", "Awaited"].map((one) => `${one} ${way}`));
  return table("Links", ["Link", ...ways], rows);
}
