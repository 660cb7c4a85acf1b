// The run in a few numbers, and what needs attention.

import { attribute, cut, el, say, show, svg } from "./dom.js";
import { count, duration, loss, percent } from "./format.js";
import { MEMBER_STATES, REPLICA_STATES, icon, lookUp } from "./states.js";

const GONE = ["absent", "vacant", "given_up"];
const MOST = 8; // lines of the list of troubles

// The topology without optional replicas in which nobody is, if there are more than `kept` of them. `empty` has these.
export function withoutEmpty(topology, frame, kept) {
  const state = (id) => frame?.members[id]?.state ?? "absent";
  const empty = topology.replicas.filter(({ optional, members }) => optional && members.every((id) => GONE.includes(state(id))));
  if (empty.length <= kept) return { ...topology, empty: [] };
  const gone = new Set(empty.map(({ id }) => id));
  const out = new Set(topology.members.filter(({ replica }) => gone.has(replica)).map(({ id }) => id));
  return {
    ...topology,
    replicas: topology.replicas.filter(({ id }) => !gone.has(id)),
    members: topology.members.filter(({ id }) => !out.has(id)),
    links: topology.links.filter(({ source, target }) => !out.has(source) && !out.has(target)),
    empty: empty.map(({ id, members }) => ({ id, isFree: members.every((one) => state(one) === "absent") })),
  };
}

function tile(root, name) {
  const found = root.querySelector(`[data-tile="${name}"]`);
  if (found) return found;
  const made = el(
    "div",
    { class: "tile", "data-tile": name },
    el("span", { class: "label" }, name),
    el("strong", { class: "value" }),
    el("span", { class: "sub" }),
  );
  if (name === "Validation loss")
    made.append(
      svg(
        "svg",
        { class: "sparkline", viewBox: "0 0 100 24", preserveAspectRatio: "none", "aria-hidden": "true" },
        svg("polyline", {}),
      ),
    );
  if (name === "Round") made.append(el("progress", { max: 1, "aria-label": "Progress of the run" }));
  root.append(made);
  return made;
}

function fillTile(root, name, value, sub) {
  const node = tile(root, name);
  say(node.querySelector(".value"), value);
  say(node.querySelector(".sub"), sub);
  return node;
}

export function drawTiles(root, { history, frame, time }) {
  const until = time ?? Infinity;
  const rounds = history.rounds.filter((round) => round.closed <= until && round.validation_loss !== null);
  const [last, before] = [rounds.at(-1), rounds.at(-2)];
  const replicas = Object.values(frame?.replicas ?? {});
  const { empty, members: present } = withoutEmpty(history.topology, frame, 0);
  const members = present.map(({ id }) => frame?.members[id]?.state ?? "absent");
  const here = members.filter((state) => !GONE.includes(state)).length;
  const speed = replicas.reduce(
    (sum, replica) => sum + (replica.state === "suspended" ? 0 : (replica.tokens_per_second ?? 0)),
    0,
  );
  const tokens = replicas.reduce((sum, replica) => sum + (replica.tokens ?? 0), 0);
  const isOver = ["over", "failed"].includes(frame?.phase);
  const closed = frame?.rounds_closed ?? 0;
  const step = frame?.step_total
    ? `${history.inner_steps ? "step " : ""}${count(frame.step_done)} of ${count(frame.step_total)}${history.inner_steps ? "" : " s"} in this one`
    : "";
  const progress = fillTile(
    root,
    "Round",
    `${closed} of ${history.rounds_planned}`,
    isOver ? "closed" : `closed; ${step}`,
  ).querySelector("progress");
  attribute(
    progress,
    "value",
    Math.min(
      1,
      (closed + (isOver || !frame?.step_total ? 0 : frame.step_done / frame.step_total)) /
        Math.max(1, history.rounds_planned),
    ).toFixed(3),
  );
  const change =
    last && before
      ? `${last.validation_loss <= before.validation_loss ? "−" : "+"}${loss(Math.abs(last.validation_loss - before.validation_loss))} in the last round`
      : "";
  const isOld = last && last.round < closed; // a replica that is away evaluates nothing
  if (history.rehearsal) fillTile(root, "Validation loss", "–", "nothing is trained");
  else {
    const tile = fillTile(root, "Validation loss", loss(last?.validation_loss), isOld ? `after round ${last.round}, the last with all replicas` : change);
    sparkline(tile.querySelector("polyline"), rounds);
  }
  fillTile(root, "Tokens per second", frame ? count(speed) : "–", `${count(tokens)} tokens so far`);
  fillTile(root, "Members here", `${here} of ${members.length}`, `${tally(members)}${empty.length ? ` · ${empty.length} optional replicas without any` : ""}`);
  const own = history.topology.members.filter(({ id }) => history.own?.includes(id));
  if (own.length) fillTile(root, "This host", own.map(({ id }) => id).join(", "), share(own[0].replica, frame?.replicas[own[0].replica], tokens));
  else root.querySelector('[data-tile="This host"]')?.remove();
  const left = frame?.seconds_left;
  fillTile(
    root,
    "Time",
    duration(frame?.elapsed),
    isOver ? (history.outcome ?? frame.phase) : left == null ? "" : `about ${duration(left)} left`,
  );
}

// What the replica of this host added to the run.
function share(replica, own, tokens) {
  const closed = (own?.included ?? 0) + (own?.missed ?? 0);
  const added = tokens ? (own?.tokens ?? 0) / tokens : null;
  return `${count(own?.included ?? 0)} of ${count(closed)} rounds of ${replica} included; ${percent(added)} of the tokens`;
}

// The synchronized validation loss over the rounds, as a line without words.
function sparkline(node, rounds) {
  const every = Math.ceil(rounds.length / 120);
  const losses = rounds.filter((_, n) => n % every === 0 || n === rounds.length - 1).map((round) => round.validation_loss);
  const [low, high] = [Math.min(...losses), Math.max(...losses)];
  const at = (loss, n) =>
    `${((n / Math.max(1, losses.length - 1)) * 100).toFixed(1)},${(22 - ((loss - low) / (high - low || 1)) * 20).toFixed(1)}`;
  attribute(node, "points", losses.length > 1 ? losses.map(at).join(" ") : "", Infinity);
}

function tally(states) {
  const counts = new Map();
  for (const state of states) counts.set(state, (counts.get(state) ?? 0) + 1);
  return [...counts]
    .sort((a, b) => b[1] - a[1])
    .slice(0, 3)
    .map(([state, n]) => `${n} ${lookUp(MEMBER_STATES, state).word}`)
    .join(" · ");
}

// Lists what an operator should look at first; the section is hidden when all is well.
export function attentionTo(root, { history, frame }, choose) {
  const all = [...messages(history, frame), ...replicasIn(history, frame), ...membersIn(history, frame)];
  const troubles = [...new Map(all.map((trouble) => [trouble.text, trouble])).values()];
  show(root, troubles.length > 0);
  const key = JSON.stringify(troubles);
  if (key === root.known) return;
  root.known = key;
  const button = ({ item, text }) =>
    item
      ? el("button", { type: "button", class: "link", on: { click: () => choose(item) } }, cut(text, 200))
      : el("span", {}, cut(text, 200));
  const rest = troubles.length > MOST ? el("li", {}, `and ${troubles.length - MOST} more`) : null;
  root.replaceChildren(
    icon({ icon: "warn", tone: "bad" }, 18),
    el(
      "ul",
      {},
      troubles.slice(0, MOST).map((trouble) => el("li", {}, button(trouble))),
      rest,
    ),
  );
}

function messages(history, frame) {
  const exchange = frame?.exchange?.store_error
    ? [{ item: "exchange:", text: `exchange: ${cut(frame.exchange.store_error, 200)}` }]
    : [];
  const failed = history.outcome?.startsWith("failed") ? [{ text: history.outcome }] : [];
  const said = frame?.message && !["joining", "over"].includes(frame.phase) ? [{ text: cut(frame.message, 200) }] : [];
  return [...failed, ...said, ...exchange, ...history.problems.map((text) => ({ text: cut(text, 200) }))];
}

function replicasIn(history, frame) {
  return withoutEmpty(history.topology, frame, 0)
    .replicas.map(({ id }) => ({ id, form: lookUp(REPLICA_STATES, frame?.replicas[id]?.state ?? "absent") }))
    .filter(({ form }) => form.tone === "bad")
    .map(({ id, form }) => ({ item: `replica:${id}`, text: `${cut(id, 60)} is ${form.word}` }));
}

function membersIn(history, frame) {
  return withoutEmpty(history.topology, frame, 0)
    .members.filter(({ id }) => ["vacant", "given_up"].includes(frame?.members[id]?.state))
    .map(({ id }) => ({
      item: `member:${id}`,
      text: `${cut(id, 60)} is ${lookUp(MEMBER_STATES, frame.members[id].state).word} for ${duration(Math.max(0, frame.time - (frame.members[id].since ?? frame.time)))}`,
    }));
}
