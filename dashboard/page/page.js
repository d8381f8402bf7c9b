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

let points = [], stride = 0, charts = {};

// A chart is a picture for those who see it, and a table with the same numbers for everybody.
function chart(key, title, series) {
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
  section.append(head, box, legend, button, wrap); $('charts').append(section);
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
  c.body.replaceChildren(...points.slice(-100).reverse().map((p) => {
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
  if (charts.loss && charts.loss.series.length < lossSeries.length) rebuild('loss');
  draw(chart('loss', 'Loss', lossSeries));
  draw(chart('rate', 'Examples per second', [{ label: 'examples/s', color: 'update', value: (p) => p.examples_per_second, text: number }]));
  draw(chart('shares', 'Where a step goes (worker 0)', ['compute', 'wait', 'input'].map((k) => ({ label: k,
    color: k === 'wait' ? 'other' : k, value: (p) => 100 * p[k + '_share'], text: (x) => x.toFixed(0) + ' %' }))));
  for (const m of metrics) draw(chart('m-' + m, m, [{ label: m, color: 'compute', value: (p) => (p.metrics || {})[m], text: number }]
    .concat([{ label: 'val_' + m, color: 'input', value: (p) => (p.validation || {})[m], text: number }])));
}

function rebuild(key) { const c = charts[key]; c.plot.destroy(); c.box.closest('section').remove(); delete charts[key]; }

function lane(w) {
  const box = make('div', undefined, 'lane');
  const parts = ['input', 'compute', 'update', 'other', 'wait'];
  box.setAttribute('role', 'img');
  box.setAttribute('aria-label', parts.map((p) => p + ' ' + percent(w[p + '_share'])).join(', '));
  for (const p of parts) { const i = make('i', undefined, 'p-' + p); i.style.width = 100 * w[p + '_share'] + '%'; box.append(i); }
  return box;
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
  $('now').replaceChildren(...items.map(([name, value]) => { const d = make('div'); d.append(make('dt', name), make('dd', value)); return d; }));
  $('workers').tBodies[0].replaceChildren(...job.workers.map((w) => {
    const slow = job.straggler && job.straggler.worker === w.worker;
    const row = make('tr', undefined, slow || w.state === 'silent' ? 'slow' : ''), th = make('th', w.worker + (slow ? ' (slow)' : ''));
    th.scope = 'row';
    const step = make('td'); step.append(lane(w));
    row.append(th, make('td', w.host || '–'), make('td', w.state), make('td', w.phase || '–'), make('td', w.step, 'n'), step,
      make('td', seconds(w.own_seconds), 'n'), make('td', percent(w.wait_share), 'n'),
      make('td', w.heartbeat_age_seconds.toFixed(1) + ' s', 'n'), make('td', bytes(w.memory_bytes), 'n'),
      make('td', w.cpus ? w.cpus.toFixed(1) : '–', 'n'));
    return row;
  }));
  const problems = [];
  if (job.straggler) { const s = job.straggler;
    problems.push('Worker ' + s.worker + ' is slow, and the others wait for it: ' + seconds(s.own_ns / 1e9) + ' of its own work a step, the others ' +
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
  source.onopen = () => { stride = 0; }; // a stream begins with all points, which replace those of the one before
  source.onmessage = (event) => {
    const m = JSON.parse(event.data);
    points = m.stride === stride ? points.concat(m.points) : m.points;
    stride = m.stride;
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
