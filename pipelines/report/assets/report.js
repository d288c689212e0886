// Puts the charts of the page's data into their places. The charts are Vega-Lite's; here are the choices that a reader has:
// the x axis, which runs and lines are hidden, zoom by keyboard, and the table behind a chart.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("report-data").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const plots = [...document.querySelectorAll(".plot")];
  const drawn = new Map();
  const hiddenRuns = new Set();
  const hidden = new Map();
  let axis = data.axes.length ? data.axes[0].name : null;

  const theme = () => (dark.matches ? data.themes.dark : data.themes.light);
  const chartOf = (plot) => data.charts[Number(plot.dataset.chart)];
  const column = (number) => (number === null || number === undefined ? null : data.columns[number]);
  const places = (series) => column(series.x !== undefined ? series.x : series.along[axis]);
  const isOffered = (series) => !hiddenRuns.has(series.run) && (!series.axis || series.axis === axis);
  const isShown = (plot, series, number) => isOffered(series) && !(hidden.get(plot) || new Set()).has(number);

  function rowsOf(plot, everything) {
    const chart = chartOf(plot);
    if (chart.rows) return chart.rows;
    const rows = [];
    chart.series.forEach((series, number) => {
      if (series.axis && series.axis !== axis) return;
      if (!everything && !isShown(plot, series, number)) return;
      const [x, y, low, high] = [places(series), column(series.y), column(series.low), column(series.high)];
      if (!x) return;
      y.forEach((value, at) => {
        if (value === null || x[at] === null) return;
        const row = { series: series.name, x: x[at], y: value, reference: series.reference, joined: series.joined };
        if (low && low[at] !== null) Object.assign(row, { low: low[at], high: high[at] });
        rows.push(row);
      });
    });
    return rows;
  }

  function specOf(plot) {
    const chart = chartOf(plot);
    const spec = structuredClone(chart.spec);
    spec.data = { values: rowsOf(plot) };
    if (!chart.series) return spec;
    const { lines, soft } = theme();
    const offered = chart.series.filter((series) => !series.axis || series.axis === axis);
    const scale = {
      domain: offered.map((series) => series.name),
      range: offered.map((series) => (series.reference ? soft : lines[series.color % lines.length])),
    };
    for (const layer of spec.layer) if (layer.encoding.color) layer.encoding.color.scale = scale;
    if (chart.follows) {
      const { title } = data.axes.find((each) => each.name === axis);
      spec.encoding.x.title = title;
      for (const { encoding } of spec.layer) {
        for (const field of encoding.tooltip || []) if (field.field === "x") field.title = title;
      }
    }
    return spec;
  }

  async function draw(plot) {
    const { config } = theme();
    const number = (drawn.get(plot) || { number: 0 }).number + 1;
    drawn.set(plot, { number });
    const options = {
      config, renderer: "canvas", ast: true, hover: false, tooltip: { theme: dark.matches ? "dark" : "light" },
      actions: false,
    };
    const holder = document.createElement("div");
    holder.style.width = `${plot.clientWidth}px`;
    const old = plot.firstChild;
    plot.append(holder);
    const result = await vegaEmbed(holder, specOf(plot), options);
    if (drawn.get(plot).number !== number) { result.finalize(); holder.remove(); return; }
    if (old) { if (old.finalizeChart) old.finalizeChart(); old.remove(); }
    holder.finalizeChart = () => result.finalize();
    drawn.set(plot, { number, view: result.view });
    plot.dataset.drawn = "true";
    key(plot);
  }

  function key(plot) {
    const chart = chartOf(plot);
    const { lines, soft } = theme();
    (chart.series || []).forEach((series, number) => {
      const button = document.querySelector(`#key-${plot.dataset.chart} [data-series="${number}"]`);
      if (!button) return;
      button.hidden = !isOffered(series);
      button.querySelector("i").style.borderColor = series.reference ? soft : lines[series.color % lines.length];
    });
  }

  const redraw = (which) => { for (const plot of which) if (drawn.has(plot)) draw(plot); };

  function zoom(plot, factor, shift) {
    const { view } = drawn.get(plot) || {};
    if (!view) return;
    for (const [channel, move] of [["x", shift], ["y", 0]]) {
      const signal = `zoom_${channel}`;
      let [low, high] = view.scale(channel).domain();
      const [middle, half] = [(low + high) / 2 + move * (high - low), ((high - low) / 2) * factor];
      if (channel === "y" && move === 0 && factor === 1) continue;
      view.signal(signal, [middle - half, middle + half]);
    }
    view.runAsync();
  }

  const KEYS = { "+": [0.7, 0], "=": [0.7, 0], "-": [1.4, 0], ArrowLeft: [1, -0.2], ArrowRight: [1, 0.2] };

  function tableOf(plot) {
    const chart = chartOf(plot);
    const columns = chart.table || [
      ["series", chart.names || "series"], ["x", chart.follows ? data.axes.find((each) => each.name === axis).title : chart.x],
      ["y", chart.y], ["low", "low"], ["high", "high"],
    ];
    const rows = rowsOf(plot, true);
    const used = columns.filter(([name]) => rows.some((row) => row[name] !== undefined));
    const table = document.createElement("table");
    const head = table.createTHead().insertRow();
    for (const [, title] of used) {
      const cell = document.createElement("th");
      cell.scope = "col";
      cell.textContent = title;
      head.append(cell);
    }
    const body = table.createTBody();
    for (const row of rows.slice(0, data.mostRows)) {
      const line = body.insertRow();
      for (const [name] of used) {
        const cell = line.insertCell();
        const value = row[name];
        cell.textContent = typeof value === "number" ? String(Number(value.toPrecision(6))) : value ?? "";
        if (typeof value === "number") cell.className = "number";
      }
    }
    if (rows.length > data.mostRows) table.createCaption().textContent = `the first ${data.mostRows} of ${rows.length} rows`;
    return table;
  }

  for (const plot of plots) {
    plot.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key === "0") draw(plot);
      else if (KEYS[event.key]) zoom(plot, ...KEYS[event.key]);
      else return;
      event.preventDefault();
    });
    for (const button of document.querySelectorAll(`#key-${plot.dataset.chart} button`)) {
      button.addEventListener("click", () => {
        const set = hidden.get(plot) || new Set();
        const number = Number(button.dataset.series);
        if (!set.delete(number)) set.add(number);
        hidden.set(plot, set);
        button.setAttribute("aria-pressed", String(!set.has(number)));
        draw(plot);
      });
    }
    const details = document.getElementById(`table-${plot.dataset.chart}`);
    if (details) details.addEventListener("toggle", () => {
      if (details.open) details.querySelector(".scroll").replaceChildren(tableOf(plot));
    });
  }

  for (const input of document.querySelectorAll("input[name=axis]")) {
    input.addEventListener("change", () => {
      axis = input.value;
      redraw(plots.filter((plot) => chartOf(plot).follows));
      for (const open of document.querySelectorAll("details.behind[open]")) open.dispatchEvent(new Event("toggle"));
    });
  }
  for (const input of document.querySelectorAll("input[name=run]")) {
    input.addEventListener("change", () => {
      if (input.checked) hiddenRuns.delete(Number(input.value)); else hiddenRuns.add(Number(input.value));
      redraw(plots.filter((plot) => (chartOf(plot).series || []).some((series) => series.run !== null)));
    });
  }
  const swatches = () => {
    const { lines } = theme();
    for (const each of document.querySelectorAll("[data-color]")) each.style.borderColor = lines[each.dataset.color % lines.length];
  };
  swatches();
  dark.addEventListener("change", () => { swatches(); redraw(plots); });

  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    clearTimeout(drawn.timer);
    drawn.timer = setTimeout(() => redraw(plots), 150);
  });
  const near = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) {
      if (isIntersecting && !drawn.has(target)) { near.unobserve(target); draw(target); }
    }
  }, { rootMargin: "400px" });
  for (const plot of plots) near.observe(plot);
  addEventListener("beforeprint", () => { for (const plot of plots) if (!drawn.has(plot)) draw(plot); });
})();
