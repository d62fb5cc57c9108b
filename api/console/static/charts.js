// Charts of elements with data-chart: {x: [seconds since 1970], series: [{label, values, colour}], unit, stacked}.
// A colour is the name of a custom property of console.css. After each swap, charts that have changed are redrawn.
(() => {
  const drawn = new WeakMap();

  function colour(element, name) {
    return getComputedStyle(element).getPropertyValue(name).trim();
  }

  // Stacked series are each drawn on top of those before; the last is drawn first, below all others.
  function stack(series) {
    const sums = [];
    return series.map(({ values }) => values.map((value, place) => (sums[place] = (sums[place] ?? 0) + (value ?? 0))));
  }

  function tell(value, unit) {
    if (value == null) return "–";
    const digits = Math.abs(value) >= 10 ? 0 : 2;
    return value.toLocaleString("en", { maximumFractionDigits: digits }) + (unit ? ` ${unit}` : "");
  }

  // Times are UTC, as in the words of these pages; `step` is from one tick to the next, in seconds.
  function tellTime(tick, step) {
    const text = new Date(tick * 1000).toISOString();
    return step >= 86400 ? text.slice(0, 10) : text.slice(11, step < 60 ? 19 : 16);
  }

  function options(place, data, width, height) {
    const axis = { stroke: colour(place, "--pico-muted-color"), grid: { stroke: colour(place, "--rule"), width: 1 },
      ticks: { show: false }, font: "12px system-ui, sans-serif" };
    const order = data.stacked ? [...data.series].reverse() : data.series;
    const series = order.map(({ label, colour: name, values }) => {
      const stroke = colour(place, name ?? "--pico-primary");
      return { label, stroke, width: data.stacked ? 0 : 2, fill: data.stacked ? stroke : `${stroke}22`,
        points: { show: data.points ?? false }, paths: data.points ? () => null : undefined,
        value: (plot, _, index, at) => tell(at == null ? null : values[at], data.unit) };
    });
    const isTime = data.time ?? true;
    const across = isTime ? { ...axis, space: 80, values: (plot, ticks, place, space, step) => ticks.map((tick) => tellTime(tick, step)) } : axis;
    const moment = isTime ? { label: "UTC", value: (plot, tick) => (tick == null ? "–" : tellTime(tick, 1)) } : {};
    return { width, height, tzDate: (seconds) => uPlot.tzDate(new Date(seconds * 1000), "Etc/UTC"), legend: { show: data.legend ?? data.series.length > 1 }, cursor: { y: false },
      scales: { x: { time: isTime }, y: { range: (plot, low, high) => [Math.min(low, 0), data.most ?? (high * 1.08 || 1)] } },
      axes: [across, { ...axis, size: 64, values: (plot, ticks) => ticks.map((tick) => tell(tick, data.unit)) }],
      series: [moment, ...series] };
  }

  function draw(element) {
    const text = element.dataset.chart;
    const place = element.querySelector(".plot");
    const height = Number(element.dataset.height ?? 180);
    const width = Math.max(place.clientWidth, 120);
    const before = drawn.get(element);
    if (before && before.text === text && before.width === width) return;
    const data = JSON.parse(text);
    const values = data.stacked ? stack(data.series).reverse() : data.series.map((one) => one.values);
    before?.plot.destroy();
    place.replaceChildren();
    const plot = new uPlot(options(place, data, width, height), [data.x, ...values], place);
    drawn.set(element, { text, width, plot });
  }

  function drawAll(anew) {
    for (const element of document.querySelectorAll("[data-chart]")) {
      if (anew) {
        drawn.get(element)?.plot.destroy();
        drawn.delete(element);
      }
      draw(element);
    }
  }

  document.addEventListener("htmx:after:swap", () => drawAll(false));
  document.addEventListener("vectormill:theme", () => drawAll(true));
  addEventListener("resize", () => drawAll(false));
  drawAll(false);
})();
