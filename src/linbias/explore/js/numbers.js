// Numbers as Python prints them, to the last digit.


// f"{x:.4f}"
export function fixed(x, digits = 4) {
  if (!Number.isFinite(x)) return special(x);
  const sign = x < 0 || Object.is(x, -0) ? "-" : "";
  const size = Math.abs(x);
  if (size >= 1e21) return `${sign}${BigInt(size)}.${"0".repeat(digits)}`;
  return sign + toEven(size.toFixed(digits), isTie(size, digits));
}

// f"{x:g}": six significant digits, without zeros at the end.
export function general(x) {
  if (!Number.isFinite(x)) return special(x);
  const sign = x < 0 || Object.is(x, -0) ? "-" : "";
  const size = Math.abs(x);
  if (size === 0) return `${sign}0`;
  let [digits, exponent] = size.toExponential(5).split("e");
  exponent = Number(exponent);
  digits = toEven(digits, isTie(size, 5 - Number(size.toExponential().split("e")[1])));
  if (exponent < -4 || exponent >= 6) {
    const power = String(Math.abs(exponent)).padStart(2, "0");
    return `${sign}${trimZeros(digits)}e${exponent < 0 ? "-" : "+"}${power}`;
  }
  const plain = digits.replace(".", "");
  const text =
    exponent < 0
      ? `0.${"0".repeat(-exponent - 1)}${plain}`
      : `${plain.slice(0, exponent + 1)}.${plain.slice(exponent + 1)}`;
  return sign + trimZeros(text);
}

// JavaScript rounds a number that lies exactly between two others away from zero, Python to the even digit.
// Such numbers are the odd multiples of 2^-(digits + 1): no other double has so short a decimal form.
const isTie = (size, digits) => (size * 2 ** (digits + 1)) % 2 === 1;

function toEven(text, tie) {
  const last = Number(text.at(-1));
  return tie && last % 2 === 1 ? text.slice(0, -1) + (last - 1) : text;
}

// Of a text with a point.
const trimZeros = (text) => text.replace(/\.?0*$/, "");

function special(x) {
  if (Number.isNaN(x)) return "nan";
  return x > 0 ? "inf" : "-inf";
}

// The same for readers: a true minus sign, none on what is rounded to 0, and the sign of infinity.
export function printed(x, digits = 4) {
  return fixed(x, digits).replace(/^-(?=[0.]*$)/, "").replace("-", "\u2212").replace("inf", "\u221e");
}
