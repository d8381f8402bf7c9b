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

let points = [], series = 0, charts = {};

// A chart is a picture for those who see it, and a table with the same numbers for everybody.
function chart(key, title, series, before) {
  if (charts[key]) return charts[key];
  const section = make('section'), head = make('h2', title);
  head.id = 'h-' + key.replace(/[^a-z0-9]/gi, '-'); section.setAttribute('aria-labelledby', head.id);
  const box = make('div', undefined, 'chart'); box.setAttribute('role', 'img');
  const button = make('button', 'Show the numbers'); button.type = 'button'; button.setAttribute('aria-expanded', 'false');
  button.id = 'b-' + key.replace(/[^a-z0-9]/gi, '-');
  const wrap = make('div', undefined, 'table'); wrap.hidden = true; wrap.tabIndex = 0; wrap.setAttribute('role', 'region');
  wrap.setAttribute('aria-label', title + ', numbers');
  const table = make('table'), body = make('tbody'), row = make('tr');
  for (const name of ['Step', ...series.map((s) => s.label)]) { const th = make('th', name); th.scope = 'col'; row.append(th); }
  const thead = make('thead'); thead.append(row); table.append(thead, body); wrap.append(table);
  const legend = make('p', undefined, 'legend'); legend.setAttribute('aria-hidden', 'true');
  for (const s of series) { const i = make('i'); i.style.background = 'var(--' + s.color + ')'; legend.append(i, s.label + ' '); }
  section.append(head, box, legend, button, wrap); $('charts').insertBefore(section, before || null);
  const c = charts[key] = { series, box, body, wrap, title };
  button.addEventListener('click', () => {
    wrap.hidden = !wrap.hidden;
    button.setAttribute('aria-expanded', String(!wrap.hidden));
    button.textContent = wrap.hidden ? 'Show the numbers' : 'Hide the numbers';
    numbers(c);
  });
  return c;
}

function draw(c) {
  const data = [points.map((p) => p.step), ...c.series.map((s) => points.map((p) => { const x = s.value(p); return x === undefined ? null : x; }))];
  const last = c.series.map((s) => { const p = points[points.length - 1]; return p ? s.label + ' ' + s.text(s.value(p)) : ''; });
  c.box.setAttribute('aria-label', c.title + ' by step. Last: ' + last.join(', '));
  if (!c.plot) {
    const axis = { stroke: color('soft'), grid: { stroke: color('line'), width: 1 }, ticks: { stroke: color('line') }, size: 60 };
    c.plot = new uPlot({ width: c.box.clientWidth || 300, height: 220, cursor: { show: true }, scales: { x: { time: false } },
      axes: [{ ...axis, size: 40 }, axis],
      series: [{}, ...c.series.map((s) => ({ label: s.label, stroke: color(s.color), width: 2, spanGaps: true }))] }, data, c.box);
  } else c.plot.setData(data);
  numbers(c);
}

function numbers(c) {
  if (c.wrap.hidden) return;
  if (c.shown !== series) { c.body.replaceChildren(); c.shown = series; } // else rows are added and removed
  const want = new Map(points.slice(-100).map((p) => [String(p.step), p]));
  for (const row of [...c.body.rows]) if (!want.delete(row.cells[0].textContent)) row.remove();
  c.body.prepend(...[...want.values()].reverse().map((p) => {
    const row = make('tr'), th = make('th', p.step); th.scope = 'row'; row.append(th);
    for (const s of c.series) row.append(make('td', s.text(s.value(p)), 'n'));
    return row;
  }));
}

function drawAll() {
  const metrics = new Set(), val = new Set();
  const p = points[points.length - 1];
  if (p) { Object.keys(p.metrics || {}).forEach((m) => metrics.add(m)); Object.keys(p.validation || {}).forEach((m) => val.add(m)); }
  const lossSeries = [{ label: 'loss', color: 'compute', value: (p) => p.loss, text: number }];
  if (val.has('loss') || (charts.loss && charts.loss.series.length > 1))
    lossSeries.push({ label: 'val_loss', color: 'input', value: (p) => (p.validation || {}).loss, text: number });
  const before = charts.loss && charts.loss.series.length < lossSeries.length ? rebuild('loss') : null;
  draw(chart('loss', 'Loss', lossSeries, before));
  draw(chart('rate', 'Examples per second', [{ label: 'examples/s', color: 'update', value: (p) => p.examples_per_second, text: number }]));
  draw(chart('shares', 'Where a step goes (worker 0)', ['compute', 'wait', 'input'].map((k) => ({ label: k,
    color: k === 'wait' ? 'other' : k, value: (p) => 100 * p[k + '_share'], text: (x) => x.toFixed(0) + ' %' }))));
  for (const m of metrics) draw(chart('m-' + m, m, [{ label: m, color: 'compute', value: (p) => (p.metrics || {})[m], text: number }]
    .concat([{ label: 'val_' + m, color: 'input', value: (p) => (p.validation || {})[m], text: number }])));
}

// rebuild removes a chart and returns what follows it.
function rebuild(key) {
  const c = charts[key], section = c.box.closest('section'), next = section.nextSibling;
  c.plot.destroy(); section.remove(); delete charts[key];
  return next;
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

function show(job) {
  $('job').textContent = job.job;
  document.title = job.job + ' – Lockstep';
  const t = job.training, items = [];
  if (t) {
    items.push(['Epoch', t.epoch + (t.epochs > 0 ? ' of ' + t.epochs : '')], ['Loss', number(t.loss)]);
    for (const [name, x] of Object.entries(t.metrics || {})) items.push([name, number(x)]);
    for (const [name, x] of Object.entries(t.validation || {})) items.push(['val_' + name, number(x)]);
  }
  items.push(['Step', number(job.step)], ['Time of a step', seconds(job.step_seconds)],
    ['Examples/s', number(job.examples_per_second, 3)], ['Restarts', job.restarts]);
  if (job.workers.length) items.push(['Wait of worker 0', percent(job.workers[0].wait_share)]);
  terms($('now'), items);
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
    points = m.series === series ? points.concat(m.points) : m.points;
    series = m.series;
    $('state').textContent = 'Live: ' + m.job.workers.length + (m.job.workers.length === 1 ? ' worker' : ' workers');
    show(m.job);
    drawAll();
  };
  source.onerror = () => {
    $('state').textContent = 'The connection is lost: the job has ended, or cannot be reached. Trying again …';
    if (source.readyState === EventSource.CLOSED) setTimeout(connect, 3000); // after an error code, browsers give up
  };
}
connect();
addEventListener('resize', () => { for (const c of Object.values(charts)) if (c.plot) c.plot.setSize({ width: c.box.clientWidth, height: 220 }); });
