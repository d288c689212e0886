// Requests to the server of this page.

export class Refused extends Error {
  constructor(message, hint, status) {
    super(message);
    this.hint = hint;
    this.status = status;
  }

  get text() {
    return this.hint ? `${this.message}\n${this.hint}` : this.message;
  }
}

const running = new Map();

function query(parameters) {
  const given = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    for (const each of Array.isArray(value) ? value : [value]) {
      if (each !== undefined && each !== null && each !== "") given.append(name, each);
    }
  }
  const text = given.toString();
  return text ? `?${text}` : "";
}

export const address = (path, parameters = {}) => `/api/${path}${query(parameters)}`;

/** Fetch JSON. `only`: an earlier request of that name is given up. */
export async function get(path, parameters = {}, { only } = {}) {
  return request(address(path, parameters), {}, only);
}

export async function ask(sql) {
  const body = JSON.stringify({ sql });
  return request("/api/sql", { method: "POST", body, headers: { "content-type": "application/json" } }, "sql");
}

async function request(url, options, only) {
  const controller = new AbortController();
  if (only) {
    running.get(only)?.abort();
    running.set(only, controller);
  }
  try {
    const response = await fetch(url, { ...options, signal: controller.signal });
    if (response.ok) return await response.json();
    if (response.status === 403) {
      throw new Refused("This server has another token now: open the address that `amago view` printed.", null, 403);
    }
    const said = await response.json().catch(() => ({ error: `the server answered ${response.status}` }));
    throw new Refused(said.error, said.hint, response.status);
  } catch (error) {
    if (error instanceof TypeError) throw new Refused("The server does not answer: is `amago view` still running?", null, 0);
    throw error;
  } finally {
    if (only && running.get(only) === controller) running.delete(only);
  }
}

export const givenUp = (error) => error?.name === "AbortError";
