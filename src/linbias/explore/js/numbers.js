// Numbers as Python prints them, to the last digit, and as readers see them; scales of charts.

// f"{x:.4f}"
export function fixed(x, digits = 4) {
  if (!Number.isFinite(x)) return special(x);
  const size = Math.abs(x);
  if (size >= 1e21) return `${signOf(x)}${BigInt(size)}.${"0".repeat(digits)}`;
  return signOf(x) + toEven(size.toFixed(digits), isTie(size, digits));
}

// f"{x:g}": six significant digits, without zeros at the end.
export function general(x) {
  if (!Number.isFinite(x)) return special(x);
  const [digits, power] = Math.abs(x).toExponential(5).split("e");
  const figures = toEven(digits, isTie(Math.abs(x), 5 - power));
  if (-4 <= power && power < 6) return `${signOf(x)}${Number(`${figures}e${power}`)}`;
  return `${signOf(x)}${Number(figures)}e${power[0]}${power.slice(1).padStart(2, "0")}`;
}

const signOf = (x) => (x < 0 || Object.is(x, -0) ? "-" : "");

// JavaScript rounds a number that lies exactly between two others away from zero, Python to the even digit.
// Such numbers are the odd multiples of 2^-(digits + 1).
const isTie = (size, digits) => (size * 2 ** (digits + 1)) % 2 === 1;

function toEven(text, tie) {
  const last = Number(text.at(-1));
  return tie && last % 2 === 1 ? text.slice(0, -1) + (last - 1) : text;
}

const special = (x) => String(x).replace("Infinity", "inf").toLowerCase();

// The same for readers: a true minus sign, none on what is rounded to 0, and the sign of infinity.
export const printed = (x, digits = 4) =>
  fixed(x, digits).replace(/^-(?=[0.]*$)/, "").replace("-", "\u2212").replace("inf", "\u221e");

// 2048 -> "2,048", whatever the reader's language: the page is written in one.
export const grouped = (value) => value.toLocaleString("en-US", { maximumFractionDigits: 2 });

// -24 as raised figures.
export function superscript(exponent) {
  const figures = "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079";
  return String(exponent).replace("-", "\u207b").replace(/\d/g, (digit) => figures[digit]);
}

// 0.0000012 as 1.20 x 10 to the -6; numbers from 0.001 on as they are.
export function scientific(value, digits = 3) {
  if (value === 0) return "0";
  if (value >= 1e-3 && value < 1e4) return value.toPrecision(digits);
  const [figures, exponent] = value.toExponential(digits - 1).split("e");
  return `${figures}\u00a0\u00d7\u00a010${superscript(Number(exponent))}`;
}

// A slope as a fraction where it is one, 1/256, or in four digits.
export function slopeFraction(slope) {
  const inverse = Math.round(1 / slope);
  const isFraction = slope > 0 && slope < 1 && Math.abs(1 / slope - inverse) < 1e-9;
  return isFraction ? `1/${inverse}` : general(Number(slope.toPrecision(4)));
}

export const wholePercent = (share) => `${(100 * share).toFixed(0)}%`;

export function signedPercent(share) {
  const text = `${(100 * Math.abs(share)).toFixed(1)}%`;
  if (text === "0.0%") return text;
  return `${share < 0 ? "\u2212" : "+"}${text}`;
}

export function decimalsOf([first = 0, second = 1]) {
  return Math.max(0, Math.min(6, -Math.floor(Math.log10(second - first) + 1e-9)));
}

export function scaleOf({ low, high, from, to, log = false }) {
  const at = log ? Math.log : (value) => value;
  const width = at(high) - at(low) || 1;
  return (value) => from + ((at(value) - at(low)) / width) * (to - from);
}

// About `count` round numbers (1, 2 or 5 times a power of ten apart) within low .. high.
export function roundTicks(low, high, count) {
  if (!(high > low)) return [low];
  const rough = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
  const [first, last] = [Math.ceil(low / step - 1e-9), Math.floor(high / step + 1e-9)];
  // -0 would show its sign.
  return Array.from({ length: last - first + 1 }, (_, i) => (first + i) * step + 0);
}

// About `count` powers of ten within low .. high, evenly spaced.
export function powerTicks(low, high, count) {
  const first = Math.ceil(Math.log10(low) - 1e-9);
  const last = Math.floor(Math.log10(high) + 1e-9);
  const every = Math.max(1, Math.ceil((last - first) / Math.max(1, count)));
  const ticks = [];
  for (let exponent = last; exponent >= first; exponent -= every) ticks.unshift(10 ** exponent);
  return ticks;
}

// The ticks that leave each other `room` pixels, the last one first.
export function ticksWithRoom(ticks, place, room) {
  return ticks.reduceRight((kept, tick) => {
    const fits = kept.length === 0 || Math.abs(place(kept[0]) - place(tick)) >= room;
    return fits ? [tick, ...kept] : kept;
  }, []);
}

// Middles for labels of these sizes between `from` and `to`, in the order of their wishes and as near to them
// as may be: labels that would touch share the mean of what they want.
export function spread(wanted, sizes, from, to) {
  const order = wanted.map((_, i) => i).sort((a, b) => wanted[a] - wanted[b]);
  const groups = [];
  const start = ({ sum, labels }) => sum / labels.length;
  let before = 0; // the sizes of the labels so far
  for (const i of order) {
    let group = { sum: wanted[i] - sizes[i] / 2 - before, labels: [i] };
    before += sizes[i];
    while (groups.length && start(groups.at(-1)) > start(group)) {
      const { sum, labels } = groups.pop();
      group = { sum: sum + group.sum, labels: [...labels, ...group.labels] };
    }
    groups.push(group);
  }
  const middles = [];
  let edge = 0;
  for (const group of groups) {
    const first = Math.max(from, Math.min(start(group), to - before));
    for (const i of group.labels) {
      middles[i] = first + edge + sizes[i] / 2;
      edge += sizes[i];
    }
  }
  return middles;
}
