// Numbers as people read them. null is unknown and becomes a dash.

const STEPS = ["", "k", "M", "G", "T"];

function scaled(value, unit, digits = 3) {
  let step = 0;
  while (value >= 999.5 && step < STEPS.length - 1) {
    value /= 1000;
    step += 1;
  }
  return `${Number(value.toPrecision(digits))} ${STEPS[step]}${unit}`;
}

const known =
  (write) =>
  (value, ...rest) =>
    value === null || value === undefined || Number.isNaN(value) ? "–" : write(value, ...rest);

export const bytes = known((value) => scaled(value, "B"));
export const rate = known((value) => scaled(value * 8, "bit/s")); // bytes a second come in, lines are sold in bits
export const percent = known((share) => `${Math.round(100 * share)} %`);
export const signed = known((share) => `${share < -0.005 ? "−" : share > 0.005 ? "+" : ""}${percent(Math.abs(share))}`);
export const loss = known((value) => value.toFixed(4));
export const count = known((value) => Math.round(value).toLocaleString("en"));

export const seconds = known((value) => {
  if (value < 0.1) return `${Number((1000 * value).toPrecision(2))} ms`;
  return value < 100 ? `${Number(value.toPrecision(3))} s` : duration(value);
});

// Minutes and seconds, or hours and minutes: 0:07, 12:30, 3 h 05 min.
export const duration = known((value) => {
  const whole = Math.max(0, Math.round(value));
  const two = (number) => String(number).padStart(2, "0");
  if (whole < 3600) return `${Math.floor(whole / 60)}:${two(whole % 60)}`;
  const hours = Math.floor(whole / 3600);
  if (hours < 48) return `${hours} h ${two(Math.floor((whole % 3600) / 60))} min`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
});

export const number = known((value) =>
  typeof value === "number" ? String(Number(value.toPrecision(6))) : String(value),
);
