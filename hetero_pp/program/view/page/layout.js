// Places of members, replicas, sites and the exchange in the picture of a topology. Lengths are in units of the picture.

// Cards: `between` rows, `pad` and `title` of a frame, `lane` beside the hub, `space` between frames.
const SIZES = {
  full: { name: "full", width: 152, height: 96, gap: 122, between: 46, pad: 14, title: 50, lane: 118, hub: 132, space: 22 },
  medium: { name: "medium", width: 122, height: 48, gap: 46, between: 34, pad: 10, title: 47, lane: 92, hub: 120, space: 14 },
  small: { name: "small", width: 60, height: 28, gap: 18, between: 18, pad: 8, title: 26, lane: 56, hub: 112, space: 10 },
};
const NARROWEST = 212; // of a frame
const SITE_TITLE = 18;
const SMALLEST_SCALE = 0.82; // below it, smaller cards are easier to read

// Returns {size, width, height, members: Map(id -> box), replicas: [box], sites: [box], hub: box} for a space `room` wide
// and `tall` high. The largest cards that fit are taken.
export function place(topology, room, tall) {
  if (room < 640) return inColumn(topology, topology.members.length > 30 ? SIZES.small : SIZES.full, room);
  let placed = null;
  for (const size of Object.values(SIZES)) {
    for (const split of [byKind(topology), evenly(topology)]) {
      const found = aroundHub(topology, size, split);
      const scale = Math.min(1, room / found.width, (1.15 * tall) / found.height);
      if (scale >= SMALLEST_SCALE) return found;
      if (!placed || scale > placed.scale) placed = { ...found, scale };
    }
  }
  return placed;
}

// Replicas that share a site stand beside each other.
function ordered(topology) {
  const site = new Map(topology.members.map((member) => [member.id, member.site ?? ""]));
  const first = (replica) => replica.members.map((id) => site.get(id)).filter(Boolean).sort()[0] ?? "";
  return topology.replicas
    .map((replica, n) => ({ replica, key: first(replica), n }))
    .sort((a, b) => (a.key < b.key ? -1 : a.key > b.key ? 1 : a.n - b.n))
    .map(({ replica }) => replica);
}

function byKind(topology) {
  const replicas = ordered(topology);
  const left = replicas.filter((replica) => replica.kind === "datacenter");
  if (left.length && left.length < replicas.length)
    return [left, replicas.filter((replica) => replica.kind !== "datacenter")];
  const middle = Math.ceil(replicas.length / 2);
  return [replicas.slice(0, middle), replicas.slice(middle)];
}

// Datacenters first on the left; then the replicas go to both sides in turn.
function evenly(topology) {
  const rank = (replica) => (replica.kind === "datacenter" ? 0 : 1);
  const replicas = ordered(topology).sort((a, b) => rank(a) - rank(b));
  return [0, 1].map((side) => replicas.filter((_, n) => n % 2 === side));
}

const empty = (size) => ({ size, isNarrow: false, members: new Map(), replicas: [], sites: [] });

const frameWidth = (size, columns) =>
  Math.max(NARROWEST, columns * size.width + (columns - 1) * size.gap + 2 * size.pad);

function aroundHub(topology, size, [left, right]) {
  const widths = (replicas) => replicas.map((replica) => frameWidth(size, Math.min(replica.members.length, 8)));
  const [leftWidth, rightWidth] = [Math.max(0, ...widths(left)), Math.max(0, ...widths(right))];
  const picture = empty(size);
  const hubX = leftWidth + (left.length ? size.lane : 0);
  const rightX = hubX + size.hub + size.lane;
  const [leftHeight, rightHeight] = [left, right].map((side) => stack(empty(size), topology, side, size, 8, () => 0));
  picture.height = Math.max(leftHeight, rightHeight, 120);
  stack(picture, topology, left, size, 8, (width) => leftWidth - width, (picture.height - leftHeight) / 2);
  stack(picture, topology, right, size, 8, () => rightX, (picture.height - rightHeight) / 2);
  picture.hub = { x: hubX, y: 0, width: size.hub, height: picture.height };
  picture.width = right.length ? rightX + rightWidth : hubX + size.hub;
  return picture;
}

function inColumn(topology, size, room) {
  const [bus, top] = [16, 64];
  const picture = { ...empty(size), isNarrow: true, hub: { x: 0, y: 0, width: room, height: top }, width: room };
  const perRow = Math.max(1, Math.floor((room - bus - 2 * size.pad + size.gap) / (size.width + size.gap)));
  picture.height = stack(picture, topology, ordered(topology), size, perRow, () => bus, top + size.space, room - bus);
  return picture;
}

// Stacks frames of replicas from `top` on; returns the bottom. `left(width)` is where a frame begins.
function stack(picture, topology, replicas, size, perRow, left, top = 0, width = null) {
  const site = new Map(topology.members.map((member) => [member.id, member.site]));
  let y = top;
  for (const replica of replicas) {
    const hasSites = replica.members.some((id) => site.get(id));
    const columns = Math.min(replica.members.length, perRow) || 1;
    const rows = Math.ceil(replica.members.length / columns);
    const rowHeight = size.height + (hasSites ? SITE_TITLE + 6 : 0);
    const between = columns === 1 ? size.between : Math.round(size.between * 0.7);
    const frame = { id: replica.id, replica, y, width: width ?? frameWidth(size, columns) };
    frame.x = left(frame.width);
    frame.height = size.title + rows * rowHeight + Math.max(0, rows - 1) * between + size.pad;
    const cardWidth = replica.members.length === 1 && width === null ? frame.width - 2 * size.pad : size.width;
    const inset = columns === 1 && width !== null ? (frame.width - size.width) / 2 : size.pad;
    replica.members.forEach((id, n) => {
      const x = frame.x + inset + (n % columns) * (size.width + size.gap);
      const rowTop = frame.y + size.title + Math.floor(n / columns) * (rowHeight + between);
      const cardTop = rowTop + (hasSites ? SITE_TITLE : 0);
      picture.members.set(id, { id, x, y: cardTop, width: cardWidth, height: size.height });
    });
    picture.replicas.push(frame);
    if (hasSites) boxSites(picture, replica, site, size);
    y += frame.height + size.space;
  }
  return y - (replicas.length ? size.space : 0);
}

// Draws a box around neighbours in a chain that are at one site and in one row.
function boxSites(picture, replica, site, size) {
  let open = null;
  for (const id of replica.members) {
    const { x, y, width } = picture.members.get(id);
    if (open && open.site === site.get(id) && open.y === y - SITE_TITLE) {
      open.width = x + width + 5 - open.x;
      continue;
    }
    const height = size.height + SITE_TITLE + 5;
    open = { site: site.get(id), x: x - 5, y: y - SITE_TITLE, width: width + 10, height };
    if (open.site) picture.sites.push(open);
    else open = null;
  }
}

// Ends of a link between two boxes: {x1, y1, x2, y2, isHorizontal}. Neighbours in a row are joined side by side, others
// from below to above.
export function between(a, b) {
  if (Math.abs(a.y - b.y) < 1) {
    const [x1, x2] = a.x < b.x ? [a.x + a.width, b.x] : [a.x, b.x + b.width];
    return { x1, y1: a.y + a.height / 2, x2, y2: b.y + b.height / 2, isHorizontal: true };
  }
  const [y1, y2] = a.y < b.y ? [a.y + a.height, b.y] : [a.y, b.y + b.height];
  return { x1: a.x + a.width / 2, y1, x2: b.x + b.width / 2, y2, isHorizontal: false };
}
