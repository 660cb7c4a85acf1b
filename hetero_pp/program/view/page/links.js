// The links of a topology: lines that are as thick as they are busy, with their rates and capacities.

import { attribute, say, svg } from "./dom.js";
import { percent, rate } from "./format.js";
import { between } from "./layout.js";
import { button, text } from "./shapes.js";

// Width of a line that is busy for this share of the time.
const stroke = (busy, size) => (size === "small" ? 1 : 1.5) + (size === "small" ? 2.5 : 5) * Math.min(1, busy ?? 0);

// Draws both ways of a connection and its words; returns [node, update(ways, label)].
function connection(ends, size, item, limits) {
  const { x1, y1, x2, y2, isHorizontal } = ends;
  const off = size === "full" ? 6 : size === "medium" ? 5 : 3;
  const [dx, dy] = isHorizontal ? [0, off] : [off, 0];
  const there = svg("line", {
    x1: x1 - dx,
    y1: y1 - dy,
    x2: x2 - dx,
    y2: y2 - dy,
    class: "way",
    "marker-end": "url(#arrow)",
  });
  const back = svg("line", {
    x1: x2 + dx,
    y1: y2 + dy,
    x2: x1 + dx,
    y2: y1 + dy,
    class: "way",
    "marker-end": "url(#arrow)",
  });
  const hit = svg("line", { x1, y1, x2, y2, class: "hit" });
  const [x, y] = [(x1 + x2) / 2, (y1 + y2) / 2];
  const room = Math.hypot(x2 - x1, y2 - y1);
  const lines = room > 100 ? 2 : room > 30 ? 1 : 0;
  const words = isHorizontal
    ? [
        text(x, y - 13, "small halo", "", "middle"),
        text(x, y - 26, "small halo", "", "middle"),
        text(x, y - 39, "small halo", "", "middle"),
        text(x, y + 22, "small halo", "", "middle"),
        text(x, y + 35, "small halo", "", "middle"),
        text(x, y + 48, "small halo", "", "middle"),
      ]
    : size === "small"
      ? []
      : [
          text(x - 14, y - 10, "small halo", "", "end"),
          text(x - 14, y + 4, "small halo", "", "end"),
          text(x - 14, y + 18, "small halo", "", "end"),
          text(x + 14, y - 10, "small halo"),
          text(x + 14, y + 4, "small halo"),
          text(x + 14, y + 18, "small halo"),
        ];
  const tip = svg("title");
  const node = svg("g", button(item, ""), tip, hit, there, back, words);
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
    `${rate(flow?.[name]?.rate)} of ${link.bandwidth?.[name] == null ? "unlimited" : rate(link.bandwidth[name])}, ` +
    `awaited ${percent(flow?.[name]?.awaited)} of the last round`;
  return `link ${link.source} to ${link.target}: there ${way("there")}; back ${way("back")}`;
}

export function linksLayer({ picture, history, updates }) {
  const links = history.topology.links.filter(
    (link) => picture.members.has(link.source) && picture.members.has(link.target),
  );
  return svg(
    "g",
    {},
    links.map((link) => {
      const ends = between(picture.members.get(link.source), picture.members.get(link.target));
      const [node, update] = connection(ends, picture.size.name, `link:${link.id}`, [
        link.bandwidth?.there,
        link.bandwidth?.back,
      ]);
      updates.push((now) => {
        const flow = now?.links[link.id];
        update([flow?.there, flow?.back], describe(link, flow));
      });
      return node;
    }),
  );
}

function exchangeLinks(history, replica) {
  const ends = history.topology.links.filter(({ source, target }) => source === "exchange" || target === "exchange");
  return ends
    .map(({ id, source, target }) => ({
      id,
      isFrom: source !== "exchange",
      member: source === "exchange" ? target : source,
    }))
    .filter(({ member }) => replica.members.includes(member));
}

// What flows from a replica to the exchange, and back.
function flowsOf(links, now) {
  const flows = links.map(({ id, isFrom }) => [
    now?.links[id]?.[isFrom ? "there" : "back"],
    now?.links[id]?.[isFrom ? "back" : "there"],
  ]);
  return [summed(flows, 0), summed(flows, 1)];
}

export function toExchange(history, replica, now) {
  const [up, down] = flowsOf(exchangeLinks(history, replica), now);
  const told = (way) => (way?.busy == null ? rate(way?.rate) : percent(way.busy));
  return up || down ? `exchange ↑ ${told(up)} ↓ ${told(down)}` : "";
}

// All links of a replica to the exchange are drawn as one: rates are added, the busiest and the most awaited count.
export function lanesLayer({ picture, history, updates }) {
  const own = new Map(picture.replicas.map((frame) => [frame.id, exchangeLinks(history, frame.replica)]));
  const bus = picture.isNarrow
    ? [svg("line", { x1: 7, y1: picture.hub.height, x2: 7, y2: picture.replicas.at(-1)?.y + 22, class: "bus" })]
    : [];
  return svg(
    "g",
    {},
    bus,
    picture.replicas.filter(({ replica }) => replica.members.length).map((frame) => {
      const y = frame.y + frame.height / 2;
      const [x1, x2] =
        frame.x < picture.hub.x ? [frame.x + frame.width, picture.hub.x] : [frame.x, picture.hub.x + picture.hub.width];
      const ends = picture.isNarrow
        ? { x1: frame.x, y1: frame.y + 22, x2: 7, y2: frame.y + 22, isHorizontal: true }
        : { x1, y1: y, x2, y2: y, isHorizontal: true };
      const [node, update] = connection(
        ends,
        picture.isNarrow ? "small" : picture.size.name,
        `replica:${frame.id}`,
        [],
      );
      node.removeAttribute("role"); // the frame is the button, this line belongs to it
      node.removeAttribute("aria-label");
      node.classList.replace("item", "lane");
      node.setAttribute("aria-hidden", "true");
      updates.push((now) => {
        const links = own.get(frame.id);
        update(flowsOf(links, now), "");
      });
      return node;
    }),
  );
}

function summed(flows, way) {
  const known = flows.map((flow) => flow[way]).filter((flow) => flow?.rate != null);
  if (!known.length) return null;
  const most = (name) => {
    const shares = known.map((flow) => flow[name]).filter((share) => share != null);
    return shares.length ? Math.max(...shares) : null;
  };
  return { rate: known.reduce((sum, flow) => sum + flow.rate, 0), busy: most("busy"), awaited: most("awaited") };
}
