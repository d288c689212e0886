// The console: one SELECT of the user, and its rows.

import { ask, givenUp } from "./api.js";
import { find, make, replace, show } from "./dom.js";
import { count, plain } from "./format.js";
import { hashOf, state, update } from "./state.js";

const UID = /^[0-9a-f]{32}$/;

export function start() {
  const [form, text] = [find("ask"), find("sql")];
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    update({ sql: text.value }, { quiet: true });
    run(text.value);
  });
  text.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
  text.value = state.sql ?? "select task, count(*) as n, avg(return) as mean from trajectories group by task order by n desc limit 20";
  if (state.sql) {
    find("console").open = true;
    run(state.sql);
  }
}

async function run(sql) {
  const error = find("sql-error");
  find("asked").textContent = "running...";
  const begun = performance.now();
  try {
    const found = await ask(sql);
    show(error, false);
    warn(found.warnings);
    table(found);
    const more = found.more ? " (the first of them)" : "";
    find("asked").textContent = `${count(found.rows.length, "row")}${more} in ${((performance.now() - begun) / 1000).toFixed(2)} s`;
  } catch (failure) {
    if (givenUp(failure)) return;
    find("asked").textContent = "";
    warn([]);
    error.textContent = failure.text ?? String(failure);
    show(error, true);
  }
}

/** Show what was left out of the answer. */
function warn(warnings) {
  find("sql-warnings").textContent = warnings.join("\n");
  show(find("sql-warnings"), warnings.length > 0);
}

function table({ columns, rows }) {
  const answer = find("answer");
  replace(answer.tHead, make("tr", {}, columns.map((name) => make("th", { scope: "col" }, name))));
  replace(answer.tBodies[0], rows.map((row) => make("tr", {}, row.map((value) => make("td", {}, cell(value))))));
}

function cell(value) {
  if (value === null) return "–";
  if (typeof value === "string" && UID.test(value)) return make("a", { href: hashOf({ uid: value }) }, value);
  return typeof value === "object" ? JSON.stringify(value) : plain(value);
}
