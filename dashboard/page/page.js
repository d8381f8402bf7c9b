'use strict';
// The page shows what the server sends; it keeps only the points of the charts.
const $ = (id) => document.getElementById(id);
const make = (tag, text, cls) => { const e = document.createElement(tag); if (text !== undefined) e.textContent = text;
  if (cls) e.className = cls; return e; };
const percent = (x) => (100 * x).toFixed(0) + ' %';
const number = (x, digits) => x === null || x === undefined ? '–' :
  Math.abs(x) >= 1000 ? Math.round(x).toLocaleString('en') : Number(x.toPrecision(digits || 4)).toString();
const bytes = (x) => !x ? '–' : x >= 1 << 30 ? (x / (1 << 30)).toFixed(1) + ' GiB' : Math.round(x / (1 << 20)) + ' MiB';
const seconds = (x) => !x ? '–' : x < 0.001 ? (1e6 * x).toFixed(0) + ' µs' : x < 1 ? (1e3 * x).toFixed(1) + ' ms' : x.toFixed(2) + ' s';
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue('--' + name).trim();

const duration = (x) => { x = Math.round(x);
  const h = Math.floor(x / 3600), m = Math.floor(x % 3600 / 60), two = (n) => String(n).padStart(2, '0');
  return h ? h + ' h ' + two(m) + ' min' : m ? m + ' min ' + two(x % 60) + ' s' : x + ' s'; };

let points = [], measured = [], series = 0, charts = {}, smoothing = 0;
let steps = []; // {step, p: its point, m: what was measured at it}, in order; p or m may be missing

// A chart is a picture for those who see it, and a table with the same numbers for everybody. It is made anew if its
// title or its series change.
function chart(key, title, unit, series, log) {
  const signature = [title, unit, ...series.map((s) => s.label)].join();
  let c = charts[key], before = null;
  if (c && c.signature === signature) return draw(c);
  if (c) { before = c.section.nextSibling; if (c.plot) c.plot.destroy(); c.section.remove(); }
  const section = make('section'), head = make('h2', title), id = key.replace(/[^a-z0-9]/gi, '-');
  head.id = 'h-' + id; section.setAttribute('aria-labelledby', head.id);
  const box = make('div', undefined, 'chart'); box.setAttribute('role', 'img');
  const wrap = make('div', undefined, 'table'); wrap.hidden = true; wrap.tabIndex = 0; wrap.setAttribute('role', 'region');
  wrap.setAttribute('aria-label', title + ', numbers');
  const table = make('table'), body = make('tbody'), row = make('tr');
  for (const name of ['Step', ...series.map((s) => s.label)]) {
    const th = make('th', name, name === 'Step' ? '' : 'n'); th.scope = 'col'; row.append(th);
  }
  const thead = make('thead'); thead.append(row); table.append(thead, body); wrap.append(table);
  const legend = make('p', undefined, 'legend'); legend.setAttribute('aria-hidden', 'true');
  for (const s of series) { const i = make('i'); i.style.background = 'var(--' + s.color + ')'; legend.append(i, s.label + ' '); }
  c = charts[key] = { signature, unit, series, section, box, body, wrap, title, log: c && c.log };
  const bar = make('div', undefined, 'tools');
  const numbersButton = button('Show the numbers', 'b-' + id, (b) => {
    wrap.hidden = !wrap.hidden;
    b.setAttribute('aria-expanded', String(!wrap.hidden));
    b.textContent = wrap.hidden ? 'Show the numbers' : 'Hide the numbers';
    numbers(c);
  });
  numbersButton.setAttribute('aria-expanded', 'false');
  bar.append(numbersButton);
  if (log) {
    const logButton = button('Logarithmic', 'l-' + id, (b) => {
      c.log = !c.log;
      b.setAttribute('aria-pressed', String(c.log));
      redraw(c);
    });
    logButton.setAttribute('aria-pressed', String(!!c.log));
    bar.append(logButton);
  }
  section.append(head, box, legend, bar, wrap); $('charts').insertBefore(section, before);
  draw(c);
}

function button(text, id, click) {
  const b = make('button', text); b.type = 'button'; b.id = id;
  b.addEventListener('click', () => click(b));
  return b;
}

// smooth returns the moving average of values, as TensorBoard has it: each step weighs less than the next one by the
// factor, and missing values stay missing.
function smooth(values, factor) {
  let sum = 0, weight = 0;
  return values.map((x) => {
    if (x === null) return null;
    sum = factor * sum + (1 - factor) * x; weight = factor * weight + 1 - factor;
    return sum / weight;
  });
}

// draw shows each series twice: the values, and above them their moving average, if there is smoothing.
function draw(c) {
  const rows = c.rows = steps.filter((r) => c.series.some((s) => s.value(r) !== null));
  const data = [rows.map((r) => r.step)];
  for (const s of c.series) {
    const values = rows.map((r) => { const x = s.value(r); return c.log && x <= 0 ? null : x; });
    data.push(values, s.marks || !smoothing ? values.map(() => null) : smooth(values, smoothing));
  }
  const last = c.series.map((s) => s.label + ' ' + s.text(rows.reduce((x, r) => { const y = s.value(r); return y === null ? x : y; }, null)));
  c.box.setAttribute('aria-label', c.title + ' by step. Last: ' + last.join(', '));
  if (!c.plot) {
    const axis = { stroke: color('soft'), grid: { stroke: color('line'), width: 1 }, ticks: { stroke: color('line') },
      font: '12px system-ui, sans-serif', labelFont: '12px system-ui, sans-serif', labelSize: 18 };
    const lines = c.series.flatMap((s) => [
      { stroke: color(s.color), width: s.marks ? 1.5 : smoothing ? 1 : 2, alpha: smoothing && !s.marks ? 0.35 : 1, spanGaps: true,
        points: { show: !!s.marks, size: 6, fill: color(s.color) } },
      { stroke: color(s.color), width: 2, spanGaps: true, points: { show: false } }]);
    c.plot = new uPlot({ width: c.box.clientWidth || 300, height: 240, cursor: { show: true },
      scales: { x: { time: false }, y: c.log ? { distr: 3 } : {} },
      axes: [{ ...axis, size: 32, label: 'step' },
        { ...axis, size: (u, texts) => 24 + 7 * Math.max(...(texts || ['']).map((s) => s.length)), label: c.unit, values: ticks }],
      series: [{}, ...lines] }, data, c.box);
  } else c.plot.setData(data);
  numbers(c);
}

// ticks formats the numbers of an axis with as many digits as distinguish them. On a logarithmic axis some are null.
function ticks(plot, list) {
  const step = Math.abs(list[1] - list[0]), most = Math.max(...list.map(Math.abs));
  const digits = plot.scales.y.distr !== 3 && step > 0 ? Math.min(12, Math.max(1, Math.ceil(Math.log10(most / step)) + 1)) : 3;
  return list.map((x) => x === null ? '' : number(x, digits));
}

function redraw(c) {
  if (c.plot) c.plot.destroy();
  c.plot = null;
  draw(c);
}

function numbers(c) {
  if (c.wrap.hidden) return;
  if (c.shown !== series) { c.body.replaceChildren(); c.shown = series; } // else rows are added, changed and removed
  const want = new Map(c.rows.slice(-100).map((r) => [String(r.step), r]));
  for (const row of [...c.body.rows]) {
    const r = want.get(row.cells[0].textContent);
    if (!r) { row.remove(); continue; }
    c.series.forEach((s, i) => set(row.cells[i + 1], s.text(s.value(r))));
    want.delete(row.cells[0].textContent);
  }
  c.body.prepend(...[...want.values()].reverse().map((r) => {
    const row = make('tr'), th = make('th', r.step); th.scope = 'row'; row.append(th);
    for (const s of c.series) row.append(make('td', s.text(s.value(r)), 'n'));
    return row;
  }));
}

// lineOf returns a series of what a step has; missing values are null.
const lineOf = (label, color, value, text) => ({ label, color, text: text || number,
  value: (r) => { const x = value(r); return x === undefined ? null : x; } });
const validationOf = (name) => ({ ...lineOf('val_' + name, 'input', (r) => r.m && (r.m.validation || {})[name]), marks: true });

function drawAll(unit) {
  const bySteps = new Map(points.map((p) => [p.step, { step: p.step, p }]));
  for (const m of measured) bySteps.set(m.step, { step: m.step, ...bySteps.get(m.step), m });
  steps = [...bySteps.values()].sort((a, b) => a.step - b.step);
  const metrics = new Set(), val = new Set();
  for (const m of measured) {
    Object.keys(m.metrics || {}).forEach((name) => metrics.add(name));
    Object.keys(m.validation || {}).forEach((name) => val.add(name));
  }
  const loss = [lineOf('loss', 'compute', (r) => r.p && r.p.loss)];
  if (val.has('loss')) loss.push(validationOf('loss'));
  chart('loss', 'Loss', 'loss of a batch', loss, true);
  for (const name of metrics) {
    chart('m-' + name, name, name + ', epoch so far',
      [lineOf(name, 'compute', (r) => r.m && (r.m.metrics || {})[name])].concat(val.has(name) ? [validationOf(name)] : []), true);
  }
  if (measured.some((m) => m.learning_rate !== undefined))
    chart('learning', 'Learning rate', 'learning rate', [lineOf('learning rate', 'compute', (r) => r.m && r.m.learning_rate)], true);
  chart('rate', unit[0].toUpperCase() + unit.slice(1) + ' per second', unit + ' / s',
    [lineOf(unit + '/s', 'update', (r) => r.p && r.p.examples_per_second)]);
  chart('shares', 'Where a step goes (worker 0)', '% of a step', ['compute', 'wait', 'input'].map((k) =>
    lineOf(k, k === 'wait' ? 'other' : k, (r) => r.p && 100 * r.p[k + '_share'], (x) => x === null ? '–' : x.toFixed(0) + ' %')));
  all(fit);
}

// Elements are changed in place, and only if their content changes, so that a screen reader keeps its place.
function set(e, text, cls) {
  text = String(text);
  if (e.textContent !== text) e.textContent = text;
  if (cls !== undefined && e.className !== cls) e.className = cls;
}

function terms(list, items) {
  while (list.children.length > items.length) list.lastChild.remove();
  items.forEach(([name, value], i) => {
    let d = list.children[i];
    if (!d) { d = make('div'); d.append(make('dt'), make('dd')); list.append(d); }
    set(d.children[0], name); set(d.children[1], value);
  });
}

const parts = ['input', 'compute', 'update', 'other', 'wait'];
function lane(box, w) {
  if (!box.firstChild) { box.setAttribute('role', 'img'); for (const p of parts) box.append(make('i', undefined, 'p-' + p)); }
  const label = parts.map((p) => p + ' ' + percent(w[p + '_share'])).join(', ');
  if (box.getAttribute('aria-label') !== label) box.setAttribute('aria-label', label);
  parts.forEach((p, i) => { box.children[i].style.width = 100 * w[p + '_share'] + '%'; });
}

function rows(body, workers, straggler) {
  while (body.rows.length > workers.length) body.lastChild.remove();
  workers.forEach((w, i) => {
    let row = body.rows[i];
    if (!row) {
      row = make('tr'); const th = make('th'); th.scope = 'row'; row.append(th);
      for (const cls of ['', '', '', 'n', '', 'n', 'n', 'n', 'n', 'n']) row.append(make('td', undefined, cls));
      row.cells[5].append(make('div', undefined, 'lane'));
      body.append(row);
    }
    const slow = straggler && (straggler.worker === w.worker || (straggler.link || []).includes(w.worker)), c = row.cells;
    if (row.className !== (slow || w.state === 'silent' ? 'slow' : '')) row.className = slow || w.state === 'silent' ? 'slow' : '';
    set(c[0], w.worker + (slow ? ' (slow)' : '')); set(c[1], w.host || '–'); set(c[2], w.state); set(c[3], w.phase || '–');
    set(c[4], w.step); lane(c[5].firstChild, w); set(c[6], seconds(w.own_seconds)); set(c[7], percent(w.wait_share));
    set(c[8], w.heartbeat_age_seconds.toFixed(1) + ' s'); set(c[9], bytes(w.memory_bytes));
    set(c[10], w.cpus ? w.cpus.toFixed(1) : '–');
  });
}

function show(job, unit) {
  $('job').textContent = job.job;
  document.title = job.job + ' – Lockstep';
  const t = job.training, items = [];
  if (t) {
    items.push(['Epoch', t.epoch + (t.epochs > 0 ? ' of ' + t.epochs : '')],
      ['Elapsed', duration(t.elapsed_seconds)], ['Left, about', t.left_seconds === undefined ? '–' : duration(t.left_seconds)],
      ['Loss', number(t.loss)]);
    for (const [name, x] of Object.entries(t.metrics || {})) items.push([name, number(x)]);
    for (const [name, x] of Object.entries(t.validation || {})) items.push(['val_' + name, number(x)]);
  }
  items.push(['Step', number(job.step)], ['Time of a step', seconds(job.step_seconds)],
    [unit[0].toUpperCase() + unit.slice(1) + '/s', number(job.examples_per_second, 3)], ['Restarts', job.restarts]);
  if (t && t.learning_rate !== undefined) items.push(['Learning rate', number(t.learning_rate)]);
  if (job.workers.length) items.push(['Wait of worker 0', percent(job.workers[0].wait_share)]);
  terms($('now'), items);
  const settings = Object.entries((t && t.settings) || {});
  terms($('settings'), settings);
  $('settings').closest('section').hidden = !settings.length;
  rows($('workers').tBodies[0], job.workers, job.straggler);
  const problems = [];
  if (job.problem) problems.push('The state is not current: ' + job.problem + '.');
  if (job.straggler) { const s = job.straggler;
    if (s.cause.startsWith('link')) problems.push((s.link ? 'The network link from worker ' + s.link[0] + ' to worker ' + s.link[1] + ' is' :
      'The network links of worker ' + s.worker + ' are') + ' slow, and all workers wait for ' + (s.link ? 'it: its' : 'them: their') + ' data takes ' + seconds(s.own_ns / 1e9) +
      ' a step, on the other links ' + seconds(s.others_ns / 1e9) + '.');
    else problems.push('Worker ' + s.worker + ' is slow, and the others wait for it: ' + seconds(s.own_ns / 1e9) + ' of its own work a step, the others ' +
      seconds(s.others_ns / 1e9) + '. Cause: ' + s.cause + '.'); }
  for (const w of job.workers) if (w.state === 'silent') problems.push('Worker ' + w.worker + ' sends no heartbeats.');
  const text = problems.join(' '), alert = $('alert');
  if (alert.textContent.replace(/[\d.]+ (ms|s|µs)/g, '') !== text.replace(/[\d.]+ (ms|s|µs)/g, '')) alert.textContent = text;
  alert.hidden = !text;
  const list = $('events');
  const key = job.events.length + ' ' + (job.events.length ? job.events[job.events.length - 1].at : '');
  if (list.dataset.key !== key) {
    list.dataset.key = key;
    list.replaceChildren(...job.events.slice().reverse().map((e) => {
      const item = make('li', undefined, e.warning ? 'bad' : ''), at = make('time', new Date(e.at).toLocaleTimeString('en-GB'));
      at.dateTime = e.at; item.append(at, ' ' + e.text); return item;
    }));
  }
}

function connect() {
  const source = new EventSource('api/events');
  source.onopen = () => { series = 0; }; // a stream begins with all points, which replace those of the one before
  source.onmessage = (event) => {
    const m = JSON.parse(event.data);
    const same = m.series === series, first = m.measured.length ? m.measured[0].step : Infinity;
    points = same ? points.concat(m.points) : m.points;
    measured = same ? measured.filter((x) => x.step < first).concat(m.measured) : m.measured; // the last may have changed
    series = m.series;
    const unit = (m.job.training && m.job.training.unit) || 'examples';
    $('state').textContent = 'Live: ' + m.job.workers.length + (m.job.workers.length === 1 ? ' worker' : ' workers');
    show(m.job, unit);
    drawAll(unit);
  };
  source.onerror = () => {
    $('state').textContent = 'The connection is lost: the job has ended, or cannot be reached. Trying again …';
    if (source.readyState === EventSource.CLOSED) setTimeout(connect, 3000); // after an error code, browsers give up
  };
}
const all = (f) => { for (const c of Object.values(charts)) f(c); };
// The width of a box changes with the window, and when the first charts become two columns.
const fit = (c) => { if (c.plot && c.plot.width !== c.box.clientWidth) c.plot.setSize({ width: c.box.clientWidth, height: 240 }); };
addEventListener('resize', () => all(fit));
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => all(redraw));
$('smoothing').addEventListener('input', (event) => {
  smoothing = Number(event.target.value);
  $('smoothed').textContent = smoothing ? smoothing.toFixed(2) : 'off';
  all(redraw);
});
connect();
