// Draws each chart of a page with uPlot: lines with their intervals as bands, or areas upon one another. Below a chart stand the
// values at the pointer; its table, in the page, has all of them.
"use strict";
const HEIGHT = 150;
const WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000];
const colour = name => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const brief = value => (value == null ? "" : Number(value.toPrecision(4)).toString());

function layers(chart) { // data and series of uPlot
  const data = [chart.x], series = [{}], bands = [];
  if (chart.stacked) { // the highest first, each painted over by the next
    const step = chart.x.length > 1 ? chart.x[1] - chart.x[0] : 1;
    data[0] = [...chart.x, chart.x[chart.x.length - 1] + step];
    let below = chart.x.map(() => 0);
    const sums = chart.series.map(line => (below = below.map((sum, at) => sum + line.values[at])));
    for (let at = sums.length - 1; at >= 0; at--) {
      const paint = colour(`s${chart.series[at].colour}`);
      data.push([...sums[at], sums[at][sums[at].length - 1]]);
      series.push({ stroke: paint, fill: paint, width: 0, points: { show: false }, paths: uPlot.paths.stepped({ align: 1 }) });
    }
    return { data, series, bands };
  }
  for (const line of chart.series) {
    const stroke = colour(`s${line.colour}`);
    data.push(line.values);
    series.push({ stroke, width: 1.6, spanGaps: true, points: { show: chart.x.length <= 60, size: 4, fill: stroke } });
    if (line.low) {
      data.push(line.high, line.low);
      series.push({ width: 0, spanGaps: true, points: { show: false } }, { width: 0, spanGaps: true, points: { show: false } });
      bands.push({ series: [data.length - 2, data.length - 1], fill: `${stroke}2b` });
    }
  }
  return { data, series, bands };
}

function told(chart, at) { // the values at one place of the x axis
  const parts = chart.series.map(line => {
    const value = line.values[at];
    if (value == null || (chart.stacked && !value)) return "";
    const within = line.low && line.low[at] != null ? ` (${brief(line.low[at])} to ${brief(line.high[at])})` : "";
    return `${line.name} ${brief(value)}${within}`;
  });
  return `${chart.labels[at]}: ${parts.filter(Boolean).join(", ") || "nothing"}`;
}

function draw(node) {
  const chart = JSON.parse(node.dataset.chart);
  const words = document.createElement("p");
  words.className = "told";
  const last = chart.x[chart.x.length - 1];
  const mark = x => (x > last ? "" : Number.isInteger(x) ? `v${x}` : "");
  const axis = { stroke: colour("soft"), grid: { stroke: colour("line"), width: 0.7 }, ticks: { show: false }, font: "10px sans-serif" };
  const padded = (u, low, high) => {
    if (low == null) return [0, 1];
    if (chart.zero) { low = Math.min(low, 0); high = Math.max(high, 0); }
    const pad = (high - low) * 0.05 || Math.abs(high) * 0.05 || 0.5;
    return [chart.zero && low === 0 ? 0 : low - pad, high + pad];
  };
  const { data, series, bands } = layers(chart);
  const plot = new uPlot({
    width: node.clientWidth, height: HEIGHT, series, bands, legend: { show: false },
    cursor: { y: false, drag: { x: false, y: false }, points: { show: !chart.stacked } },
    scales: { x: { time: false, range: (u, low, high) => (low === high ? [low - 0.5, high + 0.5] : [low, high]) }, y: { range: padded } },
    axes: [
      { ...axis, size: 24, incrs: WHOLE, values: (u, marks) => marks.map(mark) },
      { ...axis, size: 46, values: (u, marks) => marks.map(brief) },
    ],
    hooks: { setCursor: [u => { words.textContent = u.cursor.idx == null ? "" : told(chart, Math.min(u.cursor.idx, chart.labels.length - 1)); }] },
  }, data, node);
  node.append(words);
  return plot;
}

const nodes = [...document.querySelectorAll("[data-chart]")];
let plots = nodes.map(draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  plots.forEach(plot => plot.destroy());
  nodes.forEach(node => node.replaceChildren());
  plots = nodes.map(draw);
});
addEventListener("resize", () => plots.forEach((plot, at) => plot.setSize({ width: nodes[at].clientWidth, height: HEIGHT })));
