// The run in a few numbers, and what needs attention.

import { attribute, cut, el, say, show, svg, textButton } from "./dom.js";
import { MEMBER_STATES, REPLICA_STATES, count, duration, icon, lookUp, loss, percent } from "./words.js";

const GONE = ["absent", "vacant", "given_up"];
const MOST = 8; // lines of the list of troubles

// The topology without optional replicas in which nobody is, if there are more than `kept` of them. `empty` has these.
export function withoutEmpty(topology, frame, kept) {
  const state = (id) => frame?.members[id]?.state ?? "absent";
  const isEmpty = ({ optional, members }) => optional && members.every((id) => GONE.includes(state(id)));
  const empty = topology.replicas.filter(isEmpty);
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

// How a run ended, in words; null while it goes on.
export const outcomeOf = ({ outcome, cause }) => (outcome === "failed" ? `failed: ${cause}` : outcome);

function tile(root, name, value, sub) {
  let node = root.querySelector(`[data-tile="${name}"]`);
  if (!node) {
    node = el("div.tile", { "data-tile": name }, el("span.label", name), el("strong.value"), el("span.sub"));
    const flat = { viewBox: "0 0 100 24", preserveAspectRatio: "none", "aria-hidden": "true" };
    if (name === "Validation loss") node.append(svg("svg.sparkline", flat, svg("polyline")));
    if (name === "Round") node.append(el("progress", { max: 1, "aria-label": "Progress of the run" }));
    root.append(node);
  }
  say(node.querySelector(".value"), value);
  say(node.querySelector(".sub"), sub);
  return node;
}

export function drawTiles(root, { history, until, frame }) {
  const rounds = until.rounds.filter((round) => round.validation_loss !== null);
  const replicas = Object.values(frame?.replicas ?? {});
  const { empty, members: present } = withoutEmpty(history.topology, frame, 0);
  const states = present.map(({ id }) => frame?.members[id]?.state ?? "absent");
  const tokens = replicas.reduce((sum, replica) => sum + (replica.tokens ?? 0), 0);
  const isOver = ["over", "failed"].includes(frame?.phase);
  const closed = frame?.rounds_closed ?? 0;

  const [before, after] = history.inner_steps ? ["step ", ""] : ["", " s"];
  const step = frame?.step_total ? `${before}${count(frame.step_done)} of ${count(frame.step_total)}${after} in this one` : "";
  const round = tile(root, "Round", `${closed} of ${history.rounds_planned}`, isOver ? "closed" : `closed; ${step}`);
  const part = isOver || !frame?.step_total ? 0 : frame.step_done / frame.step_total;
  const done = Math.min(1, (closed + part) / Math.max(1, history.rounds_planned));
  attribute(round.querySelector("progress"), "value", done.toFixed(3));

  if (history.rehearsal) tile(root, "Validation loss", "–", "nothing is trained");
  else {
    const [last, previous] = [rounds.at(-1), rounds.at(-2)];
    const by = last && previous ? last.validation_loss - previous.validation_loss : null;
    const change = by === null ? "" : `${by <= 0 ? "−" : "+"}${loss(Math.abs(by))} in the last round`;
    const isOld = last && last.round < closed; // a replica that is away evaluates nothing
    const words = isOld ? `after round ${last.round}, the last with all replicas` : change;
    sparkline(tile(root, "Validation loss", loss(last?.validation_loss), words).querySelector("polyline"), rounds);
  }

  const speeds = replicas.map((replica) => (replica.state === "suspended" ? 0 : (replica.tokens_per_second ?? 0)));
  const speed = frame ? count(speeds.reduce((sum, one) => sum + one, 0)) : "–";
  tile(root, "Tokens per second", speed, `${count(tokens)} tokens so far`);

  const here = states.filter((state) => !GONE.includes(state)).length;
  const without = empty.length ? ` · ${empty.length} optional replicas without any` : "";
  const counts = [...Map.groupBy(states, (state) => state)].map(([state, same]) => [state, same.length]);
  const most = counts.sort((a, b) => b[1] - a[1]).slice(0, 3);
  const doing = most.map(([state, n]) => `${n} ${lookUp(MEMBER_STATES, state).word}`).join(" · ");
  tile(root, "Members here", `${here} of ${states.length}`, `${doing}${without}`);

  const own = history.topology.members.filter(({ id }) => history.own?.includes(id));
  if (own.length) {
    const [{ replica }] = own;
    const added = frame?.replicas[replica] ?? {}; // by the replica of this host
    const part = percent(tokens ? (added.tokens ?? 0) / tokens : null);
    const included = `${count(added.included ?? 0)} of ${count((added.included ?? 0) + (added.missed ?? 0))}`;
    const words = `${included} rounds of ${replica} included; ${part} of the tokens`;
    tile(root, "This host", own.map(({ id }) => id).join(", "), words);
  } else root.querySelector('[data-tile="This host"]')?.remove();

  const left = frame?.seconds_left == null ? "" : `about ${duration(frame.seconds_left)} left`;
  tile(root, "Time", duration(frame?.elapsed), isOver ? (outcomeOf(history) ?? frame.phase) : left);
}

// The synchronized validation loss over the rounds, as a line without words.
function sparkline(node, rounds) {
  const every = Math.ceil(rounds.length / 120);
  const shown = rounds.filter((_, n) => n % every === 0 || n === rounds.length - 1);
  const losses = shown.map((round) => round.validation_loss);
  const [low, high] = [Math.min(...losses), Math.max(...losses)];
  const at = (loss, n) =>
    `${((n / Math.max(1, losses.length - 1)) * 100).toFixed(1)},${(22 - ((loss - low) / (high - low || 1)) * 20).toFixed(1)}`;
  attribute(node, "points", losses.length > 1 ? losses.map(at).join(" ") : "", Infinity);
}

// Lists what an operator should look at first; the section is hidden when all is well.
export function attentionTo(root, { history, frame }, choose) {
  const all = new Map(troubles(history, frame).map(([text, item]) => [text, item]));
  show(root, all.size > 0);
  const key = JSON.stringify([...all]);
  if (key === root.known) return;
  root.known = key;
  const line = ([text, item]) => el("li", item ? textButton(cut(text, 200), () => choose(item)) : el("span", cut(text, 200)));
  const rest = all.size > MOST ? el("li", `and ${all.size - MOST} more`) : null;
  root.replaceChildren(icon({ icon: "warn", tone: "bad" }, 18), el("ul", [...all].slice(0, MOST).map(line), rest));
}

// What is wrong, in words, with the item that shows more of it.
function troubles(history, frame) {
  const { replicas, members } = withoutEmpty(history.topology, frame, 0);
  const found = history.outcome === "failed" ? [[outcomeOf(history)]] : [];
  if (frame?.message && !["joining", "over"].includes(frame.phase)) found.push([cut(frame.message, 200)]);
  if (frame?.exchange?.store_error) found.push([`exchange: ${cut(frame.exchange.store_error, 200)}`, "exchange:"]);
  found.push(...history.problems.map((text) => [cut(text, 200)]));
  for (const { id } of replicas) {
    const form = lookUp(REPLICA_STATES, frame?.replicas[id]?.state ?? "absent");
    if (form.tone === "bad") found.push([`${cut(id, 60)} is ${form.word}`, `replica:${id}`]);
  }
  for (const { id } of members) {
    const { state, since } = frame?.members[id] ?? {};
    if (!["vacant", "given_up"].includes(state)) continue;
    const seconds = Math.max(0, frame.time - (since ?? frame.time));
    found.push([`${cut(id, 60)} is ${lookUp(MEMBER_STATES, state).word} for ${duration(seconds)}`, `member:${id}`]);
  }
  return found;
}
