// Numbers, times and names as people read them.

const grouped = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

export function number(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return grouped.format(value);
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-4) return value.toExponential(2);
  if (size >= 1000) return grouped.format(value);
  return String(Number(value.toPrecision(4)));
}

export const plain = (value) => (typeof value === "number" && !Number.isInteger(value) ? String(Number(value.toPrecision(6))) : String(value));

export function time(seconds) {
  if (!seconds) return "–";
  const at = new Date(seconds * 1000);
  const two = (part) => String(part).padStart(2, "0");
  return (
    `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ` +
    `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`
  );
}

export function ago(seconds) {
  const passed = Date.now() / 1000 - seconds;
  if (passed < 5) return "just now";
  if (passed < 90) return `${Math.round(passed)} s ago`;
  if (passed < 5400) return `${Math.round(passed / 60)} min ago`;
  if (passed < 129600) return `${Math.round(passed / 3600)} h ago`;
  return `${Math.round(passed / 86400)} days ago`;
}

export const short = (uid) => uid.slice(0, 8);

export const count = (many, one, several = `${one}s`) => `${number(many)} ${many === 1 ? one : several}`;

export function version(policy) {
  if (policy === null || policy === undefined) return "–";
  return policy < 0 ? "–" : number(policy);
}
