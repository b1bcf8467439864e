"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const $ = (id) => document.getElementById(id);
  const names = Object.keys(data.strategies);
  const css = (key) => getComputedStyle(root).getPropertyValue(key).trim();
  const of = (name) => css("--c" + names.indexOf(name));
  const int = (n) => Math.round(n).toLocaleString("en");
  const percent = (x) => (100 * x).toFixed(1) + " %";
  const narrow = () => window.innerWidth < 560;

  const layout = (more) => {
    const axis = {gridcolor: css("--line"), zerolinecolor: css("--line"), linecolor: css("--line"), automargin: true, fixedrange: true};
    const base = {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", margin: {l: 8, r: 12, t: 12, b: 36},
      font: {color: css("--ink"), size: 12, family: "system-ui, sans-serif"}, showlegend: false, bargap: 0.25,
      hoverlabel: {bgcolor: css("--card"), bordercolor: css("--line"), font: {color: css("--ink")}},
    };
    const made = Object.assign({}, base, more);
    made.xaxis = Object.assign({}, axis, more.xaxis);
    made.yaxis = Object.assign({}, axis, more.yaxis);
    return made;
  };
  const config = {displayModeBar: false, responsive: true};
  const draw = (id, traces, more) => Plotly.react(id, traces, layout(more), config);
  const line = (x, text, side, high) => ({
    shape: {type: "line", x0: x, x1: x, y0: 0, y1: 1, yref: "paper", line: {color: css("--soft"), width: 1, dash: "dash"}},
    note: {x: x, y: high, yref: "paper", text: text, showarrow: false, xanchor: side, font: {size: 11, color: css("--soft")}, bgcolor: css("--card")},
  });

  function histogram() {
    const edges = data.histogram.edges, counts = data.histogram.counts;
    const middle = counts.map((_, i) => (edges[i] + edges[i + 1]) / 2);
    const text = counts.map((n, i) => `${int(edges[i])} to ${int(edges[i + 1] - 1)} tokens: ${int(n)}`);
    const last = edges[edges.length - 1], budget = data.setup.token_budget;
    const marks = [line(data.lengths.p50, "median", "left", 1), line(data.lengths.p99, "p99", "left", 0.9)];
    const shown = budget <= 1.3 * last;
    if (shown) marks.push(line(budget, "budget", "right", 0.8));
    $("histogram-note").textContent = `Dashed: median, 99th percentile${shown ? ", token budget" : ""}.`;
    draw("histogram", [{type: "bar", x: middle, y: counts, width: edges[1] - edges[0], hovertext: text, hoverinfo: "text", marker: {color: css("--real"), line: {width: 0}}}], {
      bargap: 0, xaxis: {title: {text: "tokens"}}, yaxis: {title: {text: narrow() ? "" : "sequences"}},
      shapes: marks.map((m) => m.shape), annotations: marks.map((m) => m.note),
    });
  }

  function comparison() {
    const order = [...names].reverse();
    const bars = (value, text) => [{type: "bar", orientation: "h", y: order, x: order.map(value), text: order.map(text), textposition: "auto", cliponaxis: false, insidetextfont: {color: order.map((n) => (n === data.recommendation.strategy ? css("--card") : css("--dark")))},
      hoverinfo: "skip", marker: {color: order.map(of), opacity: order.map((n) => (n === data.recommendation.strategy ? 1 : 0.75))}}];
    const time = (n) => data.strategies[n].step_time_ratio;
    const most = Math.max(...names.map(time), 1.2);
    draw("times", bars(time, (n) => time(n).toFixed(2)), {
      xaxis: {type: "log", range: [Math.log10(0.9), Math.log10(most * 1.25)], tickangle: 0, tickvals: (most > 4 || narrow() ? [1, 2, 5, 10, 20, 50, 100] : [1, 1.2, 1.5, 2, 3]).filter((v) => v < most * 1.25)},
      shapes: [{type: "line", x0: 1, x1: 1, y0: 0, y1: 1, yref: "paper", line: {color: css("--ink"), width: 1.5}}],
    });
    draw("occupancy", bars((n) => data.strategies[n].occupancy, (n) => percent(data.strategies[n].occupancy)), {xaxis: {range: [0, 1.02], tickformat: ".0%"}});
  }

  function step(name) {
    const it = data.drawing[name];
    const widest = [];
    for (const box of it.boxes) widest[box.micro] = Math.max(widest[box.micro] || 0, box.width);
    const all = widest.reduce((a, b) => a + (b || 0), 0), gap = all * 0.008;
    const start = [];
    let x = 0;
    for (let m = 0; m < widest.length; m++) { start[m] = x; x += (widest[m] || 0) + gap; }
    const tallest = Array(it.lanes).fill(1);
    for (const box of it.boxes) tallest[box.rank] = Math.max(tallest[box.rank], it.packed ? 1 : box.lengths.length);
    const base = [];
    let y = 0;
    for (let r = it.lanes - 1; r >= 0; r--) { base[r] = y; y += tallest[r] + Math.max(1, 0.05 * y); }
    const real = {x: [], y: [], base: [], text: []}, pad = {x: [], y: [], base: [], text: []}, shapes = [];
    let tokens = 0, computed = 0;
    for (const box of it.boxes) {
      const left = start[box.micro], rows = it.packed ? 1 : box.lengths.length, top = base[box.rank] + rows;
      shapes.push({type: "rect", x0: left, x1: left + box.width, y0: base[box.rank], y1: top, line: {color: css("--ink"), width: 0.7}});
      let at = left;
      box.lengths.forEach((n, i) => {
        const row = top - (it.packed ? 0 : i) - 0.5;
        real.x.push(n); real.y.push(row); real.base.push(at);
        real.text.push(`rank ${box.rank}, micro-batch ${box.micro}: ${int(n)} tokens`);
        if (it.packed) { at += n; if (i) shapes.push({type: "line", x0: at - n, x1: at - n, y0: base[box.rank], y1: top, line: {color: css("--card"), width: 0.7}}); }
        else if (box.width > n) { pad.x.push(box.width - n); pad.y.push(row); pad.base.push(left + n); pad.text.push(`${int(box.width - n)} padding`); }
        tokens += n;
      });
      computed += box.width * rows;
    }
    const trace = (t, c) => ({type: "bar", orientation: "h", x: t.x, y: t.y, base: t.base, hovertext: t.text, hoverinfo: "text", width: 1, marker: {color: c, line: {width: 0}}});
    draw("rectangles", [trace(real, css("--real")), trace(pad, css("--pad"))], {
      barmode: "overlay", bargap: 0, shapes: shapes, xaxis: {title: {text: "positions"}, showgrid: false, zeroline: false},
      yaxis: {tickvals: base.map((b, r) => b + tallest[r] / 2), ticktext: base.map((_, r) => "rank " + r), showgrid: false, zeroline: false},
    });
    const hidden = (it.drawn_microsteps < it.microsteps ? `: the first ${it.drawn_microsteps} of ${it.microsteps} micro-steps` : "") + (it.lanes < it.ranks ? `${it.drawn_microsteps < it.microsteps ? "," : ":"} ${it.lanes} of ${it.ranks} ranks` : "");
    const busy = {x: [], y: [], base: [], text: []}, wait = {x: [], y: [], base: [], text: []};
    const steps = it.timeline[0].length;
    const slow = Array.from({length: steps}, (_, m) => Math.max(...it.timeline.map((row) => row[m])));
    const ends = it.timeline.map((row) => row.reduce((a, b) => a + b, 0));
    it.timeline.forEach((row, r) => {
      let at = 0;
      row.forEach((cost, m) => {
        busy.x.push(cost); busy.y.push(r); busy.base.push(at); busy.text.push(`rank ${r}, micro-step ${m}: ${int(cost)}`);
        if (it.sync === "microbatch") {
          wait.x.push(slow[m] - cost); wait.y.push(r); wait.base.push(at + cost); wait.text.push(`rank ${r} waits ${int(slow[m] - cost)}`);
          at += slow[m];
        } else at += cost;
      });
      if (it.sync === "step") { wait.x.push(Math.max(...ends) - at); wait.y.push(r); wait.base.push(at); wait.text.push(`rank ${r} waits`); }
    });
    const lane = (t, c) => ({type: "bar", orientation: "h", x: t.x, y: t.y, base: t.base, hovertext: t.text, hoverinfo: "text", width: 0.8, marker: {color: c, line: {color: css("--card"), width: steps > 80 ? 0 : 0.6}}});
    const every = Math.max(1, Math.ceil(it.ranks / 16));
    draw("timeline", [lane(busy, of(name)), lane(wait, css("--pad"))], {
      barmode: "overlay", xaxis: {title: {text: "modelled time, in tokens"}}, yaxis: {autorange: "reversed", tickvals: it.timeline.map((_, r) => r).filter((r) => r % every === 0), ticktext: it.timeline.map((_, r) => "rank " + r).filter((_, r) => r % every === 0), showgrid: false},
    });
    const waited = wait.x.reduce((a, b) => a + b, 0), worked = busy.x.reduce((a, b) => a + b, 0);
    $("step-text").textContent = `${name}: ${percent(tokens / computed)} of the area is real tokens (drawn${hidden || ": all ranks and micro-steps"}). ${it.microsteps} micro-steps; ranks wait ${percent(waited / (waited + worked))} of the time.`;
    $("rectangles").setAttribute("aria-label", `Micro-batches of ${name} as rectangles: ${percent(tokens / computed)} of the area is real tokens`);
    $("timeline").setAttribute("aria-label", `Time of each rank with ${name}: ${percent(waited / (waited + worked))} waiting`);
  }

  const sweep = data.sweep, swept = Object.keys(sweep.strategies);
  function budgets(index) {
    const x = sweep.budgets, at = x[index];
    const traces = (key, form) => swept.map((n) => ({
      type: "scatter", mode: "lines+markers", name: n, x: x, y: sweep.strategies[n][key], line: {color: of(n), width: 2},
      marker: {size: x.map((_, i) => (i === index ? 12 : 5)), color: of(n)}, hovertemplate: `${n}: %{y${form}}<extra>budget %{x:,}</extra>`,
    }));
    const ticks = x.filter((_, i) => i % (narrow() ? 4 : 2) === index % (narrow() ? 4 : 2));
    const more = (yaxis) => ({
      showlegend: true, legend: {orientation: "h", y: 1.02, yanchor: "bottom", x: 0}, margin: {l: 8, r: 12, t: 30, b: 36},
      xaxis: {type: "log", tickvals: ticks, ticktext: ticks.map(int)}, yaxis: yaxis,
      shapes: [{type: "line", x0: at, x1: at, y0: 0, y1: 1, yref: "paper", line: {color: css("--soft"), width: 1, dash: "dot"}}],
    });
    draw("sweep-occupancy", traces("occupancy", ":.1%"), more({tickformat: ".0%"}));
    draw("sweep-microbatches", traces("microbatches", ":.1f"), more({type: "log", tickvals: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000]}));
    const say = (n) => `${n} ${percent(sweep.strategies[n].occupancy[index])} in ${sweep.strategies[n].microbatches[index].toFixed(1)} micro-batches`;
    const told = `${int(at)} tokens: ` + swept.map(say).join("; ") + ".";
    $("budget-text").textContent = told;
    $("budget").setAttribute("aria-valuetext", int(at) + " tokens");
  }

  const select = $("strategy");
  for (const name of Object.keys(data.drawing)) select.add(new Option(name, name));
  select.value = data.drawing[data.recommendation.strategy] ? data.recommendation.strategy : data.setup.current;
  select.addEventListener("change", () => step(select.value));
  const slider = $("budget");
  slider.max = sweep.budgets.length - 1;
  slider.value = sweep.chosen;
  slider.addEventListener("input", () => budgets(Number(slider.value)));

  function everything() { histogram(); comparison(); step(select.value); budgets(Number(slider.value)); }
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const theme = (value) => { root.dataset.theme = value; everything(); };
  dark.addEventListener("change", () => theme(dark.matches ? "dark" : "light"));
  $("theme").addEventListener("click", () => theme(root.dataset.theme === "dark" ? "light" : "dark"));
  theme(dark.matches ? "dark" : "light");
  root.dataset.ready = "yes";
})();
