// From numbers to places on an axis, and the numbers that an axis shows.

// scaleOf({ low, high, from, to, log }): a function from numbers to pixels; its `invert` goes back.
export function scaleOf({ low, high, from, to, log = false }) {
  const start = log ? Math.log(low) : low;
  const width = (log ? Math.log(high) : high) - start || 1;
  const place = (value) => from + (((log ? Math.log(value) : value) - start) / width) * (to - from);
  place.invert = (pixel) => {
    const value = start + ((pixel - from) / (to - from)) * width;
    return log ? Math.exp(value) : value;
  };
  return place;
}

// About `count` round numbers (1, 2 or 5 times a power of ten apart) within low .. high.
export function roundTicks(low, high, count) {
  if (!(high > low)) return [low];
  const rough = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(i * step);
  return ticks;
}

// About `count` powers of `base` within low .. high, evenly spaced.
export function powerTicks(low, high, base, count) {
  const first = Math.ceil(Math.log(low) / Math.log(base) - 1e-9);
  const last = Math.floor(Math.log(high) / Math.log(base) + 1e-9);
  const every = Math.max(1, Math.ceil((last - first) / Math.max(1, count)));
  const ticks = [];
  for (let exponent = last; exponent >= first; exponent -= every) ticks.unshift(base ** exponent);
  return ticks;
}

// The ticks that leave each other `room` pixels, the last one first.
export function ticksWithRoom(ticks, place, room) {
  const kept = [];
  for (const tick of [...ticks].reverse()) {
    if (kept.length === 0 || Math.abs(place(kept[0]) - place(tick)) >= room) kept.unshift(tick);
  }
  return kept;
}

// How many decimals tell numbers `step` apart.
export function decimalsOf(step) {
  return Math.max(0, Math.min(6, -Math.floor(Math.log10(step) + 1e-9)));
}

// 2048 -> "2,048", whatever the reader's language: the page is written in one.
export function grouped(value) {
  return value.toLocaleString("en-US", { maximumFractionDigits: 2 });
}
